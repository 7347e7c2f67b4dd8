"""More live sessions than the engine's pool holds, on the real host: each step as if alone."""

import pytest
from engine import all_free
from omni_tiny.crowd import Crowd, differing
from profiles import LONG

pytestmark = pytest.mark.host

MANY = Crowd(sessions=200, steps=5)
ROOM = 3
OPTIONS = {"host_budget": "64GiB"}


def all_together(model, crowd):
    """Every output, and the manager's figures before the sessions are closed; then nothing is left."""
    manager, outputs = model.pipeline._memory_manager, {}
    for turn, key in enumerate(crowd.order()):
        outputs[key] = crowd.run(model, key)
        assert len(model.runner._sessions) <= ROOM
        if turn % crowd.sessions == 0:
            manager.check()
    stats = manager.stats()
    for session in crowd.names:
        model.close(session)
    assert manager.stats()["total_nbytes"] == manager.stats()["sessions"] == 0
    assert model.runner._sessions == {}
    all_free(model.runner.kv_cache)
    if manager.offloader:
        assert manager.offloader.host.nbytes == 0
    manager.check()
    return outputs, stats


def test_a_pool_for_three_serves_them_all_bit_for_bit(crowd, alone, load):
    outputs, stats = all_together(load(**OPTIONS), crowd)
    assert len(outputs) == len(alone) == crowd.sessions * crowd.steps
    assert differing(alone, outputs) == []
    assert stats["sessions"] == crowd.sessions
    assert stats["parked_sessions"] == crowd.sessions - ROOM
    assert not [name for name in stats if name.startswith("lost:")]


def test_without_a_tier_the_engine_drops_its_oldest_session_and_it_is_counted(crowd, alone, load):
    outputs, stats = all_together(load(), crowd)
    assert len(differing(alone, outputs)) > len(outputs) / 4
    assert stats["lost:kv_eviction"] > crowd.steps


@pytest.mark.skipif(not LONG, reason="200 sessions, alone and together: part of the long run")
def test_a_pool_for_three_serves_two_hundred_bit_for_bit(dreamzero_checkpoint, load):
    outputs, stats = all_together(load(**OPTIONS), MANY)
    assert stats["parked_sessions"] == MANY.sessions - ROOM
    assert differing(MANY.alone(dreamzero_checkpoint), outputs) == []


def test_a_session_that_its_manager_lost_starts_over_from_nothing_also_in_the_engine(crowd, alone, load):
    """Its KV must not be another rollout's beginning, and keeps no place in the pool."""
    model = load()
    manager, one = model.pipeline._memory_manager, crowd.name(0)
    manager.capacity.max_sessions = 1
    for key in ((0, 0), (0, 1), (0, 2)):
        crowd.run(model, key)
    lost = model.runner._sessions[one]
    crowd.run(model, (1, 0))
    assert manager.stats()["lost:count"] == 1
    assert lost._closed
    assert one not in model.runner._sessions
    assert crowd.run(model, (0, 0)).equals(alone[0, 0])
    assert model.runner._sessions[one] is not lost
    assert crowd.run(model, (0, 1)).equals(alone[0, 1])

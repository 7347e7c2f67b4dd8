"""More live sessions than the engine's pool holds, on the real host: each step as if alone."""

import numpy as np
import pytest
from omni_tiny.inproc import TinyDreamZero
from profiles import LONG

from vllm_omni_session_state.tiers.host import HostTier

pytestmark = pytest.mark.host

SESSIONS = [f"robot-{n}" for n in range(8)]
ROUNDS = 12 if LONG else 6
ROOM = 3


def step(model, session, round_):
    """The same observation whoever runs it: it depends on the session and the round alone."""
    rng = np.random.default_rng([SESSIONS.index(session), round_])
    prompt = "another task" if round_ >= ROUNDS - 2 and session == "robot-3" else f"task of {session}"
    return model.step(session, rng=rng, prompt=prompt, frames=1 if round_ == 0 else 4)


@pytest.fixture(scope="module")
def alone(dreamzero_checkpoint):
    """Each session's outputs when it is the only one."""
    outputs = {}
    with TinyDreamZero(dreamzero_checkpoint, flag=False, capacity=1) as model:
        for session in SESSIONS:
            outputs.update({(session, round_): step(model, session, round_) for round_ in range(ROUNDS)})
            model.close(session)
    return outputs


@pytest.fixture
def model(dreamzero_checkpoint):
    with TinyDreamZero(dreamzero_checkpoint, flag=True, capacity=ROOM) as model:
        yield model


def in_random_order(model):
    rng, outputs = np.random.default_rng(0), {}
    for round_ in range(ROUNDS):
        for session in rng.permutation(SESSIONS):
            outputs[session, round_] = step(model, session, round_)
            model.pipeline._memory_manager.check()
            assert len(model.runner._sessions) <= ROOM
    return outputs


def test_a_pool_for_three_serves_them_all_bit_for_bit(alone, model):
    manager = model.pipeline._memory_manager
    manager.cascade.host = HostTier(budget=1 << 30)
    outputs = in_random_order(model)
    assert [key for key, output in outputs.items() if not alone[key].equals(output)] == []
    assert not [name for name in manager.stats() if name.startswith("lost:")]
    for session in SESSIONS:
        model.close(session)
    pool = model.runner.kv_cache
    assert manager.stats()["total_nbytes"] == manager.cascade.host.nbytes == 0
    assert (pool._adapters, pool._cross_sessions, model.runner._sessions) == ({}, {}, {})
    assert pool.manager.block_pool.get_num_free_blocks() == pool.manager.block_pool.num_gpu_blocks - 1


def test_a_session_that_its_manager_lost_starts_over_from_nothing_also_in_the_engine(alone, model):
    """The cap takes it out of the table alone; its KV must not be another rollout's beginning."""
    manager = model.pipeline._memory_manager
    manager.room.max_sessions = 1
    for round_ in range(3):
        step(model, "robot-0", round_)
    step(model, "robot-1", 0)
    assert manager.stats()["lost:count"] == 1
    lost = model.runner._sessions["robot-0"]
    assert step(model, "robot-0", 0).equals(alone["robot-0", 0])
    assert lost._closed
    assert model.runner._sessions["robot-0"] is not lost
    assert step(model, "robot-0", 1).equals(alone["robot-0", 1])


def test_without_a_tier_the_engine_drops_its_oldest_session_and_it_is_counted(alone, model):
    outputs = in_random_order(model)
    wrong = [key for key, output in outputs.items() if not alone[key].equals(output)]
    assert len(wrong) > ROUNDS * len(SESSIONS) / 3
    assert model.pipeline._memory_manager.stats()["lost:kv_eviction"] > ROUNDS

"""More sessions than the device's budget holds, on the real host: each step equals its session run alone."""

import logging
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from omni_tiny.inproc import TinyDreamZero
from profiles import LONG

from vllm_omni_session_state.base.errors import (
    NoRoomError,
    SessionParkedError,
    SessionRestoreFailedError,
    SessionStateLostError,
    TierFaultError,
)
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.omni.worker import engine_kv

pytestmark = pytest.mark.host

SESSIONS = [f"robot-{n}" for n in range(12 if LONG else 6)]
MANY = len(SESSIONS)
ROUNDS = 9 if LONG else 4
HOSTED = 5 if LONG else 3


def step(model, session, round_):
    """The same observation whoever runs it: it depends on the session and the round alone."""
    rng = np.random.default_rng([SESSIONS.index(session), round_])
    prompt = "another task" if round_ == ROUNDS - 2 and session == "robot-3" else f"task of {session}"
    return model.step(session, rng=rng, prompt=prompt, frames=1 if round_ == 0 else 4)


@pytest.fixture(scope="module")
def alone(dreamzero_checkpoint):
    """Each session's outputs when it is the only one."""
    outputs = {}
    with TinyDreamZero(dreamzero_checkpoint, flag=False, capacity=MANY) as model:
        for session in SESSIONS:
            outputs.update({(session, round_): step(model, session, round_) for round_ in range(ROUNDS)})
            model.close(session)
    return outputs


@pytest.fixture
def model(dreamzero_checkpoint):
    """A managed model that has parked nothing yet."""
    with TinyDreamZero(dreamzero_checkpoint, flag=True, capacity=MANY) as model:
        yield model


def one_session_nbytes(model):
    """Device bytes of a session that has run for a while."""
    for round_ in range(4):
        step(model, SESSIONS[0], round_)
    manager = model.pipeline._memory_manager
    nbytes = next(entry.device_nbytes for entry in manager.listing() if entry.device_nbytes)
    model.close(SESSIONS[0])
    manager.drop_all()
    return nbytes


def interleaved(model, look=lambda: None):
    rng = np.random.default_rng(0)
    outputs = {}
    for round_ in range(ROUNDS):
        for session in rng.permutation(SESSIONS):
            outputs[session, round_] = step(model, session, round_)
            model.pipeline._memory_manager.check()
            look()
    return outputs


def sent_again_where_refused(model):
    """Five sessions, four rounds; a step whose restore failed is sent again, as a client does."""
    outputs, refused = {}, 0
    for round_ in range(4):
        for session in SESSIONS[:5]:
            for _ in range(2):
                try:
                    outputs[session, round_] = step(model, session, round_)
                    break
                except SessionRestoreFailedError:
                    refused += 1
            model.pipeline._memory_manager.check()
    assert len(outputs) == 20
    return outputs, refused


def differing(alone, outputs):
    return [key for key, output in outputs.items() if not alone[key].equals(output)]


def test_sessions_on_a_device_budget_for_two_are_each_as_if_alone(alone, model):
    manager = model.pipeline._memory_manager
    budget = 2 * one_session_nbytes(model) + 1000
    manager.capacity.device_budget, manager.offloader.host = budget, HostTier(budget=1 << 30)
    outputs = interleaved(model)
    assert len(outputs) == MANY * ROUNDS
    assert differing(alone, outputs) == []
    stats = manager.stats()
    assert stats["parked_sessions"] >= MANY - 2
    assert stats["restores"] > MANY * (ROUNDS - 2)
    assert manager._table.accounts.idle_nbytes() <= budget
    assert not [name for name in stats if name.startswith("lost:")]
    for session in SESSIONS:
        model.close(session)
    assert manager.offloader.host.nbytes == 0
    assert manager.stats()["total_nbytes"] == 0


def test_sessions_two_on_the_device_some_in_host_memory_and_the_rest_on_the_disk(alone, model, tmp_path):
    manager = model.pipeline._memory_manager
    nbytes = one_session_nbytes(model)
    kv_nbytes = engine_kv.most_nbytes(model.runner.kv_cache)
    disk = manager.offloader.disk = DiskTier(tmp_path, budget=1 << 30)
    manager.capacity.device_budget = 2 * nbytes
    manager.offloader.host = HostTier(budget=HOSTED * (nbytes + kv_nbytes))
    places = []

    def look():
        places.append(Counter(entry.place for entry in manager.listing()))

    outputs = interleaved(model, look)
    assert len(outputs) == MANY * ROUNDS
    assert differing(alone, outputs) == []
    full = [there for there in places if sum(there.values()) == MANY]
    assert min(there["disk"] for there in full) >= MANY - 2 - HOSTED
    assert min(there["host"] for there in full) >= HOSTED - 2
    assert not [name for name in manager.stats() if name.startswith("lost:")]
    for session in SESSIONS:
        model.close(session)
    assert (
        manager.stats()["total_nbytes"]
        == manager.stats()["disk_nbytes"]
        == manager.offloader.host.nbytes
        == 0
    )
    assert list(Path(disk.folder).iterdir()) == []
    disk.close()


@pytest.mark.parametrize("where", ["put", "get"])
def test_a_disk_that_fails_every_other_time_costs_no_bit(alone, model, monkeypatch, tmp_path, where):
    manager = model.pipeline._memory_manager
    disk = manager.offloader.disk = DiskTier(tmp_path, budget=1 << 30)
    manager.capacity.device_budget = 500_000
    call, asked = getattr(DiskTier, where), []

    def fails_every_other_time(self, *args, **kwargs):
        asked.append(1)
        if len(asked) % 2:
            raise TierFaultError("do it", file="/disk", why="as asked", remedy="none")
        return call(self, *args, **kwargs)

    monkeypatch.setattr(DiskTier, where, fails_every_other_time)
    outputs, refused = sent_again_where_refused(model)
    assert differing(alone, outputs) == []
    assert len(asked) > 10
    assert (refused > 5) is (where == "get")
    disk.close()


def test_decode_of_a_session_on_the_disk_is_exact_and_its_latents_cost_no_memory_there(model, tmp_path):
    manager = model.pipeline._memory_manager
    disk = manager.offloader.disk = DiskTier(tmp_path, budget=1 << 30)
    for round_ in range(3):
        step(model, SESSIONS[0], round_)
    decoded = model.pipeline.decode_accumulated_video_latents(SESSIONS[0])
    assert manager.park(SESSIONS[0])
    assert manager.stats()["total_nbytes"] == 0
    again = model.pipeline.decode_accumulated_video_latents(SESSIONS[0])
    assert torch.equal(decoded, again)
    manager.drop_all()
    disk.close()


def test_a_cap_of_two_parks_instead_of_dropping_where_there_is_a_tier(alone, model):
    manager = model.pipeline._memory_manager
    manager.capacity.max_sessions, manager.offloader.host = 2, HostTier(budget=1 << 30)
    outputs = interleaved(model)
    assert differing(alone, outputs) == []
    assert manager.stats()["evictions"] == 0
    assert manager.stats()["sessions"] - manager.stats()["parked_sessions"] == 2


def test_a_cap_of_two_without_a_tier_loses_rollouts_and_says_so(alone, model, caplog):
    manager = model.pipeline._memory_manager
    manager.capacity.max_sessions = 2
    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        outputs = interleaved(model)
    assert len(differing(alone, outputs)) > MANY / 2 * (ROUNDS - 1)
    lost = manager.stats()["lost:count"]
    assert lost == manager.stats()["evictions"] > (MANY - 2) * (ROUNDS - 1)
    assert len([record for record in caplog.records if "is lost (count)" in record.getMessage()]) == lost


FAULTS = [("put", MemoryError("no room")), ("get", OSError(5, "I/O"))]
CROSSED = [("put", OSError(5, "I/O")), ("get", MemoryError("no room"))]


@pytest.mark.parametrize(("where", "error"), [*FAULTS, *(CROSSED if LONG else [])])
def test_a_fault_at_every_park_and_restore_costs_no_bit(alone, model, monkeypatch, where, error):
    """Every call of the tier fails once: a step whose restore failed is sent again and is exact."""
    forget_said()
    manager = model.pipeline._memory_manager
    manager.capacity.device_budget, manager.offloader.host = 500_000, HostTier(budget=1 << 30)
    call, broken = getattr(HostTier, where), []

    def fails_every_other_time(self, *args, **kwargs):
        broken.append(len(broken) % 2 == 0)
        if broken[-1]:
            raise error
        return call(self, *args, **kwargs)

    monkeypatch.setattr(HostTier, where, fails_every_other_time)
    outputs, refused = sent_again_where_refused(model)
    assert differing(alone, outputs) == []
    assert any(broken)
    assert (refused > 5) is (where == "get")


@pytest.mark.skipif(not LONG, reason="what the in-tree manager does: part of the long run")
def test_the_in_tree_manager_with_a_cap_of_two_in_the_same_rig(alone, dreamzero_checkpoint, monkeypatch):
    """Its cap drops the oldest session: printed is how many outputs are another rollout's."""
    from vllm_omni_session_state.base.settings import ENV_MAX_SESSIONS
    from vllm_omni_session_state.omni.hooks import loader

    monkeypatch.setattr(loader, "attach", lambda *_: None)
    monkeypatch.setenv(ENV_MAX_SESSIONS, "2")
    with TinyDreamZero(dreamzero_checkpoint, flag=True, capacity=MANY) as model:
        assert type(model.pipeline._memory_manager).__module__.startswith("vllm_omni.")
        outputs = {}
        rng = np.random.default_rng(0)
        for round_ in range(ROUNDS):
            for session in rng.permutation(SESSIONS):
                outputs[session, round_] = step(model, session, round_)
    wrong = len(differing(alone, outputs))
    print(f"in-tree manager, {MANY} sessions, a cap of 2: {wrong} of {len(outputs)} outputs differ")
    assert wrong > MANY / 2 * (ROUNDS - 1)


def test_with_every_park_failing_no_call_loops_and_warn_loses_the_oldest_and_says_so(alone, model, caplog):
    """A park is asked of each idle session at most once a call; the client whose step it is never waits."""
    forget_said()
    manager = model.pipeline._memory_manager
    asked = []

    class Broken(HostTier):
        def put(self, storages, *, live_nbytes):
            asked.append(1)
            raise OSError(5, "Input/output error")

    manager.offloader.host, manager.capacity.max_sessions = Broken(budget=1 << 30), 3
    outputs = {}
    for session in SESSIONS[:5]:
        asked.clear()
        outputs[session, 0] = step(model, session, 0)
        assert len(asked) <= 2 * len(manager)
        manager.check()
    assert differing(alone, outputs) == []
    assert manager.stats()["lost:tier_full"] == 2
    assert len([record for record in caplog.records if "is lost (tier_full)" in record.getMessage()]) == 2
    outputs = {(session, 1): step(model, session, 1) for session in SESSIONS[2:5]}
    assert differing(alone, outputs) == [], "who was not lost goes on"


def test_with_every_park_failing_nothing_is_lost_and_the_overrun_is_said_once(alone, model, caplog):
    forget_said()
    manager = model.pipeline._memory_manager
    manager.capacity.device_budget, manager.offloader.host = 500_000, HostTier(budget=0)
    manager.capacity.eviction.on_lost = "error"
    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        outputs = {(SESSIONS[0], round_): step(model, SESSIONS[0], round_) for round_ in range(3)}
        with pytest.raises(NoRoomError, match="no room for a new session: the host tier has 0 bytes left"):
            step(model, SESSIONS[1], 0)
        outputs[SESSIONS[0], 3] = step(model, SESSIONS[0], 3)
    assert differing(alone, outputs) == []
    assert len([record for record in caplog.records if "beyond device_budget" in record.getMessage()]) == 1


def test_a_session_that_the_runner_evicts_is_counted_and_with_error_it_does_not_start_over(
    dreamzero_checkpoint,
):
    with TinyDreamZero(dreamzero_checkpoint, flag=True, capacity=2) as model:
        manager = model.pipeline._memory_manager
        manager.capacity.eviction.on_lost = "error"
        for session in SESSIONS[:3]:
            step(model, session, 0)
        assert manager.stats()["lost:kv_eviction"] == 1
        with pytest.raises(SessionStateLostError, match="was lost \\(kv_eviction\\)"):
            step(model, SESSIONS[0], 1)
        model.reset(SESSIONS[0])
        step(model, SESSIONS[0], 0)


def test_the_state_of_a_parked_session_cannot_be_touched_without_a_lease(model):
    manager = model.pipeline._memory_manager
    manager.capacity.max_sessions, manager.offloader.host = 1, HostTier(budget=1 << 30)
    step(model, SESSIONS[0], 0)
    view = model.pipeline.state
    step(model, SESSIONS[1], 0)
    with pytest.raises(SessionParkedError, match="is parked; take a lease"):
        _ = view.clip_feas
    with pytest.raises(SessionParkedError, match="is parked; take a lease"):
        view.call_count = 0
    step(model, SESSIONS[0], 1)
    assert view.call_count == 2


def test_decode_brings_a_parked_session_back_and_is_exact(alone, model):
    manager = model.pipeline._memory_manager
    manager.capacity.max_sessions, manager.offloader.host = 1, HostTier(budget=1 << 30)
    for round_ in range(3):
        step(model, SESSIONS[0], round_)
    decoded = model.pipeline.decode_accumulated_video_latents(SESSIONS[0])
    step(model, SESSIONS[1], 0)
    assert manager.stats()["parked_sessions"] >= 1
    again = model.pipeline.decode_accumulated_video_latents(SESSIONS[0])
    assert (decoded == again).all()

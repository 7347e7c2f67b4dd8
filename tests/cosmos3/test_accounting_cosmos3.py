"""What is said of Cosmos3's bytes: there during a request, recounted from nothing, and gone after it."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.in_tree_faults import left_by_cosmos3
from vllm_omni_session_state.adapters.cosmos3 import BRANCHES, Cosmos3State

pytestmark = pytest.mark.host

GONE = ("total_nbytes", "shared_nbytes", "staged_nbytes", "detached_nbytes", "detached_sessions", "outside")


@pytest.fixture(scope="module")
def on(tiny_cosmos3):
    return tiny_cosmos3("regular", flag=True)


@pytest.fixture
def seen(on, monkeypatch):
    """The figures after each capture, each with a recount over the storages of what was captured so far."""
    found = []
    manager = on.pipeline._memory_manager
    capture = Cosmos3State.capture_from_transformer

    def look(self, transformer, is_negative):
        capture(self, transformer, is_negative)
        storages = {}
        for name in BRANCHES:
            branch = self._session.get(name)
            if branch is not None and branch.resident:
                pairs, frequencies = branch.view()
                for tensor in (*(part for pair in pairs for part in pair), *frequencies):
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        found.append((manager.stats()["total_nbytes"], sum(storages.values())))
        manager.check()

    monkeypatch.setattr(Cosmos3State, "capture_from_transformer", look)
    return found


def nothing_is_left(on):
    manager = on.pipeline._memory_manager
    stats = manager.stats()
    assert {name: stats[name] for name in GONE} == dict.fromkeys(GONE, 0)
    assert manager.nbytes_by_device() == {}
    manager.check()


@pytest.mark.parametrize("guidance", [4.0, 1.0])
def test_bytes_are_counted_during_a_request_and_are_gone_after_it(on, seen, guidance):
    on.generate("a", guidance=guidance)
    assert all(said == recount > 0 for said, recount in seen)
    if guidance > 1:
        assert seen[-1][0] > seen[0][0], "the second branch came in"
    nothing_is_left(on)


def test_bytes_are_gone_after_a_request_that_failed_whoever_holds_its_error(on, seen):
    error = RuntimeError("a cosmic ray")
    with on.failing_forward(3, error), pytest.raises(RuntimeError) as caught:
        on.generate("a")
    assert seen[-1][0] > 0
    assert caught.value is error, "and with it every frame of the request"
    nothing_is_left(on)


def test_bytes_of_two_requests_at_once_are_gone_after_both_though_there_is_room_for_one(
    on, seen, monkeypatch
):
    monkeypatch.setattr(on.pipeline._memory_manager.capacity, "max_sessions", 1)
    on.interleave([on.diffuse_call("a"), on.diffuse_call("b", prompt="another")])
    assert max(said for said, _ in seen) > max(recount for _, recount in seen), "both are in the figures"
    gc.collect()
    nothing_is_left(on)


def test_the_in_tree_manager_counts_nothing_of_what_stays_and_with_ours_nothing_stays(cosmos3_checkpoint):
    checkpoint = cosmos3_checkpoint("regular")
    assert left_by_cosmos3(checkpoint, flag=True) == 0
    assert left_by_cosmos3(checkpoint, flag=False) > 0

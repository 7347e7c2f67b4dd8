"""Faults while sessions share a pool for three, on the real runner: each is whole then, in one place."""

import pytest
import torch
from broken import broken_between_layers
from engine import free
from omni_tiny.tiny import MODEL_OWNED_BYTES
from profiles import LONG

from vllm_omni_session_state.base.errors import (
    NoRoomError,
    SessionRestoreFailedError,
    SessionStateLostError,
    TierFaultError,
)
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.manager.consensus import Ranks
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.omni.worker import engine_kv

pytestmark = pytest.mark.host

ROOM = 3
BROKEN = OSError(5, "Input/output error")
HOST = {"host_budget": "1GiB"}


class Served:
    """A model and its sessions, each compared at every step with itself alone."""

    def __init__(self, model, crowd, alone):
        forget_said()
        self.model, self.crowd, self.alone = model, crowd, alone
        self.manager, self.pool = model.pipeline._memory_manager, model.runner.kv_cache
        self.done = {}

    def step(self, *numbers):
        """Steps that must be exact."""
        for number in numbers:
            key = number, self.done.get(number, 0)
            assert self.alone[key].equals(self.crowd.run(self.model, key)), f"{key} is another's"
            self.done[number] = key[1] + 1
            self.sound()

    def refused(self, number, error, match):
        """A step that fails so, and changes nothing."""
        before = self.places(), free(self.pool), self.tiers()
        with pytest.raises(error, match=match):
            self.crowd.run(self.model, (number, self.done.get(number, 0)))
        self.sound()
        assert (self.places(), free(self.pool), self.tiers()) == before

    def places(self):
        names = self.manager.keys()
        return {name: entry.place for name, entry in zip(names, self.manager.listing(), strict=True)}

    def place(self, number):
        return self.places()[self.crowd.name(number)]

    def tiers(self):
        host, figures = self.manager.offloader.host, self.manager.offloader.figures()
        return 0 if host is None else host.nbytes, figures["disk_nbytes"]

    def sound(self):
        """The engine has KV of exactly those that are on the device, and every block is one's or free."""
        self.manager.check()
        names = {name for name, place in self.places().items() if place == "device"}
        assert set(self.model.runner._sessions) == set(self.pool._cross_sessions) == names
        assert len(names) <= ROOM
        states = self.model.runner._sessions.values()
        assert set(self.pool._adapters) == {
            adapter.request_id for state in states for adapter in state.adapters.values()
        }
        used = sum(
            len(self.pool.block_table(adapter)) for state in states for adapter in state.adapters.values()
        )
        assert free(self.pool) == self.pool.managed_num_blocks - 1 - used


@pytest.fixture
def served(load, crowd, alone):
    return lambda **options: Served(load(**options), crowd, alone)


def test_a_restore_that_finds_too_few_blocks_leaves_the_session_parked_whole(served):
    three = served(**HOST)
    three.step(0, 1, 0, 1, 0)
    assert three.manager.park(three.crowd.name(0))
    pool = three.pool
    hog = pool.begin_request("hog")
    pool.allocate_token_slots(hog, (free(pool) - 2) * pool.block_size)
    before = three.tiers(), free(pool)
    with pytest.raises(SessionRestoreFailedError, match=r"stays where it is: .*blocks"):
        three.crowd.run(three.model, (0, 3))
    assert (three.tiers(), free(pool)) == before
    assert three.place(0) == "host"
    pool.end_request(hog)
    three.sound()
    three.step(0, 1, 0)


def fails_after(monkeypatch, owner, name, *, calls=0, error=BROKEN):
    """Have a function fail once it was called so often; returns how to mend it, and the errors it raised."""
    exact, made, raised = getattr(owner, name), [], []

    def failing(*args, **kwargs):
        made.append(1)
        if len(made) > calls:
            raised.append(error)
            raise error
        return exact(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    return lambda: monkeypatch.setattr(owner, name, exact), raised


PARKING = {
    "taking the KV out": lambda patch: fails_after(patch, engine_kv, "_read_blocks"),
    "between two layers of the KV": lambda patch: fails_after(patch, torch.Tensor, "index_select", calls=3),
    "the host tier": lambda patch: fails_after(patch, HostTier, "put", error=MemoryError("no room")),
}
RESTORING = {
    "the host tier": lambda patch: fails_after(patch, HostTier, "get", error=MemoryError("no room")),
    "between two layers of the KV": lambda patch: fails_after(patch, torch.Tensor, "index_copy_", calls=3),
    "the second branch": lambda patch: fails_after(patch, engine_kv.kv_payload, "place", calls=1),
}


@pytest.mark.parametrize("where", PARKING)
def test_a_fault_midway_in_a_park_refuses_who_is_new_and_leaves_the_others_whole(served, monkeypatch, where):
    three = served(**HOST, on_lost="error")
    three.step(0, 1, 2, 0, 1, 2)
    mend, raised = PARKING[where](monkeypatch)
    three.refused(3, NoRoomError, "no room for a new session: .*(Input/output error|no room)")
    assert len(raised) == ROOM, "each of them is asked once"
    mend()
    assert set(three.places().values()) == {"device"}
    three.step(3, 0, 1, 2, 3)


def test_where_losing_is_allowed_who_was_not_used_for_longest_is_lost_and_the_others_go_on(
    served, monkeypatch
):
    three = served(**HOST)
    three.step(0, 1, 2)
    mend, _ = fails_after(monkeypatch, HostTier, "put", error=MemoryError("no room"))
    three.step(3)
    assert three.manager.stats()["lost:tier_full"] == 1
    assert three.crowd.name(0) not in three.places()
    three.step(1, 2, 3)
    mend()
    three.done.pop(0)
    three.step(0, 1, 2, 3)


def test_abandoned_sessions_that_fill_host_memory_go_before_any_that_lives(served):
    three = served(**HOST)
    three.step(0, 1, 2, 3)
    three.manager.offloader.host.budget = three.manager.offloader.host.nbytes * 5 // 4
    assert three.place(0) == "host"
    three.step(4, 2, 3, 4, 2)
    assert three.crowd.name(0) not in three.places(), "it was used before any other"
    assert three.place(1) == "host"
    assert three.manager.stats()["lost:tier_full"] == 1
    assert "lost:kv_eviction" not in three.manager.stats()
    three.step(3, 4, 2)


@pytest.mark.parametrize("where", RESTORING)
def test_a_fault_midway_in_a_restore_leaves_the_session_parked_whole(served, monkeypatch, where):
    three = served(**HOST)
    three.step(0, 1, 0, 1, 0)
    assert three.manager.park(three.crowd.name(0))
    mend, raised = RESTORING[where](monkeypatch)
    three.refused(0, SessionRestoreFailedError, "stays where it is")
    assert len(raised) == 1
    mend()
    assert three.place(0) == "host"
    three.step(0, 1, 0)


@pytest.mark.parametrize("where", ["put", "get"])
def test_a_disk_that_fails_leaves_each_session_whole_in_one_place(served, monkeypatch, tmp_path, where):
    three = served(disk={"path": str(tmp_path), "budget": "1GiB"})
    three.step(0, 1, 2, 3)
    assert three.place(0) == "disk"
    fault = TierFaultError("do it", file="a file", why="no device", remedy="mend it")
    mend, raised = fails_after(monkeypatch, DiskTier, where, error=fault)
    if where == "put":
        three.refused(0, SessionRestoreFailedError, "stays where it is: .*no device")
        three.refused(4, NoRoomError, "no room for a new session: .*no device")
    else:
        # Room was made for it, and stays.
        with pytest.raises(SessionRestoreFailedError, match="no device"):
            three.crowd.run(three.model, (0, 1))
        three.sound()
        assert list(three.places().values()).count("disk") == 2
    assert raised
    mend()
    three.step(0, 1, 2, 3)


@pytest.mark.parametrize("call", [1, 3] if LONG else [2])
def test_a_step_that_raises_between_two_layers_ends_its_session_and_no_other(served, call):
    three = served(**HOST, on_lost="error")
    three.step(0, 1, 2, 3, 0, 1)
    for number in (2, 3, 0):  # parked, parked, on the device
        others = [name for name in three.places() if name != three.crowd.name(number)]
        with (
            broken_between_layers(three.model.pipeline, call=call) as broken,
            pytest.raises(ValueError, match="on purpose"),
        ):
            three.crowd.run(three.model, (number, three.done[number]))
        assert broken()
        three.sound()
        assert sorted(three.places()) == sorted(others)
        three.refused(number, SessionStateLostError, "forward_exception")
        three.model.reset(three.crowd.name(number))
        three.done[number] = 0
        three.step(number)
    three.step(1, 2, 3, 0, 1)


@pytest.mark.parametrize("on_lost", ["warn", "error"])
def test_with_a_disk_that_is_full_the_error_names_it_and_nobody_is_lost(served, tmp_path, on_lost):
    three = served(disk={"path": str(tmp_path), "budget": "1MiB"}, on_lost=on_lost)
    three.step(0, 1, 2, 0, 1, 2, 0)
    three.refused(3, NoRoomError, "no room for a new session: the disk tier has .* raise disk.budget")
    three.step(0, 1, 2)
    three.model.close(three.crowd.name(0))
    three.step(3)


def test_with_a_host_tier_that_is_full_the_error_names_it_and_nobody_is_lost(served):
    three = served(host_budget=100_000, on_lost="error")
    three.step(0, 1, 2)
    three.refused(3, NoRoomError, "no room for a new session: the host tier has .* raise host_budget")
    three.step(0, 1, 2)


def test_a_decode_of_a_parked_session_has_another_one_parked_for_it(served):
    three = served(**HOST)
    three.step(0, 0)
    decode = three.model.pipeline.decode_accumulated_video_latents
    expected = decode(three.crowd.name(0))
    three.step(1, 2, 3)
    assert three.place(0) == "host"
    assert torch.equal(decode(three.crowd.name(0)), expected)
    three.sound()
    assert (three.place(0), three.place(1)) == ("device", "host")
    three.model.pipeline.clear_accumulated_video_latents(three.crowd.name(1))
    three.sound()
    assert (three.place(1), three.place(2)) == ("device", "host")
    three.step(0, 1, 2, 3)


def test_a_decode_of_a_parked_session_for_which_there_is_no_place_is_refused(served, monkeypatch):
    three = served(**HOST, on_lost="error")
    three.step(0, 1, 2, 3)
    mend, _ = fails_after(monkeypatch, HostTier, "put", error=MemoryError("no room"))
    before = three.places()
    with pytest.raises(SessionRestoreFailedError, match=r"stays where it is: .*no room"):
        three.model.pipeline.decode_accumulated_video_latents(three.crowd.name(0))
    three.sound()
    assert three.places() == before
    mend()
    three.model.pipeline.decode_accumulated_video_latents(three.crowd.name(0))
    three.step(0, 1, 2, 3)


def test_where_ranks_must_agree_a_parked_session_counts_with_its_kv(served):
    """Else they agree to park what a rank has no room for, and its KV stays on the device beside the pool."""
    three = served(**HOST, on_lost="error")
    size = MODEL_OWNED_BYTES + engine_kv.most_nbytes(three.pool)
    offloader = three.manager.offloader
    offloader.ranks, offloader.host = Ranks(lambda message: [message]), HostTier(budget=3 * size - 1)
    three.step(0, 1, 2, 3, 4)
    three.refused(5, NoRoomError, rf"the host tier has {size - 1} bytes left and {size} are wanted")
    three.step(2, 3, 4)

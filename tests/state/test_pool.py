"""Places of an engine's pool: who gives one up, who is refused, and how two change places when all is full.

The library alone; the pool is a stand-in that has a place for each session on the device.
"""

import numpy as np
import pytest
import torch

from vllm_omni_session_state import SessionStateManager
from vllm_omni_session_state.base.errors import NoRoomError
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.host_tier import HostTier

SIZE, SLAB = 1000, 1024


class Places:
    """As many places as it is told."""

    def __init__(self, manager, places):
        self.manager, self.places = manager, places

    def holds(self, key):
        entry = self.manager._table.entries.get(key)  # it is asked under the lock
        return entry is not None and not entry.session.parked and bool(entry.session.attrs)

    def has_place(self, key):
        return self.holds(key) or sum(map(self.holds, list(self.manager._table.entries))) < self.places


def manager_of(places=2, **tiers):
    manager = SessionStateManager(**tiers)
    manager.capacity.pool = Places(manager, places)
    return manager


def step(manager, name):
    """As vLLM-Omni's runner: a place is made first, then the forward takes its lease."""
    manager.prepare(name)
    with manager.lease(name) as session:
        if "x" not in session.attrs:
            session.attrs["x"] = torch.full((SIZE,), ord(name), dtype=torch.uint8)
        assert session.attrs["x"].tolist() == [ord(name)] * SIZE
    manager.check()


def rounds(manager, names, count=3):
    rng = np.random.default_rng(0)
    for _ in range(count):
        for name in rng.permutation(list(names)).tolist():
            step(manager, name)


def test_the_session_that_nobody_used_for_longest_gives_its_place_up():
    manager = manager_of(tier=HostTier(budget=1 << 20))
    for name in "abac":
        step(manager, name)
    assert {name for name in "abc" if manager.peek(name).parked} == {"b"}


@pytest.mark.parametrize("on_lost", ["warn", "error"])
def test_where_host_memory_is_full_to_the_byte_sessions_still_change_places(on_lost):
    manager = manager_of(tier=HostTier(budget=4 * SLAB), on_lost=on_lost)
    rounds(manager, "abcdef")
    assert manager.stats()["parked_sessions"] == 4
    assert manager.offloader.host.nbytes == manager.offloader.host.budget
    assert not [name for name in manager.stats() if name.startswith("lost:")]


def test_where_the_disk_is_full_to_the_byte_they_do_too(tmp_path):
    probe = DiskTier(tmp_path / "probe", budget=1 << 20)
    manager = manager_of(disk=probe)
    for name in "abc":
        step(manager, name)
    one = probe.nbytes
    probe.close()
    for host in (None, 2):
        disk = DiskTier(tmp_path / "parked", budget=2 * one)
        tier = None if host is None else HostTier(budget=host * SLAB)
        manager = manager_of(tier=tier, disk=disk)
        rounds(manager, "abcd" if host is None else "abcdef")
        assert disk.nbytes == disk.budget
        assert manager.stats()["disk_sessions"] == 2
        disk.close()


def test_where_as_many_are_parked_as_may_be_they_do_too():
    manager = manager_of(tier=HostTier(budget=1 << 20), max_parked=2)
    rounds(manager, "abcd")
    assert manager.stats()["parked_sessions"] == 2


def test_a_tier_is_beyond_its_budget_by_no_more_than_the_one_that_comes_up():
    seen = []

    class Watched(HostTier):
        def put(self, storages, *, live_nbytes):
            parcel = super().put(storages, live_nbytes=live_nbytes)
            seen.append(self.nbytes)
            return parcel

    manager = manager_of(tier=Watched(budget=4 * SLAB))
    rounds(manager, "abcdef")
    assert max(seen) == 5 * SLAB


def test_a_newcomer_is_refused_where_all_is_full_and_the_others_go_on():
    manager = manager_of(tier=HostTier(budget=2 * SLAB), on_lost="error")
    rounds(manager, "abcd")
    with pytest.raises(NoRoomError, match="raise host_budget"):
        step(manager, "e")
    rounds(manager, "abcd")


def test_a_larger_session_does_not_take_the_place_of_a_smaller_one_in_a_full_tier():
    manager = manager_of(places=1, tier=HostTier(budget=SLAB), on_lost="error")
    step(manager, "a")
    step(manager, "b")
    with manager.lease("b") as session:
        session.attrs["more"] = torch.zeros(SIZE)
    why = manager.capacity.reserve_kv_slot("a")
    assert why is not None
    assert "raise host_budget" in why
    assert not manager.peek("b").parked
    assert manager.offloader.host.nbytes == SLAB

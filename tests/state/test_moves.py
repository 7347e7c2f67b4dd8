"""Seconds and bytes of moves: each is counted where it belongs, once, and what fails is counted apart."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import sized
from tiered import HOSTED, all_hold, begin, manager_of

from vllm_omni_session_state.base.errors import SessionRestoreFailedError
from vllm_omni_session_state.manager.move_stats import NBYTES, SECONDS, Histogram, Move
from vllm_omni_session_state.offload.disk_tier import DiskTier


@pytest.fixture
def disk(tmp_path):
    tier = DiskTier(tmp_path / "parked", budget=1 << 20)
    yield tier
    tier.close()


@pytest.mark.parametrize("bounds", [SECONDS, NBYTES])
@given(data=st.data())
@sized(500)
def test_each_value_is_counted_at_the_first_bound_that_holds_it(bounds, data):
    near = st.tuples(st.sampled_from(bounds), st.sampled_from([0.999, 1, 1.001])).map(math.prod)
    values = data.draw(st.lists(st.floats(0, bounds[-1] * 2) | near, max_size=20))
    histogram = Histogram(bounds)
    for value in values:
        histogram.add(value)
    for place, bound in enumerate(bounds):
        assert sum(histogram.counts[: place + 1]) == sum(value <= bound for value in values)
    assert sum(histogram.counts) == len(values)
    assert histogram.total == pytest.approx(sum(values))


def counted(manager):
    """Of each move that there was: how often, bytes, and how many failed."""
    figures = manager.offloader.moves.figures()
    assert set(figures) == {move.value for move in Move}
    for each in figures.values():
        assert sum(each["seconds"]["counts"]) == sum(each["nbytes"]["counts"])
        assert (each["seconds"]["total"] > 0) == any(each["seconds"]["counts"])
    found = {
        name: (sum(each["nbytes"]["counts"]), each["nbytes"]["total"], each["failed"])
        for name, each in figures.items()
    }
    return {name: each for name, each in found.items() if any(each)}


def test_moves_through_both_tiers_are_counted_with_their_bytes(disk):
    manager = manager_of(disk, host=HOSTED)
    begin(manager, *"ab")  # b takes a's place in host memory, and a sinks
    slab = manager.offloader.host.nbytes
    file = disk.nbytes
    assert counted(manager) == {"park:host": (2, 2 * slab, 0), "sink:disk": (1, file, 0)}
    with manager.lease("a"):
        pass
    assert counted(manager)["restore:disk"] == (1, file, 0)
    with manager.lease("a"):
        assert counted(manager)["restore:host"][:2] == (1, slab)
    stats = manager.stats()
    made = counted(manager)
    assert stats["parks"] == made["park:host"][0]
    assert stats["restores"] == made["restore:host"][0] + made["restore:disk"][0]


def test_without_host_memory_a_park_goes_to_the_disk(disk):
    manager = manager_of(disk)
    begin(manager, "a")
    assert counted(manager) == {"park:disk": (1, disk.nbytes, 0)}


def test_what_fails_is_counted_apart_and_takes_no_bytes(disk, monkeypatch):
    manager = manager_of(disk)
    begin(manager, "a")
    monkeypatch.setattr(disk, "get", lambda ticket: (_ for _ in ()).throw(MemoryError("as asked")))
    with pytest.raises(SessionRestoreFailedError):
        all_hold(manager, "a")
    disk.budget = 0
    begin(manager, "b")
    assert not manager.peek("b").parked
    made = counted(manager)
    assert made["restore:disk"] == (0, 0, 1)
    assert made["park:disk"][0] == made["park:disk"][2] == 1


def test_a_session_whose_step_is_near_is_read_ahead_and_counted(disk):
    manager = manager_of(disk)
    begin(manager, *"ab")
    assert manager.begin_restore("a")
    for future in disk.ahead._coming.values():
        future.result()
    assert not manager.begin_restore("nobody")
    all_hold(manager, *"ab")
    stats = manager.stats()
    assert stats["restores_ahead"] == 1
    assert stats["restores"] == 2
    assert stats["ahead_nbytes"] == 0
    manager.begin_restore("b")
    assert manager.stats()["ahead_nbytes"] > 0
    manager.drop_session("b")
    assert manager.stats()["ahead_nbytes"] == 0


def test_what_is_in_host_memory_or_in_use_is_not_read_ahead(disk):
    manager = manager_of(disk, host=HOSTED)
    begin(manager, "a")
    assert not manager.begin_restore("a")
    with manager.lease("a"):
        assert not manager.begin_restore("a")


def test_a_restore_by_name_says_whether_it_is_on_the_device(disk):
    manager = manager_of(disk, device=None)
    begin(manager, "a")
    assert manager.restore("a")
    manager.park("a")
    assert manager.restore("a")
    assert not manager.peek("a").parked
    assert not manager.restore("nobody")
    manager.capacity.device_budget = 0
    manager.park("a")
    assert not manager.restore("a"), "the budget has no room for it"

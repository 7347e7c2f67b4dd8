"""The suite can fail: each mistake in who is lost, and in where who was refused stands, is caught."""

from __future__ import annotations

import contextlib
import tempfile
from unittest import mock

import pytest
import test_eviction as cases
import test_eviction_machine as machine_tests
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from vllm_omni_session_state.manager.capacity import DeviceCapacity
from vllm_omni_session_state.manager.entry import Placement
from vllm_omni_session_state.manager.eviction import EvictionPolicy
from vllm_omni_session_state.manager.leases import Leases
from vllm_omni_session_state.manager.lru import LruOrder
from vllm_omni_session_state.manager.offloader import Offloader
from vllm_omni_session_state.manager.table import Table
from vllm_omni_session_state.manager.tiers import Tiers
from vllm_omni_session_state.offload.disk_tier import DiskTier

FEW = settings(
    max_examples=200,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def with_disk(test):
    """A test that wants a disk for three sessions."""

    def run():
        with tempfile.TemporaryDirectory() as folder:
            disk = DiskTier(folder, budget=3 * cases.SIZE + 2000)
            test(disk)
            disk.close()

    run.__name__ = test.__name__
    return run


def any_life_of_sessions():
    run_state_machine_as_test(machine_tests.EvictionMachine, settings=FEW)


refused_ones = cases.test_who_was_refused_stands_where_it_stood
ages = cases.test_the_age_of_a_parked_session_is_that_of_its_last_use_and_not_of_its_park
small_newcomer = cases.test_a_newcomer_of_ten_bytes_costs_one_session_and_that_is_the_one_unused_for_longest
uses_unmark = with_disk(cases.test_a_use_unmarks)
of_no_use = cases.test_marked_sessions_stay_where_letting_them_go_would_make_no_room
growing = cases.test_where_sessions_grow_beyond_what_the_tiers_hold_the_device_still_has_no_more

transition, resting = Table.transition, Table.resting
PARKS = (Placement.ON_HOST, Placement.ON_DISK)


def wrong(change):
    """`transition()` with something wrong before it."""

    def mutated(self, entry, to, charge=None):
        change(self, entry, to)
        transition(self, entry, to, charge)

    return mock.patch.object(Table, "transition", mutated)


def who_was_refused_becomes_the_most_recent_one():
    def used(table, entry, to):
        if entry.placement is Placement.LEAVING and to is Placement.IDLE:
            entry.turn = max((each.turn for each in table.entries.values()), default=0) + 1

    return wrong(used)


def who_was_refused_becomes_the_oldest_one():
    def oldest(_, entry, to):
        if entry.placement is Placement.LEAVING and to is Placement.IDLE:
            entry.turn = -entry.turn

    return wrong(oldest)


def what_is_parked_counts_as_just_used():
    def used(table, entry, to):
        if to in PARKS:
            entry.turn = max((each.turn for each in table.entries.values()), default=0) + 1

    return wrong(used)


def the_oldest_is_who_was_parked_first():
    parked = {}

    def note(_, entry, to):
        if to in PARKS:
            parked.setdefault(entry.session.serial, len(parked))

    def by_park(self, **how):
        there = resting(self, **how)
        return sorted(there, key=lambda entry: (not entry.parked, parked.get(entry.session.serial, 0)))

    stack = contextlib.ExitStack()
    stack.enter_context(wrong(note))
    stack.enter_context(mock.patch.object(Table, "resting", by_park))
    return stack


def the_oldest_on_the_device_is_lost_before_any_that_is_parked():
    def device_first(self, **how):
        return sorted(resting(self, **how), key=lambda entry: (entry.parked, entry.turn))

    return mock.patch.object(Table, "resting", device_first)


def the_youngest_is_lost():
    return mock.patch.object(Table, "resting", lambda self, **how: resting(self, **how)[::-1])


def one_more_is_lost_than_makes_the_room():
    make = EvictionPolicy.make

    def one_more(self, *args, but=None, **how):
        lost = make(self, *args, but=but, **how)
        with self._table.lock:
            there = self._table.resting(but=but, stale=self.loses_nobody)
            if lost and there:
                self._table.lose(there[0], self._reason(there[0]))
        if lost and there:
            self._end(there[0])
        return lost

    return mock.patch.object(EvictionPolicy, "make", one_more)


def bytes_of_others_are_paid_for_by_a_newcomer():
    over_capacity = DeviceCapacity.over_capacity
    return mock.patch.object(
        DeviceCapacity, "over_capacity", lambda self, **_: over_capacity(self, paid=False)
    )


def a_use_does_not_unmark():
    seat_of = Leases._seat

    def marked(self, key, *args, **how):
        stale = {entry.session.serial for entry in self._table.entries.values() if entry.stale}
        entry, there = seat_of(self, key, *args, **how)
        if entry is not None:
            entry.stale = entry.session.serial in stale
        return entry, there

    return mock.patch.object(Leases, "_seat", marked)


def those_that_are_not_marked_go_too():
    def everybody(self, *, but=None, stale=False):
        del stale
        return resting(self, but=but)

    return mock.patch.object(Table, "resting", everybody)


def somebody_is_lost_also_where_it_is_of_no_use():
    return mock.patch.object(EvictionPolicy, "_would_do", return_value=True)


def what_others_gave_back_is_not_seen():
    return mock.patch.object(Tiers, "takes", return_value=False)


def a_reserved_device_is_not_watched():
    return mock.patch.object(DeviceCapacity, "fixed", False)


def a_stop_leaves_a_session_on_its_way():
    arrive = Offloader.arrive

    def unless_stopped(self, entry):
        import sys

        if not isinstance(sys.exc_info()[1], SystemExit):
            arrive(self, entry)

    return mock.patch.object(Offloader, "arrive", unless_stopped)


def the_order_takes_no_place_back():
    def put(self, key, turn):
        self.pop(key, None)
        self[key] = turn

    return mock.patch.object(LruOrder, "put", put)


CAUGHT_BY = {
    who_was_refused_becomes_the_most_recent_one: refused_ones,
    who_was_refused_becomes_the_oldest_one: any_life_of_sessions,
    what_is_parked_counts_as_just_used: ages,
    the_oldest_is_who_was_parked_first: ages,
    the_oldest_on_the_device_is_lost_before_any_that_is_parked: small_newcomer,
    the_youngest_is_lost: small_newcomer,
    one_more_is_lost_than_makes_the_room: small_newcomer,
    bytes_of_others_are_paid_for_by_a_newcomer: small_newcomer,
    a_use_does_not_unmark: uses_unmark,
    those_that_are_not_marked_go_too: uses_unmark,
    somebody_is_lost_also_where_it_is_of_no_use: of_no_use,
    what_others_gave_back_is_not_seen: small_newcomer,
    a_reserved_device_is_not_watched: growing,
    a_stop_leaves_a_session_on_its_way: any_life_of_sessions,
    the_order_takes_no_place_back: refused_ones,
}


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Losses are said at WARNING; here there are many."""
    caplog.set_level("CRITICAL", logger="vllm_omni.session_state")


@pytest.mark.parametrize("mutant", CAUGHT_BY, ids=lambda mutant: mutant.__name__)
def test_the_mutant_is_caught(mutant, capsys):
    with mutant(), pytest.raises((AssertionError, pytest.fail.Exception)):
        CAUGHT_BY[mutant]()

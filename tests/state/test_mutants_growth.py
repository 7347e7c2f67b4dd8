"""The suite can fail: each mistake of charging a growing list once is caught by a test of this folder."""

from __future__ import annotations

from unittest import mock

import pytest
import test_chunks as chunks_tests
import test_growth as growth_tests
import test_growth_machine as machine_tests
from hypothesis.stateful import run_state_machine_as_test
from test_mutants_accounts import FEW

from vllm_omni_session_state.accounting import append_list
from vllm_omni_session_state.accounting.accounts import Accounts
from vllm_omni_session_state.accounting.allocations import nbytes_by_device
from vllm_omni_session_state.accounting.append_list import AllocationLog, Appended, AppendTrackedList
from vllm_omni_session_state.accounting.ledger import Ledger
from vllm_omni_session_state.manager import outside
from vllm_omni_session_state.state.session import SessionState


def any_life_of_lists():
    run_state_machine_as_test(machine_tests.GrowthMachine, settings=FEW)


def any_change():
    for change in growth_tests.CHANGES:
        growth_tests.test_after_any_change_the_list_is_charged_as_it_is_now(change)


def a_chunk_that_is_no_tensor():
    growth_tests.test_a_chunk_that_is_no_tensor_is_walked_each_time()


def constant_work():
    """Over 500 chunks also in the long run: a mistake costs the square of their number."""
    with mock.patch.object(growth_tests, "count", return_value=500):
        growth_tests.test_what_a_settlement_does_is_constant_over_ten_thousand_chunks(declared=True)


def a_chunk_that_is_replaced():
    growth_tests.test_a_chunk_that_is_replaced_is_charged_as_what_it_is_now()


def what_is_outside():
    chunks_tests.test_what_is_outside_is_walked_again_only_if_it_is_other_memory()


def unnoticed(name):
    def mutant():
        return mock.patch.object(AppendTrackedList, name, getattr(list, name))

    mutant.__name__ = f"unnoticed_{name.strip('_')}"
    return mutant


def a_sort_that_fails_is_not_noticed():
    def sort(self, **options):
        list.sort(self, **options)
        self.run = None

    return mock.patch.object(AppendTrackedList, "sort", sort)


def a_copy_is_not_compared():
    def succeed(self, other):
        self.run, other.run = other.run, None

    return mock.patch.object(AppendTrackedList, "succeed", succeed)


def a_copy_is_walked_anew():
    return mock.patch.object(AppendTrackedList, "succeed", return_value=None)


def what_came_is_walked_for_ever():
    return mock.patch.object(Appended, "join", lambda self: self.log.add(self.found))


def what_came_is_never_charged():
    def join(self):
        for run, count in zip(self.log.runs, self.counts, strict=True):
            run.count = max(run.count, count)

    return mock.patch.object(Appended, "join", join)


def other_kinds_join():
    return mock.patch.object(append_list, "is_plain", return_value=True)


def other_kinds_are_forgotten():
    grown = append_list.scan_appended

    def forgetful(lists, log):
        found = grown(lists, log)
        found.rest.clear()
        return found

    return mock.patch("vllm_omni_session_state.manager.charging.scan_appended", forgetful)


def what_a_log_has_is_added_again():
    def add(self, allocations):
        allocations = list(allocations)
        self.known.update(allocations)
        self.order += allocations
        self.nbytes_by_device = nbytes_by_device(self.order)

    return mock.patch.object(AllocationLog, "add", add)


def what_a_log_has_is_charged_beside_it():
    charge = Ledger.charge

    def forgetful(self, owner, allocations, log=None):
        charge(self, owner, allocations, log)
        if log is not None:
            both = frozenset(allocations) & log.known
            self._charges[owner] = self._charges.get(owner, frozenset()) | both

    return mock.patch.object(Ledger, "charge", forgetful)


def what_came_is_charged_twice():
    charge = Ledger.charge

    def forgetful(self, owner, allocations, log=None):
        if log is not None and owner in self._logs:
            self._logs[owner] = log, 0
        charge(self, owner, allocations, log)

    return mock.patch.object(Ledger, "charge", forgetful)


def a_log_that_is_left_stays_charged():
    charge = Ledger.charge

    def forgetful(self, owner, allocations, log=None):
        if self._logs.get(owner, (log,))[0] is not log:
            del self._logs[owner]
        charge(self, owner, allocations, log)

    return mock.patch.object(Ledger, "charge", forgetful)


def a_log_survives_its_owner():
    charge = Ledger.charge

    def forgetful(self, owner, allocations, log=None):
        if log is None and not allocations:
            self._logs.pop(owner, None)
        charge(self, owner, allocations, log)

    return mock.patch.object(Ledger, "charge", forgetful)


def a_log_is_in_the_other_role():
    settle = Accounts.settle

    def astray(self, owner, held):
        settle(self, owner, held._replace(log_on_host=not held.log_on_host))

    return mock.patch.object(Accounts, "settle", astray)


def lists_of_the_other_role_are_forgotten():
    parts = SessionState.parts

    def forgetful(self, on_host):
        device, host, engine, staged = parts(self, on_host)
        if host.lists:
            device.lists.clear()
        return device, host, engine, staged

    return mock.patch.object(SessionState, "parts", forgetful)


def a_look_outside_trusts_the_place():
    return mock.patch.multiple(outside, is_=lambda *_: True, _address=lambda _: 0)


def a_look_outside_overlooks_another_storage():
    return mock.patch.object(outside, "_address", return_value=0)


CAUGHT_BY = {
    **dict.fromkeys(
        map(
            unnoticed,
            (name for name in growth_tests.CHANGES if hasattr(list, name) and name != "__init__"),
        ),
        any_change,
    ),
    a_sort_that_fails_is_not_noticed: any_change,
    a_copy_is_not_compared: any_life_of_lists,
    a_copy_is_walked_anew: constant_work,
    what_came_is_walked_for_ever: constant_work,
    what_came_is_never_charged: any_life_of_lists,
    other_kinds_join: a_chunk_that_is_no_tensor,
    other_kinds_are_forgotten: any_life_of_lists,
    what_a_log_has_is_added_again: any_life_of_lists,
    what_a_log_has_is_charged_beside_it: any_life_of_lists,
    what_came_is_charged_twice: any_life_of_lists,
    a_log_that_is_left_stays_charged: a_chunk_that_is_replaced,
    a_log_survives_its_owner: a_chunk_that_is_replaced,
    a_log_is_in_the_other_role: any_life_of_lists,
    lists_of_the_other_role_are_forgotten: any_life_of_lists,
    a_look_outside_trusts_the_place: what_is_outside,
    a_look_outside_overlooks_another_storage: what_is_outside,
}


@pytest.fixture(autouse=True)
def one_chunk_is_many(monkeypatch):
    monkeypatch.setattr(append_list, "SHORT", 0)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("CRITICAL", logger="vllm_omni.session_state")


@pytest.mark.parametrize("check", dict.fromkeys(CAUGHT_BY.values()), ids=lambda check: check.__name__)
def test_without_a_mistake_the_check_passes(check):
    check()


@pytest.mark.parametrize("mutant", CAUGHT_BY, ids=lambda mutant: mutant.__name__)
def test_the_mutant_is_caught(mutant, capsys):
    with mutant(), pytest.raises(AssertionError):
        CAUGHT_BY[mutant]()

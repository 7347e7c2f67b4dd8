"""The ledger against a model that keeps the set of allocations of every owner."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections import Counter

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from profiles import count, sized

from vllm_omni_session_state import SessionStateManager
from vllm_omni_session_state.accounting.allocations import Allocation
from vllm_omni_session_state.accounting.append_list import AllocationLog
from vllm_omni_session_state.accounting.ledger import Ledger


def tally(found) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for device, _, nbytes in found:
        sums[device] += nbytes
    return dict(sums)


allocation = st.builds(
    Allocation, st.sampled_from(["cpu", "cuda:0", "cuda:1"]), st.integers(1, 6), st.integers(1, 4)
)
owner = st.one_of(st.integers(0, 5), st.tuples(st.just("staged"), st.integers(0, 2)), st.none())


class LedgerMachine(RuleBasedStateMachine):
    """Charges, replacements and releases in any order, also of logs that grow."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger()
        self.rest: dict[object, tuple[Allocation, ...]] = {}
        self.logs: dict[object, AllocationLog] = {}

    @property
    def model(self) -> dict[object, set[Allocation]]:
        names = self.rest.keys() | self.logs.keys()
        logs = {name: self.logs[name].order if name in self.logs else () for name in names}
        return {name: {*self.rest.get(name, ()), *logs[name]} for name in names}

    def charged(self, owner, allocations, log):
        self.ledger.charge(owner, allocations, log)
        for held, value in ((self.rest, tuple(allocations)), (self.logs, log)):
            held.pop(owner, None)
            if value:
                held[owner] = value
        if log is not None:
            self.logs[owner] = log

    @rule(owner=owner, allocations=st.lists(allocation, max_size=5), keep=st.booleans())
    def charge(self, owner, allocations, keep):
        self.charged(owner, allocations, self.logs.get(owner) if keep else None)

    @rule(owner=owner, allocations=st.lists(allocation, max_size=5), new=st.booleans())
    def charge_what_came_to_its_log(self, owner, allocations, new):
        log = AllocationLog() if new or owner not in self.logs else self.logs[owner]
        log.add(allocations)
        self.charged(owner, self.rest.get(owner, ()), log)

    @rule(owner=owner)
    def charge_the_same_again(self, owner):
        before = self.ledger.nbytes_by_device(), self.ledger.shared_nbytes_by_device()
        self.charged(owner, self.rest.get(owner, ())[::-1] * 2, self.logs.get(owner))
        assert (self.ledger.nbytes_by_device(), self.ledger.shared_nbytes_by_device()) == before

    @rule(owner=owner)
    def release(self, owner):
        self.charged(owner, (), None)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def ask_what_would_go(self, data):
        owners = data.draw(st.lists(st.sampled_from(list(self.model))))
        others = [held for name, held in self.model.items() if name not in owners]
        gone = set().union(*(self.model[name] for name in owners)) - set().union(*others)
        assert self.ledger.freed_without(owners) == tally(gone)

    @invariant()
    def the_figures_are_those_of_the_model(self):
        self.ledger.check()
        model = self.model
        reached = Counter(each for held in model.values() for each in held)
        assert self.ledger.nbytes_by_device() == tally(reached)
        assert self.ledger.shared_nbytes_by_device() == tally(each for each, n in reached.items() if n > 1)
        assert self.ledger.owners() == set(model)

    def teardown(self):
        for name in list(self.model):
            self.ledger.charge(name, ())
            self.ledger.check()
        assert self.ledger.nbytes_by_device() == self.ledger.shared_nbytes_by_device() == {}
        assert self.ledger.owners() == self.ledger._reached == set()


def test_the_books_balance_after_any_charges_and_releases():
    run_state_machine_as_test(LedgerMachine, settings=sized(1_000, stateful_step_count=30))


def test_an_allocation_that_two_owners_reach_counts_once_and_leaves_with_the_last():
    ledger, shared = Ledger(), Allocation("cuda:0", 1000, 64)
    ledger.charge("a", [shared, Allocation("cuda:0", 8, 8)])
    ledger.charge("b", [shared])
    assert ledger.nbytes_by_device() == {"cuda:0": 72}
    assert ledger.shared_nbytes_by_device() == {"cuda:0": 64}
    assert ledger.freed_without(["b"]) == {}
    assert ledger.freed_without(["a", "b", "a"]) == {"cuda:0": 72}
    ledger.charge("a", [])
    assert ledger.nbytes_by_device() == {"cuda:0": 64}
    ledger.charge("b", [])
    assert ledger.nbytes_by_device() == {}


def test_what_overlaps_in_part_or_across_sessions_counts_each():
    """The limit: torch does not know who owns the memory of a tensor over a part of an array."""
    whole = torch.zeros(100, dtype=torch.uint8).numpy()
    manager = SessionStateManager()
    with manager.lease("in part") as session:
        session.attrs.update(x=torch.from_numpy(whole[10:40]), y=torch.from_numpy(whole[30:70]))
    assert manager.stats()["total_nbytes"] == 30 + 40
    with manager.lease("within, in another session") as session:
        session.attrs["x"] = torch.from_numpy(whole[50:60])
    assert (manager.stats()["total_nbytes"], manager.stats()["shared_nbytes"]) == (80, 0)
    with manager.lease("within, in the same walk") as session:
        session.attrs.update(x=torch.from_numpy(whole[:5]), y=[whole])
    assert (manager.stats()["total_nbytes"], manager.stats()["shared_nbytes"]) == (180, 0)
    manager.drop_session("in part")
    assert manager.stats()["total_nbytes"] == 110
    manager.check()


def test_a_recycled_address_is_charged_before_the_stale_charge_is_replaced():
    ledger = Ledger()
    ledger.charge("old", [Allocation("cuda:0", 512, 512)])  # freed by now, and nobody has said so
    ledger.charge("new", [Allocation("cuda:0", 512, 512), Allocation("cuda:0", 256, 256)])
    ledger.check()
    assert ledger.nbytes_by_device() == {"cuda:0": 768}
    ledger.charge("old", [])
    ledger.check()
    assert ledger.nbytes_by_device() == {"cuda:0": 768}
    assert ledger.shared_nbytes_by_device() == {}


def test_the_same_address_on_two_devices_is_two_allocations():
    ledger = Ledger()
    ledger.charge("a", [Allocation(device, 8, 8) for device in ("cpu", "pinned", "cuda:0")])
    assert ledger.nbytes_by_device() == {"cpu": 8, "pinned": 8, "cuda:0": 8}


def test_figures_that_are_handed_out_are_the_callers_own():
    ledger = Ledger()
    ledger.charge("a", [Allocation("cpu", 8, 8)])
    ledger.nbytes_by_device().clear()
    assert ledger.nbytes_by_device() == {"cpu": 8}


def test_a_thousand_owners_that_share_move_and_leave_balance_out():
    draws = random.Random(7)
    ledger = Ledger()
    common = Allocation("cuda:0", 1 << 40, 1 << 20)
    for step in range(count(20_000)):
        name = draws.randrange(1024)
        own = [
            Allocation("cuda:0", (1 + draws.randrange(1 << 12)) * 512, 512 * draws.randint(1, 3))
            for _ in range(30)
        ]
        ledger.charge(name, [] if draws.random() < 0.2 else [common, *own])
        if step % 500 == 0:
            ledger.check()
    ledger.check()
    assert ledger.shared_nbytes_by_device()["cuda:0"] > 1 << 20
    for name in ledger.owners():
        ledger.charge(name, [])
    ledger.check()
    assert ledger.nbytes_by_device() == {}
    assert not ledger._reached
    assert not ledger._again


def test_reading_the_totals_touches_no_owner():
    class Untouchable(dict):
        def __getattribute__(self, name):
            raise AssertionError("the totals were summed over the owners")

        __iter__ = __len__ = __getitem__ = __getattribute__

    ledger = Ledger()
    for name in range(1024):
        ledger.charge(name, [Allocation("cpu", 1 + name * 100, 64)])
    ledger._charges = Untouchable()
    assert ledger.nbytes_by_device() == {"cpu": 65536}
    assert ledger.shared_nbytes_by_device() == {}


@pytest.mark.parametrize("after", range(40))
def test_a_charge_that_is_stopped_on_its_way_leaves_figures_that_are_a_recount(after):
    """At any line of the ledger's; a later charge is counted as if nothing had been."""
    first, second = AllocationLog(), AllocationLog()
    first.add([Allocation("cpu", 1, 1), Allocation("cpu", 2, 2)])
    second.add([Allocation("cpu", 4, 4)])
    ledger, passed = Ledger(), itertools.count()
    ledger.charge("b", [Allocation("cpu", 1, 1), Allocation("cpu", 3, 3), Allocation("cpu", 4, 4)])
    ledger.charge("a", [Allocation("cpu", 3, 3), Allocation("cpu", 5, 5)], first)

    def trace(frame, event, _):
        if frame.f_code.co_name in ("charge", "_take", "_put", "_keep") and next(passed) == after:
            raise SystemExit
        return trace

    with contextlib.suppress(SystemExit):
        sys.settrace(trace)
        try:
            ledger.charge("a", [Allocation("cpu", 6, 6)], second)
        finally:
            sys.settrace(None)
    ledger.check()
    ledger.charge("a", [Allocation("cpu", 6, 6)], second)
    ledger.check()
    assert ledger.nbytes_by_device() == {"cpu": 1 + 3 + 4 + 6}
    assert ledger.shared_nbytes_by_device() == {"cpu": 4}


def test_check_finds_a_figure_that_was_tampered_with():
    def ledger():
        made = Ledger()
        log = AllocationLog()
        log.add([Allocation("cpu", 60, 8)])
        made.charge("a", [Allocation("cpu", 8, 8), Allocation("cpu", 40, 8)], log)
        made.charge("b", [Allocation("cpu", 40, 8)])
        made.check()
        return made

    for tamper in (
        lambda ledger: ledger._total.update(cpu=25),
        lambda ledger: ledger._shared.update(cpu=0),
        lambda ledger: ledger._reached.discard(Allocation("cpu", 8, 8)),
        lambda ledger: ledger._reached.add(Allocation("cpu", 80, 8)),
        lambda ledger: ledger._again.update({Allocation("cpu", 60, 8): 1}),
        lambda ledger: ledger._again.clear(),
        lambda ledger: ledger._charges.pop("b"),
        lambda ledger: ledger._logs.pop("a"),
        lambda ledger: ledger._charges.update(a=ledger._charges["a"] | {Allocation("cpu", 60, 8)}),
        lambda ledger: ledger.charge("c", [Allocation("cpu", 70, 0)]),
    ):
        broken = ledger()
        tamper(broken)
        with pytest.raises(AssertionError):
            broken.check()

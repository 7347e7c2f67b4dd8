"""The ledger against a model that keeps the set of byte addresses of every owner."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from profiles import count, sized

from vllm_omni_session_state.accounting import interval_counter as addresses_module
from vllm_omni_session_state.accounting import sorted_list
from vllm_omni_session_state.accounting.ledger import Ledger, UnknownOwnerError
from vllm_omni_session_state.accounting.regions import Region, union


def addresses(regions) -> set[tuple[str, int]]:
    return {(device, start + i) for device, start, nbytes in regions for i in range(nbytes)}


def tally(found) -> dict[str, int]:
    return dict(Counter(device for device, _ in found))


region = st.builds(
    Region, st.sampled_from(["cpu", "cuda:0", "cuda:1"]), st.integers(0, 40), st.integers(1, 20)
)
owner = st.one_of(st.integers(0, 5), st.tuples(st.just("staged"), st.integers(0, 2)), st.none())


class LedgerMachine(RuleBasedStateMachine):
    """Charges, replacements and releases in any order, with regions that overlap in any way."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger()
        self.model: dict[object, set[tuple[str, int]]] = {}

    def without(self, owners) -> set[tuple[str, int]]:
        others = [held for name, held in self.model.items() if name not in owners]
        gone = [self.model[name] for name in owners]
        return set().union(*gone) - set().union(*others)

    @rule(owner=owner, regions=st.lists(region, max_size=5))
    def charge(self, owner, regions):
        self.ledger.charge(owner, regions)
        self.model[owner] = addresses(regions)

    @rule(owner=owner)
    def charge_the_same_again(self, owner):
        if owner in self.ledger:
            before = self.ledger.nbytes_by_device(), self.ledger.regions(owner)
            self.ledger.charge(owner, reversed(self.ledger.regions(owner)))
            assert (self.ledger.nbytes_by_device(), self.ledger.regions(owner)) == before

    @rule(owner=owner)
    def release(self, owner):
        if owner in self.model:
            expected = tally(self.without({owner}))
            assert self.ledger.release(owner) == expected
            del self.model[owner]
        else:
            with pytest.raises(UnknownOwnerError):
                self.ledger.release(owner)

    @rule(owner=owner, regions=st.lists(region, max_size=3), bad=st.sampled_from([(0, 0), (5, -1), (-1, 3)]))
    def charge_nonsense(self, owner, regions, bad):
        with pytest.raises(ValueError, match="is no memory"):
            self.ledger.charge(owner, [*regions, Region("cpu", *bad)])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def ask_what_would_go(self, data):
        owners = data.draw(st.lists(st.sampled_from(list(self.model))))
        assert self.ledger.freed_without(owners) == tally(self.without(set(owners)))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def move_to_another_ledger_and_back(self, data):
        name = data.draw(st.sampled_from(list(self.model)))
        other = Ledger()
        other.charge(name, self.ledger.regions(name))
        self.ledger.release(name)
        assert other.nbytes_by_device() == tally(self.model[name])
        self.ledger.charge(name, other.regions(name))
        assert other.release(name) == tally(self.model[name])
        assert other.nbytes_by_device() == {}

    @invariant()
    def the_figures_are_those_of_the_model(self):
        self.ledger.check()
        reached = Counter(byte for held in self.model.values() for byte in held)
        assert self.ledger.nbytes_by_device() == tally(reached)
        assert self.ledger.shared_nbytes_by_device() == tally(byte for byte, n in reached.items() if n > 1)
        assert set(self.ledger.owners()) == set(self.model)
        for name, held in self.model.items():
            assert name in self.ledger
            assert self.ledger.owner_nbytes(name) == tally(held)
            assert addresses(self.ledger.regions(name)) == held

    def teardown(self):
        for name in list(self.model):
            self.ledger.release(name)
            self.ledger.check()
        assert self.ledger.nbytes_by_device() == self.ledger.shared_nbytes_by_device() == {}


@pytest.fixture(autouse=True, params=[512, 4], ids="chunks of {}".format)
def chunk_size(request, monkeypatch):
    """Also with chunks so small that a handful of regions fills several."""
    for module in (addresses_module, sorted_list):
        monkeypatch.setattr(module, "CHUNK", request.param)


def test_the_books_balance_after_any_charges_and_releases():
    run_state_machine_as_test(LedgerMachine, settings=sized(1_000, stateful_step_count=30))


def test_a_byte_that_two_owners_reach_counts_once_and_leaves_with_the_last():
    ledger, shared = Ledger(), Region("cuda:0", 1000, 64)
    ledger.charge("a", [shared, Region("cuda:0", 0, 8)])
    ledger.charge("b", [shared])
    assert ledger.nbytes_by_device() == {"cuda:0": 72}
    assert ledger.shared_nbytes_by_device() == {"cuda:0": 64}
    assert ledger.freed_without(["b"]) == {}
    assert ledger.freed_without(["a", "b", "a"]) == {"cuda:0": 72}
    assert ledger.release("a") == {"cuda:0": 8}
    assert ledger.release("b") == {"cuda:0": 64}
    assert ledger.nbytes_by_device() == {}


def test_regions_that_overlap_in_part_are_counted_to_the_byte():
    ledger = Ledger()
    ledger.charge("array", [Region("cpu", 0, 100)])
    ledger.charge("tensor over its middle", [Region("cpu", 40, 20)])
    ledger.charge("tensor over its end", [Region("cpu", 90, 30)])
    assert ledger.nbytes_by_device() == {"cpu": 120}
    assert ledger.shared_nbytes_by_device() == {"cpu": 30}
    assert ledger.freed_without(["array"]) == {"cpu": 70}
    assert ledger.freed_without(["array", "tensor over its end"]) == {"cpu": 100}


def test_a_recycled_address_is_charged_before_the_stale_charge_is_replaced():
    ledger = Ledger()
    ledger.charge("old", [Region("cuda:0", 512, 512)])  # freed by now, and nobody has said so
    ledger.charge("new", [Region("cuda:0", 256, 512)])
    ledger.check()
    assert ledger.nbytes_by_device() == {"cuda:0": 768}
    ledger.charge("old", [])
    ledger.check()
    assert ledger.nbytes_by_device() == {"cuda:0": 512}
    assert ledger.shared_nbytes_by_device() == {}


def test_the_same_address_on_two_devices_is_two_bytes():
    ledger = Ledger()
    ledger.charge("a", [Region("cpu", 0, 8), Region("pinned", 0, 8), Region("cuda:0", 0, 8)])
    assert ledger.nbytes_by_device() == {"cpu": 8, "pinned": 8, "cuda:0": 8}


def test_a_second_release_names_the_owner_and_changes_nothing():
    ledger = Ledger()
    ledger.charge("a", [Region("cpu", 0, 8)])
    ledger.charge("b", [Region("cpu", 0, 4)])
    ledger.release("a")
    with pytest.raises(KeyError, match="'a' has no charge in this ledger") as caught:
        ledger.release("a")
    assert caught.value.owner == "a"
    for question in (ledger.regions, ledger.owner_nbytes, lambda name: ledger.freed_without(["b", name])):
        with pytest.raises(UnknownOwnerError):
            question("a")
    assert ledger.nbytes_by_device() == {"cpu": 4}


def test_a_charge_of_nothing_is_a_charge():
    ledger = Ledger()
    ledger.charge("a", [])
    assert "a" in ledger
    assert ledger.release("a") == {}
    assert "a" not in ledger


def test_figures_that_are_handed_out_are_the_callers_own():
    ledger = Ledger()
    ledger.charge("a", [Region("cpu", 0, 8)])
    ledger.nbytes_by_device().clear()
    assert ledger.nbytes_by_device() == {"cpu": 8}


def test_bookkeeping_does_not_grow_while_parts_of_a_long_lived_region_come_and_go():
    ledger = Ledger()
    ledger.charge("array", [Region("cpu", 0, 1 << 30)])
    for step in range(count(10_000)):
        start = step * 7919 % (1 << 29)
        ledger.charge("window", [Region("cpu", start, 4096)])
        assert len(ledger._devices["cpu"]._tangle.cuts) <= 4
    ledger.release("window")
    ledger.check()
    assert ledger._devices["cpu"]._stops == {0: 1 << 30}
    assert ledger._devices["cpu"]._tangle.cuts == {}


def test_a_thousand_owners_that_share_move_and_leave_balance_out():
    draws = random.Random(7)
    ledger = Ledger()
    common = Region("cuda:0", 1 << 40, 1 << 20)
    for step in range(count(20_000)):
        name = draws.randrange(1024)
        if draws.random() < 0.2 and name in ledger:
            ledger.release(name)
        else:
            own = [
                Region("cuda:0", draws.randrange(1 << 24) * 512, 512 * draws.randint(1, 9)) for _ in range(30)
            ]
            ledger.charge(name, [common, *own])
        if step % 500 == 0:
            ledger.check()
    ledger.check()
    for name in ledger.owners():
        ledger.release(name)
    ledger.check()
    assert ledger.nbytes_by_device() == {}
    assert ledger._devices == {}


def test_reading_the_totals_touches_no_owner():
    class Untouchable(dict):
        def __getattribute__(self, name):
            raise AssertionError("the totals were summed over the owners")

        __iter__ = __len__ = __getitem__ = __getattribute__

    ledger = Ledger()
    for name in range(1024):
        ledger.charge(name, [Region("cpu", name * 100, 64)])
    ledger._charges = Untouchable()
    assert ledger.nbytes_by_device() == {"cpu": 65536}
    assert ledger.shared_nbytes_by_device() == {}


def test_check_finds_a_figure_that_was_tampered_with():
    def ledger():
        made = Ledger()
        made.charge(
            "a", [Region("cpu", 0, 8), Region("cpu", 20, 8), Region("cpu", 40, 8), Region("cpu", 60, 8)]
        )
        made.charge("b", [Region("cpu", 4, 8), Region("cpu", 40, 8)])
        made.check()
        return made

    def find_a_block_in_the_tangle(device):
        device._stops.pop(60)
        device._order.remove(60)
        device._total -= 8
        device._tangle.add(60, 68)

    for tamper in (
        lambda device: setattr(device, "_total", device._total + 1),
        lambda device: setattr(device, "_shared", 0),
        lambda device: device._stops.update({20: 29}),
        lambda device: device._stops.update({80: 88}),
        lambda device: device._again.update({60: 1}),
        lambda device: device._again.clear(),
        lambda device: device._order.remove(40),
        find_a_block_in_the_tangle,
        lambda device: setattr(device._tangle, "total", 0),
        lambda device: setattr(device._tangle, "shared", 0),
        lambda device: setattr(device._tangle.cuts[4], "cover", 1),
        lambda device: setattr(device._tangle.cuts[4], "edges", 2),
        lambda device: setattr(device._tangle.cuts[4], "after", 12),
        lambda device: device._tangle.order.chunks[0].pop(),
    ):
        broken = ledger()
        tamper(broken._devices["cpu"])
        with pytest.raises(AssertionError):
            broken.check()


def test_what_overlaps_nothing_any_more_costs_no_more_than_what_never_did():
    """Regions that overlapped in part are single entries again once their counterpart has gone."""
    ledger = Ledger()
    ledger.charge("a", [Region("cpu", 0, 100)])
    ledger.charge("twin of a", [Region("cpu", 0, 100)])
    ledger.charge("neighbour", [Region("cpu", 100, 10)])
    ledger.charge("b", [Region("cpu", 90, 15)])
    space = ledger._devices["cpu"]
    assert space._stops == {}
    assert ledger.shared_nbytes_by_device() == {"cpu": 105}
    ledger.release("b")
    ledger.check()
    assert space._stops == {0: 100, 100: 110}
    assert space._tangle.cuts == {}
    assert ledger.nbytes_by_device() == {"cpu": 110}
    assert ledger.shared_nbytes_by_device() == {"cpu": 100}


def test_union_joins_what_overlaps_and_leaves_apart_what_only_touches():
    a, b, c = Region("cpu", 0, 10), Region("cpu", 10, 10), Region("cpu", 5, 2)
    assert union([b, c, a]) == (a, b)
    assert union([b, Region("cpu", 5, 10)]) == (Region("cpu", 5, 15),)
    assert union([Region("cuda:0", 0, 10), a, a]) == (a, Region("cuda:0", 0, 10))
    assert a.stop == 10


def test_a_union_of_a_union_is_itself():
    once = union([Region("cpu", 0, 10), Region("cpu", 5, 10)])
    assert union(once) is once
    assert union(once + once) == once

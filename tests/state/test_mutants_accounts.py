"""The suite can fail: each mistake that the books could make is caught by a test of this folder."""

from __future__ import annotations

from unittest import mock

import pytest
import test_accounts as accounts_tests
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from vllm_omni_session_state import SessionStateManager
from vllm_omni_session_state.accounting import accounts, ledger
from vllm_omni_session_state.accounting.accounts import Accounts
from vllm_omni_session_state.accounting.footprint import footprint
from vllm_omni_session_state.accounting.interval_counter import IntervalCounter
from vllm_omni_session_state.accounting.ledger import Ledger
from vllm_omni_session_state.accounting.overlap_map import OverlapMap
from vllm_omni_session_state.accounting.regions import TIER
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.state.session import Declaration, Role, SessionState

FEW = settings(
    max_examples=100,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def any_life_of_sessions():
    run_state_machine_as_test(accounts_tests.AccountsMachine, settings=FEW)


def a_detached_session():
    accounts_tests.test_a_detached_session_is_counted_until_nobody_holds_it_without_the_garbage_collector()


def a_session_between_its_loss_and_its_next_settlement():
    """Lost, and not yet settled again without the engine's part: who looks at that moment misses nothing."""
    books, session = Accounts(), SessionState("a")
    books.open(session.serial)
    books.settle(session.serial, device=footprint(torch.zeros(10, dtype=torch.uint8)).regions)
    books.detach(session.serial, session)
    assert books.figures()["detached_nbytes"] == 10
    books.check((), idle=set())


def a_detached_session_of_both_roles():
    tests = accounts_tests
    tests.test_a_detached_session_is_charged_for_all_that_it_comes_to_hold_on_the_device_and_in_host_memory()


def values_in_both_roles():
    """A session with a value on the host and one on the device, one of them over part of the other."""
    manager = SessionStateManager(
        declaration=Declaration(device_nbytes=1000, host_fields=frozenset({"film"}))
    )
    whole = torch.zeros(100, dtype=torch.uint8)
    with manager.lease("a") as session:
        session.attrs["film"] = torch.from_numpy(whole.numpy()[10:40])
        session.attrs["latents"] = torch.from_numpy(whole.numpy()[30:70])
    assert manager.stats()["total_nbytes"] == 60
    manager.check()
    with manager.lease("b") as session:
        session.attrs["latents"] = torch.from_numpy(whole.numpy()[35:45])
    assert (manager.stats()["total_nbytes"], manager.stats()["shared_nbytes"]) == (60, 10)
    manager.check()
    with manager.lease("c") as session:
        session.attrs["latents"] = torch.from_numpy(whole.numpy()[65:80])
    assert (manager.stats()["total_nbytes"], manager.stats()["shared_nbytes"]) == (70, 15)
    manager.check()
    manager.drop_session("a")
    assert (manager.stats()["total_nbytes"], manager.stats()["shared_nbytes"]) == (25, 0)
    manager.check()


def a_session_in_each_tier():
    """One that is parked beside one that is ready; each keeps something in host memory itself."""
    manager = SessionStateManager(
        tier=HostTier(budget=1 << 20),
        declaration=Declaration(device_nbytes=1000, host_fields=frozenset({"film"})),
    )
    for key in "ab":
        with manager.lease(key) as session:
            session.attrs["film"] = torch.zeros(30, dtype=torch.uint8)
            session.attrs["latents"] = torch.zeros(100, dtype=torch.uint8)
    manager.park("a")
    tiers = {name: count for name, count in manager.stats().items() if name.startswith(TIER)}
    assert tiers == {
        f"{TIER}device:live:cpu": 100,
        f"{TIER}host:live:cpu": 60,
        f"{TIER}host:parked:cpu": 512,
    }
    assert manager.stats()["total_nbytes"] == 672
    manager.check()
    with manager.lease("a"):
        pass
    assert manager.stats()[f"{TIER}host:parked:cpu"] == 0
    manager.park("a")
    manager.drop_session("a")
    assert manager.stats()[f"{TIER}host:parked:cpu"] == 0
    manager.check()


def what_the_host_keeps():
    manager = SessionStateManager()
    for size in (10, 20, 5):
        kept = torch.zeros(size, dtype=torch.uint8)
        manager.charge_outside("copy", [kept])
        assert (manager.stats()["outside"], manager.stats()["total_nbytes"]) == (size, 0)
    manager.charge_outside("copy")
    assert manager.stats()["outside"] == 0


def detach_releases_nothing():
    def detach(self, owner, session):
        self._detached.charge(owner, self._table.regions(owner))
        accounts.weakref.finalize(session, self._ended.append, owner).atexit = False

    return mock.patch.object(Accounts, "detach", detach)


def detach_charges_nobody():
    def detach(self, owner, session):
        self._detached.charge(owner, ())
        self._forget(owner)
        accounts.weakref.finalize(session, self._ended.append, owner).atexit = False

    return mock.patch.object(Accounts, "detach", detach)


def finalize_is_lost():
    return mock.patch.object(accounts.weakref, "finalize", mock.MagicMock())


def settle_forgets_what_is_staged():
    settle = Accounts.settle

    def forgetful(self, owner, *, staged=(), **held):
        settle(self, owner, staged=(), **held)

    return mock.patch.object(Accounts, "settle", forgetful)


def settle_forgets_the_host():
    settle = Accounts.settle

    def forgetful(self, owner, *, host=(), **held):
        settle(self, owner, host=(), **held)

    return mock.patch.object(Accounts, "settle", forgetful)


def a_detached_session_is_charged_for_its_device_part_alone():
    settle = Accounts.settle

    def forgetful(self, owner, *, device=(), **held):
        if owner in self._detached:
            held = {"staged": held.get("staged", ())}
        settle(self, owner, device=device, **held)

    return mock.patch.object(Accounts, "settle", forgetful)


def settle_forgets_the_slab():
    settle = Accounts.settle

    def forgetful(self, owner, *, parcel=(), **held):
        settle(self, owner, parcel=(), **held)

    return mock.patch.object(Accounts, "settle", forgetful)


def what_is_parked_is_of_the_device():
    return mock.patch.object(Accounts, "held_by_tier", lambda self: by_tier_without(self, {"parked"}))


def what_models_keep_on_the_host_is_of_the_device():
    return mock.patch.object(Accounts, "held_by_tier", lambda self: by_tier_without(self, {"live"}))


BY_TIER = Accounts.held_by_tier


def by_tier_without(books, kinds):
    """The tiers, with what is on the host of these kinds counted to the device."""
    found = BY_TIER(books)
    for (tier, kind, device), count in list(found.items()):
        if tier == "host" and kind in kinds:
            found["device", "live", device] = found.get(("device", "live", device), 0) + count
            found[tier, kind, device] = 0
    return found


def settle_never_runs():
    return mock.patch.object(SessionStateManager, "settle", return_value=((), None))


def contents_without_the_objects():
    nothing = Role([], [])
    return mock.patch.object(
        SessionState, "parts", lambda self, _: (Role([*self.attrs.values()], []), nothing, nothing)
    )


def close_keeps_what_is_staged():
    return mock.patch.object(Accounts, "close", Accounts._forget)


def close_keeps_the_charge():
    return mock.patch.object(Accounts, "close", lambda self, owner: self._staged.release(owner))


def a_dropped_session_stays_idle():
    return mock.patch.object(accounts._Late, "forget", return_value=None)


def shared_bytes_count_twice():
    return mock.patch.object(IntervalCounter, "total", property(lambda self: self._total + self.shared))


def a_charge_is_added_to_the_last():
    replace = Ledger._replace
    return mock.patch.object(Ledger, "_replace", lambda self, old, new: replace(self, {}, new))


def overlaps_within_one_session_count_twice():
    def apart(regions):
        return tuple(sorted(set(regions)))

    return mock.patch.object(ledger, "union", apart)


def overlaps_between_sessions_are_not_looked_for():
    return mock.patch.object(OverlapMap, "reaches", return_value=False)


def what_is_outside_adds_up():
    charge = Accounts.charge_outside

    def another(self, name, regions):
        charge(self, f"{name} {len(self._outside.owners())}", regions)

    return mock.patch.object(Accounts, "charge_outside", another)


CAUGHT_BY = {
    detach_releases_nothing: a_detached_session,
    detach_charges_nobody: a_session_between_its_loss_and_its_next_settlement,
    finalize_is_lost: a_detached_session,
    settle_forgets_what_is_staged: any_life_of_sessions,
    settle_forgets_the_host: values_in_both_roles,
    a_detached_session_is_charged_for_its_device_part_alone: a_detached_session_of_both_roles,
    settle_forgets_the_slab: a_session_in_each_tier,
    what_is_parked_is_of_the_device: a_session_in_each_tier,
    what_models_keep_on_the_host_is_of_the_device: a_session_in_each_tier,
    settle_never_runs: any_life_of_sessions,
    contents_without_the_objects: any_life_of_sessions,
    close_keeps_what_is_staged: any_life_of_sessions,
    close_keeps_the_charge: any_life_of_sessions,
    a_dropped_session_stays_idle: any_life_of_sessions,
    shared_bytes_count_twice: any_life_of_sessions,
    a_charge_is_added_to_the_last: any_life_of_sessions,
    overlaps_within_one_session_count_twice: values_in_both_roles,
    overlaps_between_sessions_are_not_looked_for: values_in_both_roles,
    what_is_outside_adds_up: what_the_host_keeps,
}


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Evictions are said at WARNING; here there are many."""
    caplog.set_level("CRITICAL", logger="vllm_omni.session_state")


@pytest.mark.parametrize("check", dict.fromkeys(CAUGHT_BY.values()), ids=lambda check: check.__name__)
def test_without_a_mistake_the_check_passes(check):
    check()


@pytest.mark.parametrize("mutant", CAUGHT_BY, ids=lambda mutant: mutant.__name__)
def test_the_mutant_is_caught(mutant, capsys):
    with mutant(), pytest.raises(AssertionError):
        CAUGHT_BY[mutant]()

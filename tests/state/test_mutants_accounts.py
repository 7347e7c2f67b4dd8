"""The suite can fail: each mistake that the books could make is caught by a test of this folder."""

from __future__ import annotations

from unittest import mock

import pytest
import test_accounts as accounts_tests
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from vllm_omni_session_state import SessionStateManager
from vllm_omni_session_state.accounting import accounts, allocations
from vllm_omni_session_state.accounting.accounts import Accounts, Held
from vllm_omni_session_state.accounting.allocations import TIER
from vllm_omni_session_state.accounting.footprint import footprint
from vllm_omni_session_state.accounting.ledger import Ledger
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
    books.settle(session.serial, Held(footprint(torch.zeros(10, dtype=torch.uint8)).allocations))
    books.detach(session.serial, session)
    assert books.figures()["detached_nbytes"] == 10
    books.check((), idle=set())


def a_detached_session_of_both_roles():
    tests = accounts_tests
    tests.test_a_detached_session_is_charged_for_all_that_it_comes_to_hold_on_the_device_and_in_host_memory()


def values_in_both_roles():
    """A value that is in host memory and on the device, by its role, and in another session as well."""
    manager = SessionStateManager(
        declaration=Declaration(device_nbytes=1000, host_fields=frozenset({"film"}))
    )
    film, latents = torch.zeros(30, dtype=torch.uint8), torch.zeros(40, dtype=torch.uint8)
    with manager.lease("a") as session:
        session.attrs.update(film=[film, latents[5:]], latents=latents[:10])
    assert (manager.stats()["total_nbytes"], manager.stats()["shared_nbytes"]) == (70, 0)
    manager.check()
    with manager.lease("b") as session:
        session.attrs["latents"] = [latents, torch.zeros(7, dtype=torch.uint8)]
    assert (manager.stats()["total_nbytes"], manager.stats()["shared_nbytes"]) == (77, 40)
    manager.check()
    manager.drop_session("a")
    assert (manager.stats()["total_nbytes"], manager.stats()["shared_nbytes"]) == (47, 0)
    manager.check()


def a_part_of_an_array_beside_it():
    """Torch does not know the array; whoever walks both finds that one is within the other."""
    manager, whole = SessionStateManager(), torch.zeros(100, dtype=torch.uint8).numpy()
    with manager.lease("a") as session:
        session.attrs.update(part=torch.from_numpy(whole[:40]), whole=whole)
    assert manager.stats()["total_nbytes"] == 100


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
        self._in_detached.charge(owner, self._held[owner].all)
        accounts.weakref.finalize(session, self._ended.append, owner).atexit = False

    return mock.patch.object(Accounts, "detach", detach)


def detach_charges_nobody():
    detach = Accounts.detach

    def forgetful(self, owner, session):
        detach(self, owner, session)
        self._held[owner] = Held()

    return mock.patch.object(Accounts, "detach", forgetful)


def finalize_is_lost():
    return mock.patch.object(accounts.weakref, "finalize", mock.MagicMock())


def forgetful(forget):
    """Each session is charged for what ``forget`` leaves of what it holds."""
    settle = Accounts.settle
    return mock.patch.object(
        Accounts, "settle", lambda self, owner, held: settle(self, owner, forget(self, owner, held))
    )


def settle_forgets_what_is_staged():
    return forgetful(lambda _, __, held: held._replace(staged=()))


def settle_forgets_the_host():
    return forgetful(lambda _, __, held: held._replace(host=()))


def a_detached_session_is_charged_for_its_device_part_alone():
    return forgetful(lambda books, owner, held: Held(held.device) if owner in books._detached else held)


def settle_forgets_the_slab():
    return forgetful(lambda _, __, held: held._replace(parcel=()))


def a_change_is_told_to_nobody():
    return mock.patch.object(Accounts, "_tell", Accounts._close_ended)


def a_session_in_use_stays_idle():
    return mock.patch.object(Accounts, "lease", lambda self, owner: self._changed.add(owner))


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
    return mock.patch.object(SessionStateManager, "settle", return_value=None)


def contents_without_the_objects():
    nothing = Role([], [])
    return mock.patch.object(
        SessionState, "parts", lambda self, _: (Role([*self.attrs.values()], []), nothing, [], [])
    )


def close_keeps_what_is_staged():
    def close(self, owner):
        held = self._held.pop(owner)
        self._unused.discard(owner)
        self._held[owner] = Held(staged=held.staged)
        self._changed.add(owner)

    return mock.patch.object(Accounts, "close", close)


def close_keeps_the_charge():
    def close(self, owner):
        self._held[owner] = self._held[owner]._replace(staged=())
        self._unused.discard(owner)
        self._changed.add(owner)

    return mock.patch.object(Accounts, "close", close)


def a_dropped_session_stays_idle():
    def close(self, owner):
        self._held.pop(owner, None)
        self._charge(owner)

    return mock.patch.object(Accounts, "close", close)


def shared_bytes_count_twice():
    nbytes = Ledger.nbytes_by_device

    def twice(self):
        shared = self.shared_nbytes_by_device()
        return {device: count + shared.get(device, 0) for device, count in nbytes(self).items()}

    return mock.patch.object(Ledger, "nbytes_by_device", twice)


def a_charge_is_added_to_the_last():
    return mock.patch.object(Ledger, "_take", return_value=None)


def an_allocation_in_two_roles_counts_twice():
    put = Ledger._put
    charge = Ledger.charge

    def twice(self, owner, allocations, log=None):
        charge(self, owner, allocations, log)
        put(self, {each for each in allocations if list(allocations).count(each) > 1})

    return mock.patch.object(Ledger, "charge", twice)


def what_is_shared_is_freed_with_the_first():
    def take(self, gone):
        for each in gone:
            self._again.pop(each, None)
            self._reached.discard(each)
            self._total[each.device] -= each.nbytes

    return mock.patch.object(Ledger, "_take", take)


def a_part_is_not_looked_for():
    return mock.patch.object(
        allocations, "distinct", lambda spans: tuple(map(allocations.as_allocation, sorted(set(spans))))
    )


def what_is_outside_adds_up():
    charge = Accounts.charge_outside

    def another(self, name, allocations):
        charge(self, f"{name} {len(self._outside.owners())}", allocations)

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
    an_allocation_in_two_roles_counts_twice: values_in_both_roles,
    what_is_shared_is_freed_with_the_first: values_in_both_roles,
    a_part_is_not_looked_for: a_part_of_an_array_beside_it,
    a_change_is_told_to_nobody: any_life_of_sessions,
    a_session_in_use_stays_idle: any_life_of_sessions,
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

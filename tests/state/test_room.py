"""Who leaves the device, who comes back and who is refused, case by case; threads."""

import logging
import threading

import pytest
import torch
from profiles import count

from vllm_omni_session_state import SessionStateManager
from vllm_omni_session_state.base.errors import NoRoomError, SessionStateLostError
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.manager.entry import Lease
from vllm_omni_session_state.manager.losses import Reason
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.state.session import Declaration

SIZE = 100
SLAB = 512  # what one storage of that size is charged in a slab


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Losses are said at WARNING; here there are thousands."""
    caplog.set_level(logging.ERROR, logger="vllm_omni.session_state")


def test_idle_sessions_fit_the_budget_after_every_use_and_the_oldest_leave_first():
    manager = SessionStateManager(device_budget=2 * SIZE, tier=HostTier(budget=1 << 20))
    for key in "abcd":
        with manager.lease(key) as session:
            session.attrs["x"] = torch.ones(SIZE, dtype=torch.uint8)
    assert [key for key in "abcd" if manager.peek(key).parked] == ["a", "b"]
    with manager.lease("a"):
        pass
    assert [key for key in "abcd" if manager.peek(key).parked] == ["b", "c"]


def test_the_host_budget_is_for_what_is_parked_and_for_what_lives_there_each_byte_once():
    frames = 300
    tier = HostTier(budget=4 * SLAB + 5 * frames)
    manager = SessionStateManager(
        max_sessions=1,
        tier=tier,
        on_lost="error",
        declaration=Declaration(device_nbytes=SIZE, host_fields=frozenset({"frames"})),
    )
    for key in "abcde":
        with manager.lease(key) as session:
            session.attrs["x"] = torch.ones(SIZE, dtype=torch.uint8)
            session.attrs["frames"] = torch.ones(frames, dtype=torch.uint8)
    assert [key for key in "abcde" if manager.peek(key).parked] == ["a", "b", "c", "d"]
    assert manager.stats()["total_nbytes"] == tier.budget + SIZE
    with pytest.raises(NoRoomError, match="the host tier has 0 bytes left"), manager.lease("f"):
        raise AssertionError("there was no room")


def test_after_a_use_that_failed_nobody_is_moved():
    manager = SessionStateManager(device_budget=0, tier=HostTier(budget=1 << 20))

    def fail():
        with manager.lease("a") as session:
            session.attrs["x"] = torch.ones(SIZE, dtype=torch.uint8)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not manager.peek("a").parked


def test_a_victim_is_judged_by_what_would_really_go():
    """The oldest shares every byte with the newest: parking it alone frees nothing, so the next one goes."""
    manager = SessionStateManager(tier=HostTier(budget=1 << 20))
    shared = torch.ones(SIZE, dtype=torch.uint8)
    for key in "abcd":
        with manager.lease(key) as session:
            session.attrs["x"] = shared if key in "ad" else torch.ones(SIZE, dtype=torch.uint8)
    manager.capacity.device_budget = 2 * SIZE
    with manager.lease("e"):
        pass
    assert [key for key in "abcd" if manager.peek(key).parked] == ["b"]
    with manager.lease("b") as session:
        assert session.attrs["x"].tolist() == [1] * SIZE
    manager.check()


def test_a_storage_that_lives_on_outside_is_named_and_comes_back_as_itself(caplog):
    forget_said()
    manager = SessionStateManager(max_sessions=1, tier=HostTier(budget=1 << 20))
    outside = torch.ones(SIZE, dtype=torch.uint8)
    with manager.lease("a") as session:
        session.attrs["lent"] = outside
        session.attrs["own"] = torch.ones(SIZE, dtype=torch.uint8)
    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"), manager.lease("b"):
        pass
    alive = manager._table.entries["a"].gone_to.alive
    assert [storage.nbytes() for storage in alive.values()] == [SIZE], "only its own bytes are freed"
    assert [record for record in caplog.records if "does not free its lent" in record.getMessage()]
    outside[0] = 7
    with manager.lease("a") as session:
        assert session.attrs["lent"].data_ptr() == outside.data_ptr()
        assert session.attrs["lent"][0] == 7


def test_two_callers_of_a_parked_session_wait_for_one_restore():
    gets = []

    class SlowTier(HostTier):
        def get(self, parcel):
            gets.append(1)
            started.set()
            assert go_on.wait(300)
            return super().get(parcel)

    started, go_on = threading.Event(), threading.Event()
    manager = SessionStateManager(max_sessions=1, tier=SlowTier(budget=1 << 20))
    with manager.lease("a") as session:
        session.attrs["x"] = torch.ones(SIZE, dtype=torch.uint8)
    with manager.lease("b"):
        pass
    sums = []

    def read():
        with manager.lease("a") as session:
            sums.append(int(session.attrs["x"].sum()))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert started.wait(300)
    with manager.lease("c"):
        pass  # the lock is free while bytes move
    go_on.set()
    for thread in threads:
        thread.join()
    assert sums == [SIZE, SIZE]
    assert len(gets) == 1
    manager.check()


def test_a_drop_during_a_lease_takes_effect_once_at_its_end():
    manager = SessionStateManager()
    with manager.lease("a") as session:
        session.attrs["x"] = torch.ones(SIZE, dtype=torch.uint8)
        assert manager.drop_session("a")
        assert manager.drop_session("a")
        assert session.attrs["x"].sum() == SIZE, "whoever uses it keeps it to the end"
    assert "a" not in manager
    assert not manager.drop_session("a")
    assert session.attrs == {}


def test_the_loss_that_is_recorded_while_a_drop_waits_for_a_lease_stays_recorded():
    manager = SessionStateManager(on_lost="error")
    with manager.lease("a"):
        manager.drop_session("a")
        manager.mark_lost("a", Reason.FORWARD_EXCEPTION)
    assert "a" not in manager
    assert manager.has_lost("a")
    with pytest.raises(SessionStateLostError), manager.lease("a"):
        raise AssertionError("it began anew in silence")


def test_a_pin_is_taken_over_once_and_counts_as_one_use():
    manager = SessionStateManager(tier=HostTier(budget=1 << 20))
    pin = manager.prepare("a")
    assert not manager.park("a"), "it is in use"
    with manager.lease("a") as session:
        assert session is pin.session
        manager.give_back("a")
        assert manager.used("a"), "it is the lease's by now"
    assert not manager.used("a")
    manager.prepare("a")
    manager.prepare("a")
    manager.give_back("a")
    assert not manager.used("a"), "the later pin stands for both"
    assert manager.prepare("b", new=False) is None
    assert "b" not in manager
    stats = manager.stats()
    assert (stats["hits"], stats["misses"]) == (1, 1)
    manager.check()


def test_a_lease_that_ends_twice_ends_nobody_elses():
    manager = SessionStateManager()
    first, second = Lease("a"), Lease("a")
    for lease in (first, second):
        manager._uses.begin("a", lease)
    for _ in range(2):
        manager._uses.end(first)
    assert manager.used("a")
    manager._uses.end(second)
    assert not manager.used("a")
    manager.check()


def test_sixteen_threads_lose_nothing_and_leave_nothing():
    """The library alone; in vLLM-Omni all of this runs on one thread."""
    operations = count(100_000) // 16
    manager = SessionStateManager(max_sessions=6, device_budget=4 * SIZE, tier=HostTier(budget=1 << 30))
    failures = []

    def work(seed):
        try:
            for step in range(operations):
                key = f"s{(seed * 31 + step * 7) % 24}"
                if (seed + step) % 97 == 0:
                    manager.drop_session(key)
                    continue
                with manager.lease(key) as session:
                    tensor = session.attrs.setdefault(
                        "x", torch.full((SIZE,), hash(key) % 100, dtype=torch.uint8)
                    )
                    assert int(tensor[0]) == int(tensor[-1]) == hash(key) % 100
        except Exception as error:  # noqa: BLE001 - carried to the asserting thread
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    manager.check()
    assert not [name for name in manager.stats() if name.startswith("lost:")]
    manager.drop_all()
    manager.check()
    assert manager.stats()["total_nbytes"] == 0
    assert manager.offloader.host.nbytes == 0

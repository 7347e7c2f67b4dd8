"""Two ranks with other bytes and other faults take the same requests: what is decided is the same on both.

The ranks are two managers in two threads with a barrier between them; a real group is in
``tests/dreamzero/test_parking_ranks.py``.
"""

import logging
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import sized

from vllm_omni_session_state import SessionStateManager
from vllm_omni_session_state.errors import NoRoomError, SessionRestoreFailedError, SessionStateLostError
from vllm_omni_session_state.events import forget_said
from vllm_omni_session_state.session import Declaration
from vllm_omni_session_state.tiers.disk import DiskTier
from vllm_omni_session_state.tiers.host import HostTier

DECLARED = 1200  # above what a slab of any session here takes
KEYS = st.sampled_from(["a", "b", "c", "d"])
COUNTS = ("sessions", "parked_sessions", "disk_sessions", "parks", "restores")
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
LIMIT_S = 20  # nobody waits that long but for a rank that never comes


class Rank:
    """One rank: a manager whose sessions are of its own size and whose tier fails at its own times."""

    def __init__(self, number, meeting, **bounds):
        self.number, self.meeting = number, meeting
        self.fails_at, self.calls = set(), 0
        rank = self

        class Faulty:
            def put(self, *args, **kwargs):
                rank.maybe_fail()
                return super().put(*args, **kwargs)

            def get(self, held):
                rank.maybe_fail()
                return super().get(held)

        class Host(Faulty, HostTier):
            pass

        class Disk(Faulty, DiskTier):
            pass

        host, disk = bounds.pop("host"), bounds.pop("disk", None)
        self.folder = None if disk is None else tempfile.TemporaryDirectory(dir=MEMORY)
        self.manager = SessionStateManager(
            declaration=Declaration(device_nbytes=DECLARED, host_fields=frozenset()),
            tier=None if host is None else Host(budget=host * DECLARED),
            disk=None if disk is None else Disk(self.folder.name, budget=disk * DECLARED),
            exchange=self.exchange,
            **bounds,
        )

    def maybe_fail(self):
        self.calls += 1
        if self.calls in self.fails_at:
            raise MemoryError("as asked")

    def exchange(self, said):
        self.meeting.told[self.number] = said
        self.meeting.barrier.wait(LIMIT_S)
        told = list(self.meeting.told)
        self.meeting.barrier.wait(LIMIT_S)
        return told

    def use(self, key):
        """One forward; what a client of it sees, and what is where afterwards."""
        try:
            with self.manager.lease(key) as session:
                new = "x" not in session.attrs
                if new:
                    size = 10 + self.number * (300 + 100 * (ord(key) % 5))
                    session.attrs["x"] = torch.full((size,), ord(key) + self.number, dtype=torch.uint8)
                tensor = session.attrs["x"]
                assert int(tensor[0]) == int(tensor[-1]) == ord(key) + self.number
                outcome = "new" if new else "goes on"
        except (NoRoomError, SessionRestoreFailedError, SessionStateLostError) as error:
            outcome = f"{type(error).__name__}: {error}"
        return outcome

    def do(self, action, key):
        forget_said()
        if action == "drop":
            outcome = self.manager.drop_session(key)
        elif action == "park":
            try:
                outcome = self.manager.park(key)
            except Exception as error:  # noqa: BLE001 - compared with the other rank's
                outcome = str(error)
        else:
            outcome = self.use(key)
        self.manager.check()
        stats = self.manager.stats()
        counts = {name: stats.get(name) for name in COUNTS}
        losses = {name: count for name, count in stats.items() if name.startswith("lost:")}
        there = self.manager.keys()
        places = [entry.place for entry in self.manager.listing()]
        return outcome, counts, losses, [key for key in there if self.manager.peek(key).parked], there, places

    def end(self):
        self.manager.drop_all()
        self.manager.check()
        assert self.manager.stats()["total_nbytes"] == self.manager.stats()["disk_nbytes"] == 0
        cascade = self.manager.cascade
        assert cascade.host is None or cascade.host.nbytes == 0
        if cascade.disk is not None:
            cascade.disk.close()
            self.folder.cleanup()


class Meeting:
    """Where two ranks tell each other."""

    def __init__(self):
        self.told = [None, None]
        self.barrier = threading.Barrier(2)


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Losses are said at WARNING; here there are thousands."""
    caplog.set_level(logging.ERROR, logger="vllm_omni.session_state")


def together(ranks, pool, action, key):
    return [done.result(LIMIT_S) for done in [pool.submit(rank.do, action, key) for rank in ranks]]


@given(
    cap=st.integers(1, 4),
    budget=st.none() | st.integers(0, 3 * DECLARED),
    host=st.none() | st.integers(0, 3),
    disk=st.none() | st.integers(0, 3),
    strict=st.booleans(),
    faults=st.tuples(st.sets(st.integers(1, 20)), st.sets(st.integers(1, 20))),
    steps=st.lists(st.tuples(st.sampled_from(["use"] * 5 + ["drop", "park"]), KEYS), max_size=30),
)
@sized(2000)
def test_two_ranks_decide_alike_whatever_each_holds_and_whatever_fails_on_it(
    cap, budget, host, disk, strict, faults, steps
):
    meeting = Meeting()
    ranks = [
        Rank(
            number,
            meeting,
            max_sessions=cap,
            device_budget=budget,
            host=host,
            disk=disk,
            on_lost="error" if strict else "warn",
        )
        for number in range(2)
    ]
    for rank, fails_at in zip(ranks, faults, strict=True):
        rank.fails_at = fails_at
    with ThreadPoolExecutor(2) as pool:
        for action, key in steps:
            first, second = together(ranks, pool, action, key)
            assert first == second
            on_disk = first[1]["disk_sessions"]
            assert on_disk <= (disk or 0)
            assert first[1]["parked_sessions"] - on_disk <= (host or 0)
    for rank in ranks:
        rank.end()


def test_a_session_counts_as_declared_however_little_a_rank_holds_of_it():
    meeting = Meeting()
    ranks = [
        Rank(number, meeting, max_sessions=9, device_budget=2 * DECLARED, host=4, on_lost="warn")
        for number in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        for key in "abcd":
            first, second = together(ranks, pool, "use", key)
    assert first == second
    assert first[3] == ["a", "b"]
    assert ranks[0].manager.stats()["total_nbytes"] < DECLARED


def test_a_restore_that_fails_on_one_rank_fails_on_both_with_one_error_and_succeeds_when_tried_again():
    meeting = Meeting()
    ranks = [
        Rank(number, meeting, max_sessions=1, device_budget=None, host=4, on_lost="warn")
        for number in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        for key in "ab":
            together(ranks, pool, "use", key)
        ranks[1].fails_at = {ranks[1].calls + 1}
        first, second = together(ranks, pool, "use", "a")
        assert first == second
        assert first[0].startswith("SessionRestoreFailedError")
        assert "stays parked: rank 1: MemoryError: as asked" in first[0]
        assert first[3] == ["a"], "it is where it was"
        first, second = together(ranks, pool, "use", "a")
        assert first[0] == second[0] == "goes on"


def test_a_rank_that_cannot_park_keeps_its_bytes_says_so_and_gives_the_same_ones_back(caplog):
    meeting = Meeting()
    ranks = [
        Rank(number, meeting, max_sessions=1, device_budget=None, host=4, on_lost="warn")
        for number in range(2)
    ]
    ranks[1].fails_at = {1}
    caplog.set_level(logging.WARNING, logger="vllm_omni.session_state")
    with ThreadPoolExecutor(2) as pool:
        together(ranks, pool, "use", "a")
        held = ranks[1].manager.peek("a").attrs["x"]
        where = held.data_ptr()
        del held
        first, second = together(ranks, pool, "use", "b")
        assert first == second
        assert first[3] == ["a"]
        assert ranks[1].manager.stats()["nbytes:cpu"] > 0
        assert [
            record for record in caplog.records if "of a parked session stays where it is" in record.message
        ]
        assert together(ranks, pool, "use", "a")[1][0] == "goes on"
        assert ranks[1].manager.peek("a").attrs["x"].data_ptr() == where, "it never moved"


def test_sessions_go_on_to_the_disk_on_both_ranks_and_one_that_cannot_write_keeps_its_bytes(caplog):
    meeting = Meeting()
    bounds = {"max_sessions": 1, "device_budget": None, "host": 1, "disk": 3, "on_lost": "warn"}
    ranks = [Rank(number, meeting, **bounds) for number in range(2)]
    caplog.set_level(logging.WARNING, logger="vllm_omni.session_state")
    with ThreadPoolExecutor(2) as pool:
        for key in "abc":
            first, second = together(ranks, pool, "use", key)
        assert first == second
        assert first[5] == ["disk", "host", "device"]
        assert [rank.manager.stats()["disk_nbytes"] > 0 for rank in ranks] == [True, True]
        ranks[1].fails_at = {ranks[1].calls + 1}  # when one goes on from host memory
        first, second = together(ranks, pool, "use", "d")
        assert first == second
        assert first[5] == ["disk", "disk", "host", "device"]
        assert "what this rank has of a parked session stays where it is" in caplog.text
        files = [len(os.listdir(rank.manager.cascade.disk.folder)) for rank in ranks]  # noqa: PTH208
        assert files == [2, 1]
        for key in "abcd":
            first, second = together(ranks, pool, "use", key)
            assert first[0] == second[0] == "goes on"
        first, second = together(ranks, pool, "use", "e")
        assert first == second
        first, second = together(ranks, pool, "use", "f")
        assert first == second
        assert first[0].startswith("NoRoomError: no room for a new session: the disk tier has 0 bytes left")
    for rank in ranks:
        rank.end()


def test_a_rank_that_is_gone_leaves_the_session_parked_on_the_others():
    def exchange(_):
        raise RuntimeError("connection closed by peer")

    manager = SessionStateManager(max_sessions=1, tier=HostTier(budget=1 << 20), exchange=exchange)
    for key in "ab":
        with manager.lease(key) as session:
            session.attrs["x"] = torch.ones(8)
    with (
        pytest.raises(SessionRestoreFailedError, match="stays parked: connection closed by peer"),
        manager.lease("a"),
    ):
        raise AssertionError("it was not brought back")
    assert manager.peek("a").parked
    manager.check()

"""Two ranks with other bytes and other faults take the same requests: what is decided is the same on both.

The ranks are two managers in two threads with a barrier between them; a real group is in
``tests/dreamzero/test_parking_ranks.py``.
"""

import contextlib
import logging
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from profiles import sized

from vllm_omni_session_state import SessionStateManager
from vllm_omni_session_state.base.errors import (
    CannotParkError,
    NoRoomError,
    SessionRestoreFailedError,
    SessionStateLostError,
)
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.manager.consensus import SIZE, RankStatus, status_of
from vllm_omni_session_state.manager.losses import Reason
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.state.session import Declaration

DECLARED = 1200  # above what a slab of any session here takes
KEYS = st.sampled_from(["a", "b", "c", "d"])
COUNTS = ("sessions", "parked_sessions", "disk_sessions", "parks", "restores")
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
LIMIT_S = 300  # nobody waits that long but for a rank that never comes


class Rank:
    """One rank: a manager whose sessions are of its own size and whose tier fails at its own times."""

    def __init__(self, number, meeting, **bounds):
        self.number, self.meeting = number, meeting
        self.fails_at, self.calls, self.messages = set(), 0, 0
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

    def exchange(self, message):
        assert len(message) == SIZE
        self.messages += 1
        self.meeting.told[self.number] = message
        self.meeting.barrier.wait(LIMIT_S)
        told = list(self.meeting.told)
        self.meeting.barrier.wait(LIMIT_S)
        return told

    def use(self, key):
        """One forward as vLLM-Omni's runner has it; what a client of it sees, and what is where after it."""
        self.messages = 0
        try:
            self.manager.prepare(key)
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
        assert self.messages == bool(self.manager.offloader), "one for each step, with a tier"
        return outcome

    def place(self, key):
        """Where it is, as it is told."""
        table = self.manager._table
        with table.lock:
            return table.place(key)

    def do(self, action, key):
        forget_said()
        if action == "drop":
            outcome = self.manager.drop_session(key)
        elif action == "mark":
            outcome = self.manager.mark_stale(key)
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
        offloader = self.manager.offloader
        assert offloader.host is None or offloader.host.nbytes == 0
        if offloader.disk is not None:
            offloader.disk.close()
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
    fixed=st.booleans(),
    faults=st.tuples(st.sets(st.integers(1, 20)), st.sets(st.integers(1, 20))),
    steps=st.lists(st.tuples(st.sampled_from(["use"] * 7 + ["drop", "park", "mark"]), KEYS), max_size=30),
)
@sized(2000)
def test_two_ranks_decide_alike_whatever_each_holds_and_whatever_fails_on_it(
    cap, budget, host, disk, strict, fixed, faults, steps
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
        if fixed:
            rank.manager.capacity.fix_device_budget()
    with ThreadPoolExecutor(2) as pool:
        for action, key in steps:
            first, second = together(ranks, pool, action, key)
            assert first == second
            on_disk = first[1]["disk_sessions"]
            assert on_disk <= (disk or 0)
            assert first[1]["parked_sessions"] - on_disk <= (host or 0)
    for rank in ranks:
        rank.end()


def apart(rank, action, key):
    """Something that happens on one rank alone, as no request does."""
    if action == "park":
        with contextlib.suppress(CannotParkError):
            rank.manager.park(key)
    elif action == "lose" and rank.manager.drop_session(key):
        rank.manager.mark_lost(key, Reason.FORWARD_EXCEPTION)
    elif action == "drop":
        rank.manager.drop_session(key)
    rank.manager.check()


@given(
    cap=st.integers(1, 3),
    host=st.none() | st.integers(0, 3),
    disk=st.none() | st.integers(0, 3),
    strict=st.booleans(),
    steps=st.lists(
        st.tuples(st.sampled_from(["use"] * 6 + ["park", "drop", "lose"]), KEYS, st.sampled_from([0, 1])),
        max_size=30,
    ),
)
@sized(2000)
def test_ranks_that_came_apart_get_one_error_at_once_and_lose_nothing_by_it(cap, host, disk, strict, steps):
    """Whatever one of them did alone, each step meets all of them; a close on all brings them together."""
    assume(host is not None or disk is not None)
    meeting, on_lost = Meeting(), "error" if strict else "warn"
    bounds = {"max_sessions": cap, "device_budget": None, "host": host, "disk": disk, "on_lost": on_lost}
    ranks = [Rank(number, meeting, **bounds) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for action, key, alone in steps:
            if action != "use":
                apart(ranks[alone], action, key)
                continue
            before = [set(rank.manager.keys()) for rank in ranks]
            places = [rank.place(key) for rank in ranks]
            first, second = (each[0] for each in together(ranks, pool, "use", key))
            assert first == second
            if places[0] != places[1]:
                assert f"rank 0: {places[0]}, rank 1: {places[1]}" in first
            if "Error: " in first:
                assert [set(rank.manager.keys()) for rank in ranks] == before
                assert [rank.place(key) for rank in ranks] == places
        for key in "abcd":
            together(ranks, pool, "drop", key)
        assert together(ranks, pool, "use", "a")[1][0] == "new"
    for rank in ranks:
        rank.end()


def test_a_session_that_one_rank_lost_is_refused_on_both_until_it_is_closed():
    meeting = Meeting()
    bounds = {"max_sessions": 2, "device_budget": None, "host": 4, "on_lost": "warn"}
    ranks = [Rank(number, meeting, **bounds) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        together(ranks, pool, "use", "a")
        apart(ranks[1], "lose", "a")
        first, second = together(ranks, pool, "use", "a")
        assert first[0] == second[0]
        assert first[0].startswith("SessionRestoreFailedError: session")
        assert "(rank 0: device, rank 1: lost (forward_exception), of 0 sessions 0 are parked" in first[0]
        assert (first[4], second[4]) == (("a",), ()), "the other has it"
        first, second = together(ranks, pool, "use", "b")
        assert first[0] == second[0]
        assert "rank 0: not there, of 1 sessions" in first[0], "they would not make room alike"
        together(ranks, pool, "drop", "a")
        assert together(ranks, pool, "use", "a")[0][0] == "new"
        assert together(ranks, pool, "use", "b")[1][0] == "new"


def test_ranks_that_are_asked_for_different_sessions_are_told_so():
    ranks = [
        Rank(number, meeting, max_sessions=2, device_budget=None, host=4, on_lost="warn")
        for meeting in [Meeting()]
        for number in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(rank.use, key) for rank, key in zip(ranks, "ab", strict=True)]
        for each in done:
            assert "the ranks do not speak of the same" in each.result(LIMIT_S)


def test_a_rank_alone_and_ranks_without_a_tier_tell_nothing():
    def exchange(_message):
        raise AssertionError("nobody listens")

    for more in ({"exchange": exchange}, {"tier": HostTier(budget=1 << 20)}):
        manager = SessionStateManager(max_sessions=1, **more)
        for key in "aba":
            manager.prepare(key)
            with manager.lease(key) as session:
                session.attrs["x"] = torch.ones(8)
        assert manager.restore("a")
        assert not manager.restore("nobody")


def test_a_restore_by_name_meets_all_ranks_also_where_one_does_not_know_the_name():
    meeting = Meeting()
    bounds = {"max_sessions": 2, "device_budget": None, "host": 4, "on_lost": "warn"}
    ranks = [Rank(number, meeting, **bounds) for number in range(2)]

    def restore(rank):
        try:
            return rank.manager.restore("a")
        except SessionRestoreFailedError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(restore, ranks)) == [False, False]
        together(ranks, pool, "use", "a")
        together(ranks, pool, "park", "a")
        assert list(pool.map(restore, ranks)) == [True, True]
        assert list(pool.map(restore, ranks)) == [True, True], "it is there"
        apart(ranks[1], "drop", "a")
        first, second = pool.map(restore, ranks)
        assert first == second
        assert "rank 0: device, rank 1: not there" in first


@given(about=st.text("abcdef0123", min_size=1, max_size=32), said=st.text(), failed=st.text(max_size=900))
@sized(400)
def test_a_message_has_one_size_and_says_what_fits(about, said, failed):
    message = RankStatus(about, said[:40], failed).packed()
    assert len(message) == SIZE
    word = status_of(message)
    assert (word.about, word.said) == (
        about,
        " ".join(said[:40].split()).encode(errors="backslashreplace").decode(),
    )
    whole = failed.encode(errors="backslashreplace").decode().rstrip("\0")
    assert whole.startswith(word.failed)
    assert word.failed == whole or len(whole.encode()) > SIZE - 200


@pytest.mark.parametrize("on_lost", ["warn", "error"])
def test_who_is_lost_is_the_same_on_both_though_each_holds_other_bytes(on_lost):
    meeting = Meeting()
    ranks = [
        Rank(number, meeting, max_sessions=9, device_budget=DECLARED, host=3, on_lost=on_lost)
        for number in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        for key in "edcba":
            together(ranks, pool, "use", key)
        for key in ("d", "b"):
            together(ranks, pool, "mark", key)
        gone = []
        for key in "fgh":
            first, second = together(ranks, pool, "use", key)
            assert first == second
            gone.append((first[0].partition(":")[0], sorted({*"abcde"} - set(first[4]))))
    assert gone == (
        [("new", ["e"]), ("new", ["d", "e"]), ("new", ["c", "d", "e"])]
        if on_lost == "warn"
        else [("new", ["d"]), ("new", ["b", "d"]), ("NoRoomError", ["b", "d"])]
    )


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
        assert "stays where it is: rank 1: MemoryError: as asked" in first[0]
        assert first[3] == ["a"], "it is where it was"
        first, second = together(ranks, pool, "use", "a")
        assert first[0] == second[0] == "goes on"


@pytest.mark.parametrize("parked", [True, False])
def test_a_rank_that_fails_between_look_and_lease_uses_nothing_and_both_go_on_alike(parked):
    meeting = Meeting()
    ranks = [
        Rank(number, meeting, max_sessions=2, device_budget=None, host=4, on_lost="warn")
        for number in range(2)
    ]

    def fail(rank):
        pin = rank.manager.prepare("a")
        assert rank.manager.used("a")
        assert pin.session is rank.manager.peek("a")
        if rank.number or parked:  # after a restore a rank that goes on alone keeps its budgets alone
            rank.manager.give_back("a")
            rank.manager.give_back("a")
        else:
            with rank.manager.lease("a") as session:
                assert session is pin.session
        rank.manager.check()
        return rank.manager.used("a"), rank.manager.keys(), rank.manager.stats()["hits"]

    with ThreadPoolExecutor(2) as pool:
        for key in "abc" if parked else "ab":
            together(ranks, pool, "use", key)
        assert [rank.manager.peek("a").parked for rank in ranks] == [parked, parked]
        first, second = [done.result(LIMIT_S) for done in [pool.submit(fail, rank) for rank in ranks]]
        assert first == second
        assert not first[0]
        for key in "bac":
            first, second = together(ranks, pool, "use", key)
            assert first == second
    for rank in ranks:
        rank.end()


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
        files = [len(os.listdir(rank.manager.offloader.disk.folder)) for rank in ranks]  # noqa: PTH208
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
    def exchange(_message):
        raise RuntimeError("connection closed by peer")

    manager = SessionStateManager(max_sessions=1, tier=HostTier(budget=1 << 20), exchange=exchange)
    for key in "ab":
        with manager.lease(key) as session:
            session.attrs["x"] = torch.ones(8)
    with (
        pytest.raises(SessionRestoreFailedError, match="stays where it is: connection closed by peer"),
        manager.lease("a"),
    ):
        raise AssertionError("it was not brought back")
    assert manager.peek("a").parked
    manager.check()

"""Files that are read before they are asked for: the same bytes, few at once, no failure hidden."""

import threading

import pytest
from files import SESSION, document, final_files, same, storages

from vllm_omni_session_state.base.errors import BadFileError
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.read_ahead import MOST


@pytest.fixture
def tier(tmp_path):
    opened = DiskTier(tmp_path / "parked", budget=1 << 20)
    yield opened
    opened.close()


class Reads:
    """Watches the reads of a tier; each waits until it is let through."""

    def __init__(self, tier, *, wait=False):
        self.threads = []
        self.begun = threading.Event()
        self.go_on = threading.Event()
        if not wait:
            self.go_on.set()
        self._read, tier.ahead._read = tier.ahead._read, self.read

    def read(self, ticket):
        self.threads.append(threading.current_thread())
        self.begun.set()
        assert self.go_on.wait(300)
        return self._read(ticket)


def put(tier, *numbers):
    return [tier.put(document(n), storages(100 * n, 7, seed=n), session=SESSION) for n in numbers]


def all_read(tier):
    """Wait until what was begun has been read: who comes before its turn reads it itself."""
    for future in list(tier.ahead._coming.values()):
        future.result()


def is_back(tier, ticket, number):
    return same(tier.get(ticket), storages(100 * number, 7, seed=number), number)


def test_what_was_read_ahead_is_what_was_put_and_is_handed_out_once(tier):
    reads = Reads(tier)
    (ticket,) = put(tier, 1)
    assert tier.begin(ticket)
    assert tier.begin(ticket), "it has begun already"
    all_read(tier)
    assert is_back(tier, ticket, 1)
    assert len(reads.threads) == tier.ahead.taken == 1
    assert reads.threads[0] is not threading.current_thread()
    assert tier.ahead.nbytes == 0
    assert is_back(tier, ticket, 1)
    assert tier.ahead.taken == 1, "the second time it was read when it was asked for"


def test_who_comes_while_it_is_read_waits_for_that_read(tier):
    reads = Reads(tier, wait=True)
    (ticket,) = put(tier, 1)
    tier.begin(ticket)
    assert reads.begun.wait(300)
    threading.Timer(0.05, reads.go_on.set).start()
    assert is_back(tier, ticket, 1)
    assert len(reads.threads) == tier.ahead.taken == 1


def test_who_comes_before_its_turn_reads_it_itself(tier):
    reads = Reads(tier, wait=True)
    first, second = put(tier, 1, 2)
    tier.begin(first)
    assert reads.begun.wait(300)
    tier.begin(second)
    assert is_back(tier, second, 2), "it does not wait behind the first one"
    assert tier.ahead.taken == 0
    reads.go_on.set()
    assert is_back(tier, first, 1)
    assert len(reads.threads) == 1


def test_few_are_held_and_the_oldest_is_forgotten(tier):
    Reads(tier)
    tickets = put(tier, *range(1, MOST + 3))
    for ticket in tickets:
        assert tier.begin(ticket)
        assert tier.ahead.nbytes <= sum(sorted(each.nbytes for each in tickets)[-MOST:])
    assert tier.ahead.nbytes == sum(ticket.nbytes for ticket in tickets[-MOST:])
    all_read(tier)
    for number, ticket in enumerate(tickets, start=1):
        assert is_back(tier, ticket, number)
    assert tier.ahead.taken == MOST
    assert tier.ahead.nbytes == 0


@pytest.mark.parametrize("wait", [True, False])
def test_a_session_that_ends_takes_what_was_read_along(tier, wait):
    reads = Reads(tier, wait=wait)
    (ticket,) = put(tier, 1)
    tier.begin(ticket)
    assert reads.begun.wait(300)
    tier.drop(ticket)
    assert tier.ahead.nbytes == tier.nbytes == 0
    assert not tier.begin(ticket)
    with pytest.raises(KeyError):
        tier.get(ticket)
    reads.go_on.set()
    tier.check()


def test_damage_is_met_by_who_asks_and_by_nobody_else(tier):
    (ticket,) = put(tier, 1)
    (path,) = final_files(tier.folder)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert tier.begin(ticket)
    with pytest.raises(BadFileError):
        tier.get(ticket)
    assert tier.ahead.taken == 0
    content[-1] ^= 1
    path.write_bytes(content)
    assert is_back(tier, ticket, 1), "nothing of the failed read stays"


def test_closing_waits_for_the_read_under_way(tier):
    reads = Reads(tier, wait=True)
    first, second = put(tier, 1, 2)
    tier.begin(first)
    tier.begin(second)
    assert reads.begun.wait(300)
    threading.Timer(0.05, reads.go_on.set).start()
    tier.close()
    assert len(reads.threads) == 1
    assert not reads.threads[0].is_alive()
    assert not tier.begin(first)
    assert tier.ahead.nbytes == 0


def test_a_read_that_does_not_end_keeps_no_process_from_ending(tier, monkeypatch, caplog):
    monkeypatch.setattr("vllm_omni_session_state.offload.read_ahead.CLOSE_WAIT_S", 0.01)
    reads = Reads(tier, wait=True)
    (ticket,) = put(tier, 1)
    tier.begin(ticket)
    assert reads.begun.wait(300)
    late = threading.Timer(10, reads.go_on.set)
    late.start()
    tier.close()
    assert not reads.go_on.is_set(), "it was not waited for"
    assert reads.threads[0].daemon, "nor is it when the process ends"
    assert "a read of a parked session does not end" in caplog.text
    late.cancel()
    reads.go_on.set()


def test_no_thread_waits_for_a_next_read(tier):
    reads = Reads(tier)
    for ticket in put(tier, 1, 2, 3):
        tier.begin(ticket)
        all_read(tier)
        reads.threads[-1].join(300)
        assert not reads.threads[-1].is_alive()
        assert ticket in tier.ahead._coming

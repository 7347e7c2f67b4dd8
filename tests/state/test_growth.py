"""What append buffers hold is charged once and exactly; ``test_growth_machine`` does it in any order."""

import logging
import sys
from unittest import mock

import pytest
import torch
from profiles import count

from vllm_omni_session_state import LatentBuffer, SessionStateManager
from vllm_omni_session_state.accounting import append_list
from vllm_omni_session_state.accounting.append_list import AppendTrackedList
from vllm_omni_session_state.accounting.footprint import footprint
from vllm_omni_session_state.accounting.ledger import Ledger
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.state.session import Declaration


def allocated():
    buffer = LatentBuffer()
    buffer.allocate()
    return buffer


@pytest.fixture(autouse=True)
def one_chunk_is_many(monkeypatch):
    monkeypatch.setattr(append_list, "SHORT", 0)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="vllm_omni.session_state")


class Work:
    """Counts what a settlement does: tensors looked at, allocations that the ledgers handle, calls."""

    def __init__(self):
        self.tensors = self.allocations = self.calls = 0

    def of(self, call, *arguments):
        storage, take, put = torch.Tensor.untyped_storage, Ledger._take, Ledger._put

        def looked_at(tensor):
            self.tensors += 1
            return storage(tensor)

        def counted(change):
            def changed(ledger, allocations):
                self.allocations += len(allocations)
                change(ledger, allocations)

            return changed

        def called(*_):
            self.calls += 1

        with (
            mock.patch.object(torch.Tensor, "untyped_storage", looked_at),
            mock.patch.object(Ledger, "_take", counted(take)),
            mock.patch.object(Ledger, "_put", counted(put)),
        ):
            sys.setprofile(called)
            try:
                call(*arguments)
            finally:
                sys.setprofile(None)
        return self.tensors, self.allocations, self.calls


@pytest.mark.parametrize("declared", [True, False])
def test_what_a_settlement_does_is_constant_over_ten_thousand_chunks(declared):
    """A twentieth in the short run. Now and then the list is assigned anew, as at a reset of the window."""
    declaration = Declaration(device_nbytes=1 << 40, host_fields=frozenset({"film"}))
    manager = SessionStateManager(declaration=declaration if declared else None)
    chunks, work = count(10_000), {}

    def settle(session):
        manager.settle(session)
        manager.stats()  # only then the ledgers follow

    with manager.lease("a") as session:
        session.attrs["map"] = [torch.zeros(10) for _ in range(24)]
        buffer = session.put("film", allocated())
        for number in range(chunks):
            if number % 4 == 0:
                buffer.replace(list(buffer.container))
            buffer.container.append(torch.zeros(4))
            session.attrs["map"] = [torch.zeros(10) for _ in range(24)]
            if number in (20, chunks - 1):
                work[number] = Work().of(settle, session)
            else:
                settle(session)
    (tensors, counted, calls), (last_tensors, last_counted, last_calls) = work.values()
    assert last_tensors == tensors == 25
    assert max(last_counted, counted) < 4 * 25
    assert last_calls < 1.5 * calls
    assert manager.stats()["total_nbytes"] == 24 * 40 + chunks * 16
    manager.check()


def sort_that_fails(chunks):
    keys = {id(chunk): key for chunk, key in zip(chunks, (1, 1, 3, 2, "x"), strict=True)}
    with pytest.raises(TypeError):
        chunks.sort(key=lambda chunk: keys[id(chunk)])


CHANGES = {
    "__setitem__": lambda chunks: chunks.__setitem__(1, fresh(1000)),
    "a slice": lambda chunks: chunks.__setitem__(slice(1, 2), [fresh(1000), fresh(2000)]),
    "__delitem__": lambda chunks: chunks.__delitem__(0),
    "__imul__": lambda chunks: chunks.__imul__(0).append(fresh(1000)),
    "__init__": lambda chunks: chunks.__init__([fresh(1000)]),
    "clear": lambda chunks: chunks.clear() or chunks.append(fresh(1000)),
    "insert": lambda chunks: chunks.insert(0, fresh(1000)),
    "pop": lambda chunks: chunks.pop(0),
    "remove": lambda chunks: chunks.remove(chunks[0]),
    "reverse": lambda chunks: chunks.reverse(),
    "sort": lambda chunks: chunks.sort(key=lambda chunk: isinstance(chunk, torch.Tensor)),
    "a sort that fails": sort_that_fails,
}


def fresh(size):
    return torch.zeros(size, dtype=torch.uint8)


@pytest.mark.parametrize("change", CHANGES)
def test_after_any_change_the_list_is_charged_as_it_is_now(change):
    """The list in the middle cannot join, so that it matters where each item is."""
    manager = SessionStateManager()
    with manager.lease("a") as session:
        session.put("film", allocated()).extend([fresh(1), fresh(10), fresh(30), [fresh(100)], fresh(300)])
    assert manager.stats()["total_nbytes"] == 441
    with manager.lease("a") as session:
        CHANGES[change](session.get("film").container)
        left = footprint(*session.get("film").view()).nbytes
    assert manager.stats()["total_nbytes"] == left
    manager.check()
    manager.drop_session("a")
    assert manager.stats()["total_nbytes"] == 0


def test_a_chunk_that_is_no_tensor_is_walked_each_time():
    manager = SessionStateManager()
    chunk = [fresh(10)]
    with manager.lease("a") as session:
        session.put("film", allocated()).extend([fresh(1), chunk])
    chunk.append(fresh(100))
    with manager.lease("a"):
        pass
    assert manager.stats()["total_nbytes"] == 111


def test_a_chunk_that_is_replaced_is_charged_as_what_it_is_now():
    manager = SessionStateManager()
    with manager.lease("a") as session:
        session.put("film", allocated()).extend(torch.zeros(n, dtype=torch.uint8) for n in (1, 10, 100))
    assert manager.stats()["total_nbytes"] == 111
    with manager.lease("a") as session:
        session.get("film").container[1] = torch.zeros(1000, dtype=torch.uint8)
    assert manager.stats()["total_nbytes"] == 1101
    manager.drop_session("a")
    assert manager.stats()["total_nbytes"] == 0


def test_a_chunk_in_two_places_counts_once_and_stays_with_the_last():
    manager = SessionStateManager()
    chunk = torch.zeros(100, dtype=torch.uint8)
    with manager.lease("a") as session:
        session.attrs["x"] = chunk[50:]
        session.put("film", allocated()).extend([chunk, chunk, chunk[:1]])
    assert (manager.stats()["total_nbytes"], manager.stats()["shared_nbytes"]) == (100, 0)
    with manager.lease("a") as session:
        session.get("film").container.clear()
    assert manager.stats()["total_nbytes"] == 100
    manager.check()


def test_a_chunk_that_is_held_beside_its_list_counts_once_when_it_comes_to_it():
    manager = SessionStateManager()
    with manager.lease("a") as session:
        session.attrs["x"] = chunk = fresh(100)
        session.put("film", allocated()).append(fresh(10))
    with manager.lease("a") as session:
        session.get("film").append(chunk)
    assert (manager.stats()["total_nbytes"], manager.stats()["shared_nbytes"]) == (110, 0)
    manager.check()


def test_a_short_list_is_walked_and_a_long_one_is_not(monkeypatch):
    monkeypatch.setattr(append_list, "SHORT", 3)
    manager = SessionStateManager()
    for chunks, walked in ((3, 3), (4, 4), (5, 1)):
        with manager.lease("a") as session:
            buffer = session.get_or_create("film", allocated, LatentBuffer)
            buffer.extend(fresh(10) for _ in range(chunks - len(buffer)))
            tensors, _, _ = Work().of(manager.settle, session)
        assert tensors == walked
        assert manager.stats()["total_nbytes"] == chunks * 10


def test_a_storage_that_is_exchanged_in_place_is_seen_when_the_list_is_walked_again():
    """The limit: of a kept chunk it is taken that nobody calls ``set_()`` on it."""
    manager = SessionStateManager()
    chunk = torch.zeros(10, dtype=torch.uint8)
    with manager.lease("a") as session:
        session.put("film", allocated()).append(chunk)
    chunk.set_(torch.zeros(70, dtype=torch.uint8))
    with manager.lease("a"):
        pass
    assert manager.stats()["total_nbytes"] == 10
    assert manager.listing()[0].nbytes == {"cpu": 70}
    with manager.lease("a") as session:
        session.get("film").container.reverse()
    assert manager.stats()["total_nbytes"] == 70


def test_the_list_of_a_parked_and_restored_buffer_notes_changes_as_before():
    manager = SessionStateManager(tier=HostTier(budget=1 << 20))
    with manager.lease("a") as session:
        session.put("film", allocated()).append(torch.zeros(10))
    assert manager.park("a")
    with manager.lease("a") as session:
        chunks = session.get("film").container
        assert type(chunks) is AppendTrackedList
        chunks[0] = torch.zeros(3)
    assert manager.stats()["total_nbytes"] == 12

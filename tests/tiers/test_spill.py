"""Segments of a buffer on the disk: what comes back, when they are written, and what ends them."""

import errno
import gc
import logging
import threading

import pytest
import torch
from files import final_files, names
from spilled import chunk, chunks, filled, same
from test_disk_faults import CALLS, Saboteur

from vllm_omni_session_state import LatentBuffer
from vllm_omni_session_state.accounting.append_list import AppendTrackedList
from vllm_omni_session_state.base.errors import TierFaultError
from vllm_omni_session_state.base.ids import fingerprint
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.offload import spill
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.file_system import System
from vllm_omni_session_state.offload.spill import SEGMENT, Spiller


@pytest.fixture
def tier(tmp_path):
    forget_said()
    tier = DiskTier(tmp_path, budget=1 << 24)
    yield tier
    tier.check()
    tier.close()


@pytest.fixture
def spiller(tier):
    return Spiller(tier)


def test_what_was_spilled_comes_back_in_order_and_to_the_bit(spiller):
    wanted = chunks(3 * SEGMENT + 10)
    wanted[5] = chunk(5, inference=False)
    wanted[6] = torch.arange(40, dtype=torch.int64)[3:30:2]
    buffer = filled(spiller, wanted)
    assert [segment.count for segment in buffer.segments] == [SEGMENT] * 3
    assert same(buffer.whole(), wanted)
    assert same(buffer.whole(), wanted), "reading takes nothing away"
    assert list(map(id, buffer.container)) == list(map(id, wanted[3 * SEGMENT :]))
    assert type(buffer.container) is AppendTrackedList


def test_the_list_and_its_bytes_stay_within_a_segment_and_one_item(spiller, tier):
    buffer, longest, before = LatentBuffer(), 0, 0
    buffer.allocate()
    writes = 0
    for item in chunks(10 * SEGMENT):
        buffer.append(item)
        spiller.spill("robot", buffer)
        longest = max(longest, len(buffer))
        writes += tier.nbytes != before
        before = tier.nbytes
        assert spiller.nbytes == tier.nbytes
    assert longest == SEGMENT
    assert writes == len(final_files(tier.folder)) == len(buffer.segments) == 9, "one file for many chunks"


def test_the_newest_item_is_never_spilled(spiller):
    newest = chunks(SEGMENT + 1)
    buffer = filled(spiller, newest)
    assert len(buffer.segments) == 1
    assert list(map(id, buffer.container)) == [id(newest[-1])]


def test_what_was_spilled_is_out_of_memory_also_after_it_was_read(spiller):
    from vllm_omni_session_state.accounting.release import Watch

    items = chunks(2 * SEGMENT + 1)
    watch = Watch(*items[:-1])
    buffer = filled(spiller, items)
    del items
    again = buffer.whole()
    watch_again = Watch(*again[:-1])
    del again
    gc.collect()
    assert watch.alive() == watch_again.alive() == ()


def test_a_file_says_whose_it_is_by_the_hash_of_the_session(spiller, tier):
    filled(spiller, chunks(SEGMENT + 1), key="robot")  # not held: the file waits for the next sweep
    (file,) = final_files(tier.folder)
    assert fingerprint("robot").hex().encode() in file.read_bytes()
    spiller.sweep()
    assert tier.nbytes == spiller.nbytes == 0


END = {
    "reset": lambda buffer: buffer.reset(),
    "an empty list is assigned": lambda buffer: buffer.replace([]),
    "another list is assigned": lambda buffer: buffer.replace(chunks(3)),
    "only newer items are assigned": lambda buffer: buffer.replace(buffer.container[1:]),
    "a ring is assigned": lambda buffer: buffer.replace(chunks(2), maxlen=4),
    "allocate": lambda buffer: buffer.allocate(),
}


@pytest.mark.parametrize("end", END)
def test_each_end_of_the_content_drops_each_file_once(spiller, tier, monkeypatch, end):
    buffer = filled(spiller, chunks(2 * SEGMENT + 9))
    dropped = []
    drop = DiskTier.drop
    monkeypatch.setattr(DiskTier, "drop", lambda self, ticket: (dropped.append(ticket), drop(self, ticket)))
    END[end](buffer)
    assert len(dropped) == len(set(dropped)) == 2
    buffer.reset()
    del buffer
    gc.collect()
    spiller.sweep()
    assert len(dropped) == 2
    assert tier.nbytes == spiller.nbytes == 0
    assert names(tier.folder) == []


def test_a_buffer_that_nobody_holds_any_more_has_its_files_removed(spiller, tier):
    buffer = filled(spiller, chunks(2 * SEGMENT + 1))
    other = filled(spiller, chunks(SEGMENT))
    assert tier.nbytes > 0
    del buffer
    spiller.spill("other", other)  # as at the end of anybody's step
    assert tier.nbytes == spiller.nbytes == 0


def test_a_list_that_begins_with_the_same_item_keeps_what_came_before(spiller):
    """As vLLM-Omni does when its window is full: it assigns a copy of what it read."""
    wanted = chunks(SEGMENT + 5)
    buffer = filled(spiller, wanted)
    buffer.replace(list(buffer.container))
    assert same(buffer.whole(), wanted)
    buffer.replace(buffer.container[:2])
    assert same(buffer.whole(), wanted[: SEGMENT + 2])
    buffer.append(wanted[-1])
    assert same(buffer.whole(), [*wanted[: SEGMENT + 2], wanted[-1]])


@pytest.mark.parametrize("change", [list.clear, lambda items: items.pop(0), lambda items: items.reverse()])
def test_a_list_that_is_changed_at_its_front_has_lost_what_came_before(spiller, tier, change):
    buffer = filled(spiller, chunks(SEGMENT + 5))
    change(buffer.container)
    left = list(buffer.container)
    assert same(buffer.whole(), left)
    for item in chunks(SEGMENT + 1, start=1000):
        buffer.append(item)
        left.append(item)
        spiller.spill("robot", buffer)
    assert same(buffer.whole(), left)
    assert len(final_files(tier.folder)) == 1


def test_segments_stay_while_the_content_is_elsewhere_and_are_not_read(spiller, tier, monkeypatch):
    """As in parking: the payload is copied, released and taken back as other tensors."""
    wanted = chunks(2 * SEGMENT + 7)
    buffer = filled(spiller, wanted)
    nbytes = tier.nbytes
    with monkeypatch.context() as patched:
        patched.setattr(DiskTier, "get", None)
        payload = buffer.export_payload()
        copies = {"maxlen": None, "items": [item.clone() for item in payload["items"]]}
        buffer._release()
        assert buffer.segments == []
        assert tier.nbytes == nbytes
        buffer.import_payload(copies)
    with torch.inference_mode():
        assert all(map(torch.equal, buffer.whole(), wanted))
    assert len(buffer.whole()) == len(wanted)
    buffer._release()
    buffer.reset()
    assert tier.nbytes == 0


def test_a_stale_segment_does_not_come_back_with_the_payload(spiller, tier):
    buffer = filled(spiller, chunks(SEGMENT + 7))
    buffer.container.clear()
    buffer.container.append(chunk(1))
    payload = buffer.export_payload()
    buffer._release()
    buffer.import_payload(payload)
    assert same(buffer.whole(), [chunk(1)])
    assert tier.nbytes == 0


def test_a_full_disk_leaves_the_chunks_in_memory_and_is_tried_again_after_a_segment(tmp_path, caplog):
    forget_said()
    tier = DiskTier(tmp_path, budget=100)
    spiller, puts = Spiller(tier), []
    put = tier.put
    tier.put = lambda *args, **kwargs: puts.append(1) or put(*args, **kwargs)
    wanted = chunks(6 * SEGMENT)
    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        buffer = filled(spiller, wanted[: 4 * SEGMENT])
    assert len(puts) == 3
    assert buffer.segments == []
    assert same(buffer.whole(), wanted[: 4 * SEGMENT])
    (record,) = caplog.records
    assert "video latents stay in host memory and are tried again after 64 more chunks" in record.getMessage()
    assert "raise disk.budget" in record.getMessage()
    assert tier.nbytes == spiller.nbytes == 0
    tier.budget = 1 << 24
    for item in wanted[4 * SEGMENT :]:
        buffer.append(item)
        spiller.spill("robot", buffer)
    assert len(buffer) == SEGMENT, "it has caught up, a segment at each step"
    assert same(buffer.whole(), wanted)
    tier.check()
    tier.close()


def test_after_a_failure_an_emptied_list_is_tried_as_if_nothing_had_been(tmp_path):
    tier = DiskTier(tmp_path, budget=100)
    spiller = Spiller(tier)
    buffer = filled(spiller, chunks(5 * SEGMENT))
    buffer.replace([])
    tier.budget = 1 << 24
    for item in chunks(SEGMENT + 1):
        buffer.append(item)
        spiller.spill("robot", buffer)
    assert len(buffer.segments) == 1
    tier.close()


@pytest.mark.parametrize("item", [object(), torch.ones(2, requires_grad=True) * 2, None])
def test_an_item_that_cannot_be_written_raises_nothing_and_loses_nothing(spiller, item):
    items = [item, *chunks(SEGMENT)]
    buffer = filled(spiller, items)
    assert [type(each) for each in buffer.whole()] == [type(each) for each in items]


@pytest.mark.parametrize("how", ["ENOSPC", "EIO", "late EIO", "short", "stuck"])
def test_any_one_call_of_a_spill_may_fail(tmp_path, how):
    """Every system call of a life of two segments fails once: nothing is lost and nothing is left."""
    wanted = chunks(2 * 3 + 1)
    at, hit = 0, set()
    while True:
        tier = DiskTier(tmp_path / str(at), budget=1 << 24)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(spill, "SEGMENT", 3)
            spiller = Spiller(tier)
            saboteur = Saboteur(monkeypatch, at, how)
            buffer = filled(spiller, wanted)
            for _ in range(2):
                try:
                    whole = buffer.whole()
                    break
                except TierFaultError:
                    tier.check()
            assert same(whole, wanted)
            buffer.reset()
            for item in wanted[:4]:  # what resisted is removed before the next is written
                buffer.append(item) if buffer.resident else buffer.replace([item])
                spiller.spill("robot", buffer)
            buffer.reset()
            assert tier.nbytes == spiller.nbytes or saboteur.hit == "unlink"
        tier._remove_strays()
        assert tier.nbytes == spiller.nbytes == 0
        tier.check()
        tier.close()
        hit.add(saboteur.hit)
        if saboteur.calls <= at:
            break
        at += 1
    assert hit - {None} <= set(CALLS)
    assert {"short": {"write", "readv"}, "stuck": {"write", "readv"}}.get(how, {"write", "fsync"}) <= hit


def broken(*args, **kwargs):
    raise OSError(errno.EROFS, "as asked")


def test_files_that_cannot_be_removed_are_said_once(spiller, monkeypatch, caplog):
    buffer = filled(spiller, chunks(2 * SEGMENT + 1))
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        patched.setattr(System, "unlink", staticmethod(broken))
        buffer.reset()
    assert [record.getMessage()[:14] for record in caplog.records] == ["cannot remove "]


def test_a_file_that_cannot_be_removed_is_removed_with_a_later_one(spiller, tier, monkeypatch):
    buffer = filled(spiller, chunks(SEGMENT + 1))
    with monkeypatch.context() as patched:
        patched.setattr(System, "unlink", staticmethod(broken))
        buffer.replace([])
    assert tier.nbytes > spiller.nbytes == 0
    for item in chunks(SEGMENT + 1):
        buffer.append(item)
        spiller.spill("robot", buffer)
    assert len(final_files(tier.folder)) == len(buffer.segments) == 1
    assert tier.nbytes == spiller.nbytes


def test_many_threads_spill_and_read_and_end_at_once(spiller, tier):
    failed = []

    def live(number):
        try:
            wanted = chunks(2 * SEGMENT + 1, start=1000 * number)
            for _ in range(3):
                buffer = filled(spiller, wanted, key=f"robot-{number}")
                assert same(buffer.whole(), wanted)
                if number % 2:
                    buffer.reset()
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=live, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    spiller.sweep()
    assert tier.nbytes == spiller.nbytes == 0


def test_a_segment_is_small_enough_for_memory_and_large_enough_for_a_file():
    """220 KiB a chunk at the documented size."""
    assert 8 << 20 < spill.SEGMENT * 220 * 1024 < 32 << 20

"""The suite can fail: each mistake that spilling could make is caught by a test of this folder."""

from __future__ import annotations

from unittest import mock

import pytest
import test_spill as spill_tests
import torch
from hypothesis import HealthCheck, Phase, settings
from spilled import chunks, filled
from test_spill_machine import run

from vllm_omni_session_state import LatentBuffer
from vllm_omni_session_state.adapters import video_latents
from vllm_omni_session_state.base.errors import LatentsUnreadableError
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.offload import spill
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.spill import SEGMENT, Spiller
from vllm_omni_session_state.state.segments import Segments

FEW = settings(
    max_examples=60,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def on_a_disk(test, *given):
    """A test with a tier of its own, which must be sound and empty in the end."""

    def check(folder):
        forget_said()
        tier = DiskTier(folder, budget=1 << 24)
        spiller = Spiller(tier)
        fixtures = {"tier": tier, "spiller": spiller, "tmp_path": folder / "more"}
        names = test.__code__.co_varnames[: test.__code__.co_argcount]
        with pytest.MonkeyPatch.context() as monkeypatch:
            fixtures["monkeypatch"] = monkeypatch
            test(*(fixtures[name] for name in names if name in fixtures), *given)
        tier.check()

    return check


def any_life(folder):
    run(folder, FEW)


back_to_the_bit = on_a_disk(spill_tests.test_what_was_spilled_comes_back_in_order_and_to_the_bit)
newest = on_a_disk(spill_tests.test_the_newest_item_is_never_spilled)
bounded = on_a_disk(spill_tests.test_the_list_and_its_bytes_stay_within_a_segment_and_one_item)
out_of_memory = on_a_disk(spill_tests.test_what_was_spilled_is_out_of_memory_also_after_it_was_read)
whose = on_a_disk(spill_tests.test_a_file_says_whose_it_is_by_the_hash_of_the_session)
elsewhere = on_a_disk(spill_tests.test_segments_stay_while_the_content_is_elsewhere_and_are_not_read)
stale = on_a_disk(spill_tests.test_a_stale_segment_does_not_come_back_with_the_payload)
same_first = on_a_disk(spill_tests.test_a_list_that_begins_with_the_same_item_keeps_what_came_before)
nobody = on_a_disk(spill_tests.test_a_buffer_that_nobody_holds_any_more_has_its_files_removed)
ended = on_a_disk(spill_tests.test_each_end_of_the_content_drops_each_file_once, "an empty list is assigned")
front = on_a_disk(spill_tests.test_a_list_that_is_changed_at_its_front_has_lost_what_came_before, list.clear)
resisting = on_a_disk(spill_tests.test_a_file_that_cannot_be_removed_is_removed_with_a_later_one)


def full(folder):
    """A full disk is asked once a segment."""
    tier = mock.Mock(put=mock.Mock(side_effect=MemoryError))
    buffer = filled(Spiller(tier), chunks(4 * SEGMENT))
    assert tier.put.call_count == 3
    assert len(buffer) == 4 * SEGMENT


def patched(owner, name, value):
    return mock.patch.object(owner, name, value)


def segments_in_the_wrong_order():
    before = Segments.before
    return patched(Segments, "before", lambda self, items: before(self, items)[::-1])


def items_in_the_wrong_order():
    read = Spiller.read
    return patched(Spiller, "read", lambda self, ticket: read(self, ticket)[::-1])


def dropped_on_park():
    def release(self):
        self._segments.drop()
        self._items = None

    return patched(LatentBuffer, "_release", release)


def forgotten_on_the_way_back():
    return patched(Segments, "arrive", lambda self, items: None)


def a_stale_segment_comes_back():
    def release(self):
        self._segments.leave()
        self._items = None

    return patched(LatentBuffer, "_release", release)


def one_list_of_segments_for_all_buffers():
    shared = []

    def __init__(self):  # noqa: N807 - it replaces one
        self._segments, self._first = shared, None

    return patched(Segments, "__init__", __init__)


def the_first_segment_of_anybody():
    read = Spiller.read

    def of_anybody(self, _):
        return read(self, next(iter(self._tier._tickets.values())))

    return patched(Spiller, "read", of_anybody)


def a_file_in_the_name_of_another_session():
    return patched(spill, "fingerprint", lambda key: b"another session")


def inference_is_forgotten():
    read = Spiller.read

    def plain(self, ticket):
        with torch.inference_mode(False):
            return [item.clone() if item.is_inference() else item for item in read(self, ticket)]

    return patched(Spiller, "read", plain)


def strides_are_forgotten():
    read = Spiller.read
    return patched(Spiller, "read", lambda self, ticket: [item.contiguous() for item in read(self, ticket)])


def the_newest_is_spilled_too():
    def spill_all(self, key, buffer):
        if len(buffer) > SEGMENT:
            buffer.move_out(self._write(key, list(buffer.container)))

    return patched(Spiller, "spill", spill_all)


def what_is_spilled_stays_in_memory():
    def move_out(self, segment):
        self._segments.keep(self._items)
        self._segments.add(segment, self._items)

    return patched(LatentBuffer, "move_out", move_out)


def what_is_read_stays_in_memory():
    whole = LatentBuffer.whole

    def keeps(self):
        self.read_before = whole(self)
        return self.read_before

    return patched(LatentBuffer, "whole", keeps)


def an_empty_list_keeps_the_segments():
    keep = Segments.keep
    return patched(Segments, "keep", lambda self, items: keep(self, items) if len(items) else None)


def a_copy_loses_the_segments():
    return patched(Segments, "keep", lambda self, items: self.drop())


def segments_come_before_any_list():
    return patched(Segments, "before", lambda self, items: list(self._segments))


def a_file_outlives_its_segment():
    return patched(spill._OnDisk, "drop", lambda self: None)


def a_file_is_dropped_twice():
    def drop(self):
        self._spiller.remove(self._ticket)

    return patched(spill._OnDisk, "drop", drop)


def nobody_sweeps():
    return patched(Spiller, "sweep", lambda self: None)


def a_file_that_resists_is_forgotten():
    return patched(DiskTier, "_remove_strays", lambda self: self._strays.clear())


def a_full_disk_is_tried_at_each_step():
    def __init__(self, tier):  # noqa: N807 - it replaces one
        begin(self, tier)
        self._failed = mock.MagicMock(get=lambda buffer: None)

    begin = Spiller.__init__
    return patched(Spiller, "__init__", __init__)


def one_file_for_each_chunk():
    return patched(spill, "SEGMENT", 1)


def all_bytes_that_ever_were_there_are_counted():
    def remove(self, ticket):
        self._tier.drop(ticket)

    return patched(Spiller, "remove", remove)


def the_view_at_hand_is_the_session():
    def whole(session):
        buffer = session.get(video_latents.FIELD)
        buffer.replace(buffer.whole())
        return session

    return mock.patch("test_spill_machine.whole", whole)


CAUGHT_BY = {
    segments_in_the_wrong_order: back_to_the_bit,
    items_in_the_wrong_order: back_to_the_bit,
    dropped_on_park: elsewhere,
    forgotten_on_the_way_back: elsewhere,
    a_stale_segment_comes_back: stale,
    one_list_of_segments_for_all_buffers: any_life,
    the_first_segment_of_anybody: any_life,
    a_file_in_the_name_of_another_session: whose,
    inference_is_forgotten: back_to_the_bit,
    strides_are_forgotten: back_to_the_bit,
    the_newest_is_spilled_too: newest,
    what_is_spilled_stays_in_memory: bounded,
    what_is_read_stays_in_memory: out_of_memory,
    an_empty_list_keeps_the_segments: ended,
    a_copy_loses_the_segments: same_first,
    segments_come_before_any_list: front,
    a_file_outlives_its_segment: ended,
    a_file_is_dropped_twice: ended,
    nobody_sweeps: nobody,
    a_file_that_resists_is_forgotten: resisting,
    a_full_disk_is_tried_at_each_step: full,
    one_file_for_each_chunk: bounded,
    all_bytes_that_ever_were_there_are_counted: ended,
    the_view_at_hand_is_the_session: any_life,
}


@pytest.mark.parametrize("check", dict.fromkeys(CAUGHT_BY.values()), ids=lambda check: "")
def test_without_a_mistake_the_test_passes(check, tmp_path):
    check(tmp_path)


@pytest.mark.parametrize("mutant", CAUGHT_BY, ids=lambda mutant: mutant.__name__)
def test_the_mutant_is_caught(mutant, tmp_path):
    with mutant(), pytest.raises((AssertionError, KeyError, LatentsUnreadableError)):
        CAUGHT_BY[mutant](tmp_path)

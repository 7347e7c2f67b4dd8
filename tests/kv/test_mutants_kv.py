"""The suite can fail: each mistake is caught by a test of this folder."""

import pytest
import test_kv as exact
import test_kv_books as books
import test_kv_refusals as refusals
from engine import LIKE_DREAMZERO, LIKE_LINGBOT
from mutants_kv import MUTANTS
from travel_kv import by_reference

pytestmark = pytest.mark.host


def round_trip():
    for shape in (LIKE_LINGBOT, LIKE_DREAMZERO):
        exact.test_a_session_that_was_out_is_as_if_it_had_never_been(shape, by_reference, 11)


def fault_on_the_way_back():
    with pytest.MonkeyPatch.context() as patch:
        refusals.test_a_fault_at_any_layer_leaves_every_block_free_on_the_way_back(
            LIKE_DREAMZERO, "value_cache", True, patch
        )


def staged_history():
    with pytest.MonkeyPatch.context() as patch:
        exact.test_staged_history_is_never_taken_for_a_restored_sessions(patch)


def middle_of_a_chunk():
    refusals.test_in_the_middle_of_a_chunk_nothing_is_taken_out(LIKE_LINGBOT)


CAUGHT_BY = {
    "forgets the compaction": round_trip,
    "takes the blocks for the position": round_trip,
    "forgets what was committed": round_trip,
    "drops a layer's V": round_trip,
    "takes K for V": round_trip,
    "mixes the branches": round_trip,
    "uses the old adapters": staged_history,
    "shares cross-attention": exact.test_two_sessions_of_one_tree_share_no_cross_attention_cache,
    "forgets cross-attention": round_trip,
    "puts cross-attention under one name": round_trip,
    "keeps blocks after a fault": fault_on_the_way_back,
    "loses the new state's adapters": fault_on_the_way_back,
    "keeps the blocks that it took out": books.test_a_whole_session_leaves_and_comes_back_with_its_kv,
    "takes out half a chunk": middle_of_a_chunk,
    "does not look whether there is room": refusals.test_too_few_blocks_leave_the_pool_as_it_was,
    "does not look for a place": refusals.test_no_place_for_cross_attention_takes_no_block,
    "writes over a session": refusals.test_a_session_that_the_engine_holds_is_not_written_over,
    "makes a twin": refusals.test_a_session_that_the_engine_holds_is_not_written_over,
    "counts K alone": round_trip,
    "counts one block of all": round_trip,
    "counts no cross-attention": books.test_a_session_counts_its_blocks_and_no_others,
}


def test_every_mutant_has_its_test():
    assert set(CAUGHT_BY) == set(MUTANTS)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_caught(name):
    CAUGHT_BY[name]()
    with (
        MUTANTS[name].patched(),
        pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)),
    ):
        CAUGHT_BY[name]()

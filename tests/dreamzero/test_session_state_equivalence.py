"""The manager-backed path equals the bespoke one to the bit, on the real host."""

import pytest
from lockstep import scenario
from profiles import LONG

pytestmark = pytest.mark.host


def test_every_output_and_field_is_equal_through_all_that_can_happen(pair):
    """Interleaving, prompt change, window reset, reset, close by request and by call, failure, eviction."""
    assert scenario(pair) >= 60


def test_decoded_video_is_equal_after_1_2_and_30_chunks(pair):
    for chunk in range(30):
        pair.step("film", frames=1 if chunk == 0 else 4)
        if chunk + 1 in (1, 2, 30):
            pair.decode("film")
    assert len(pair.fields("film")["video_latents_across_time"]) == 30


def test_over_400_steps_the_ring_stays_at_its_size_while_the_bespoke_history_grows(pair):
    """A twentieth of the steps in the short run."""
    steps = 400 if LONG else 20
    kept, grown = set(), []
    for step in range(steps):
        pair.step("long", frames=1 if step == 0 else 4)
        if step % 4 == 0 and step:
            kept.add(pair.fields("long")["vae_encoder_out"].untyped_storage().nbytes())
            grown.append(pair.bespoke.pipeline._states["long"].vae_encoder_out.untyped_storage().nbytes())
    assert len(kept) == 1
    assert grown == sorted(set(grown)), "the bespoke history grows at every fourth step"
    frame = grown[1] - grown[0]
    assert kept == {pair.window * frame}


def test_a_look_at_a_session_that_is_not_there_makes_none(pair):
    before = list(pair.manager._table.order)
    with pytest.raises(RuntimeError, match="No accumulated video latents for session 'nobody'"):
        pair.managed.pipeline.decode_accumulated_video_latents("nobody")
    pair.managed.pipeline.clear_accumulated_video_latents("nobody")
    assert list(pair.manager._table.order) == before

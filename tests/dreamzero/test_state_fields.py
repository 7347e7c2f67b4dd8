"""Where DreamZero's fields live, what is shared and what goes when its session ends."""

import gc
import logging

import numpy as np
import pytest
import torch

from vllm_omni_session_state import LatentBuffer, SessionAttr, SessionStateManager
from vllm_omni_session_state.accounting.release import Watch
from vllm_omni_session_state.adapters.dreamzero import view_class, view_of
from vllm_omni_session_state.base.log import forget_said

pytestmark = pytest.mark.host

OBJECTS = {"video_latents_across_time", "stitched_buffer", "vae_encoder_out"}
ATTRS = {"vae_enc_feat_map", "clip_feas", "ys", "language", "prompt_embeds", "vae_pending_body_frames"}
COUNTERS = {"call_count", "current_start_frame", "vae_stream_initialized"}


def run_some_steps(pair, name="a", count=6):
    for step in range(count):
        pair.step(name, frames=1 if step == 0 else 4)


def test_a_live_sessions_names_and_buckets_are_the_seeds(pair):
    run_some_steps(pair)
    (entry,) = [entry for entry in pair.manager.listing() if entry.values[-1].name and len(entry.nbytes)]
    by_bucket = {
        bucket: {v.name for v in entry.values if v.bucket == bucket} for bucket in ("object", "attrs")
    }
    assert by_bucket == {"object": OBJECTS | {"engine_kv"}, "attrs": ATTRS | COUNTERS}
    own = [value for value in entry.values if value.name != "engine_kv"]
    assert {value.kind for value in own if value.bucket == "object"} == {"LatentBuffer"}
    largest = max(own, key=lambda value: sum(value.nbytes.values()) * (value.name != "clip_feas"))
    assert largest.name == "vae_enc_feat_map"


def test_the_host_has_no_field_that_is_not_declared(host_state):
    declared = {name for name in vars(view_class(host_state).__mro__[1]) if not name.startswith("_")}
    assert set(vars(host_state())) <= declared


def test_after_close_every_storage_of_the_session_is_dead(pair):
    run_some_steps(pair)
    session = pair.manager.peek("a")
    watch = Watch(*session.contents(without=session.engine_names))  # the pool is the engine's, and stays
    held = session.nbytes - session.get("engine_kv").nbytes
    assert sum(region.nbytes for region in watch.alive()) == held > 1_000_000
    assert pair.managed.pipeline.state.session_id == "a", "the alias shows the session that is closed"
    gc.collect()
    gc.disable()
    try:
        pair.call("close", "a")  # though ``session`` still holds it here
        assert watch.alive() == ()
        assert pair.managed.pipeline.state is None
    finally:
        gc.enable()


def test_closing_another_session_leaves_the_alias(pair):
    run_some_steps(pair, "a", 2)
    run_some_steps(pair, "b", 2)
    pair.call("close", "a")
    assert pair.managed.pipeline.state.session_id == "b"


def test_reset_leaves_no_field_behind(session, host_state, view):
    """Fill every field, end the session, compare with a fresh one."""
    names = set(vars(host_state()))
    for name in names - {"stitched_buffer", "video_latents_across_time", "vae_encoder_out"}:
        setattr(view, name, torch.ones(1))
    view.stitched_buffer.append(np.ones(3))
    view.video_latents_across_time.append(torch.ones(1))
    view.vae_encoder_out = torch.ones(1, 1, 3, 1, 1)
    view.grown_field = torch.ones(1)
    watch = Watch(*session.contents())
    del view.grown_field
    view.grown_field = torch.ones(1)
    session.reset()
    assert watch.alive() == ()
    assert session.attrs == {}
    assert not any(obj.resident for obj in session.objects.values())


def test_views_of_one_session_share_all_and_views_of_two_share_nothing(session, host_state, view):
    view.clip_feas = torch.ones(2)
    view.stitched_buffer.append(np.ones(3))
    again = view_of(session, host_state, window=2)
    assert again.clip_feas is view.clip_feas
    assert again.stitched_buffer is view.stitched_buffer
    other = view_of(SessionStateManager().get_or_create_session("b"), host_state, window=2)
    assert other.clip_feas is None
    assert len(other.stitched_buffer) == 0


def test_a_view_over_an_existing_session_does_not_reset_it(session, host_state, view):
    view.call_count = 7
    assert view_of(session, host_state, window=2).call_count == 7


def test_an_assigned_buffer_shares_no_list(view):
    mine = [torch.ones(1)]
    view.video_latents_across_time = mine
    mine.append(torch.zeros(1))
    assert len(view.video_latents_across_time) == 1
    held = view.video_latents_across_time
    view.video_latents_across_time = []
    assert len(held) == 1, "who held the old list keeps it"
    assert isinstance(held, list)


def test_a_ring_stays_a_ring(view):
    for n in range(6):
        view.stitched_buffer.append(n)
    assert list(view.stitched_buffer) == [2, 3, 4, 5]


@pytest.mark.parametrize("frames", [1, 2, 3, 9])
def test_the_encoder_window_is_a_copy_of_the_last_frames(view, frames):
    history = torch.arange(frames * 6.0).reshape(1, 2, frames, 3, 1)
    view.vae_encoder_out = history
    kept = view.vae_encoder_out
    assert torch.equal(kept, history[:, :, -2:])
    assert kept.untyped_storage().nbytes() == kept.numel() * 4
    assert kept.untyped_storage().data_ptr() != history.untyped_storage().data_ptr()
    view.vae_encoder_out = None
    assert view.vae_encoder_out is None


def test_the_hosts_append_keeps_the_window(view):
    view.vae_encoder_out = torch.zeros(1, 2, 1, 3, 1)
    for n in range(1, 5):
        view.append_vae_encoder_chunk(torch.full((1, 2, 1, 3, 1), float(n)))
    assert view.vae_encoder_out[0, 0, :, 0, 0].tolist() == [3, 4]


def test_asking_for_more_frames_than_the_window_raises(pair):
    run_some_steps(pair)
    pipeline = pair.managed.pipeline
    with (
        pytest.raises(ValueError, match=f"Requested {pair.window + 1} latent frames"),
        torch.inference_mode(),
    ):
        pipeline._vae_stream_get_observation_latents(pipeline.state, pair.window + 1, dtype=torch.bfloat16)


def test_a_field_that_the_model_grew_is_carried_and_reported_once(host_state, session, caplog):
    forget_said()
    grown = type("Grown", (host_state,), {"momentum": 5, "__module__": host_state.__module__})
    with caplog.at_level(logging.WARNING):
        view = view_of(session, grown, window=2)
        assert view.momentum == 5
        view.momentum = 6
        view.brand_new = torch.ones(2)
    again = view_of(session, grown, window=2)
    assert again.momentum == 6
    assert again.brand_new is view.brand_new
    assert set(vars(again)) == {"_session", "_vae_encoder_window"}
    assert session.attrs["momentum"] == 6
    other = view_of(SessionStateManager().get_or_create_session("b"), grown, window=2)
    assert other.momentum == 5
    assert not hasattr(other, "brand_new"), "an unset field reads as unset in every session"
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "'momentum'" in line]) == 1
    assert len([line for line in said if "'brand_new'" in line]) == 1


def test_a_holder_of_an_ended_session_can_write_and_nobody_sees_it(host_state):
    manager = SessionStateManager()
    view = view_of(manager.get_or_create_session("a"), host_state, window=2)
    for n in range(9):
        view.stitched_buffer.append(n)
    manager.drop_session("a")
    for n in range(9):
        view.stitched_buffer.append(n)
    view.video_latents_across_time.append(torch.ones(1))
    assert list(view.stitched_buffer) == [5, 6, 7, 8], "the ring is still a ring"
    fresh = view_of(manager.get_or_create_session("a"), host_state, window=2)
    assert list(fresh.stitched_buffer) == fresh.video_latents_across_time == []


def test_a_fresh_session_has_its_buffers_from_the_start(session, view):
    assert {name: type(obj) for name, obj in session.objects.items()} == dict.fromkeys(OBJECTS, LatentBuffer)
    assert isinstance(type(view).call_count, SessionAttr)

"""What workers say of a session's state: while it is the same nothing, and then each value that is not."""

from __future__ import annotations

import json
import logging
import weakref
from types import SimpleNamespace
from unittest.mock import ANY

import made
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import sized

from vllm_omni_session_state import SessionState, SessionStateManager
from vllm_omni_session_state.ab.compare.comparison import PER_STEP, compare, state_file
from vllm_omni_session_state.ab.runs.child import Stage, _last_looks, served_in
from vllm_omni_session_state.ab.runs.outputs import save_state
from vllm_omni_session_state.ab.runs.worker_probe import MOST_HEARD, ProbedWorker
from vllm_omni_session_state.ab.workload.dreamzero import Robots
from vllm_omni_session_state.adapters.dreamzero import view_of
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.base.log import LOGGER
from vllm_omni_session_state.offload.host_tier import HostTier

pytestmark = pytest.mark.host

WINDOW = 2


class FakeWorker:
    """Stands in for vLLM-Omni's worker: it has a pipeline, and no device and no weights."""

    def __init__(self, pipeline):
        self.model_runner = SimpleNamespace(pipeline=pipeline)


class Worker(ProbedWorker, FakeWorker):
    """As vLLM-Omni makes one of the two."""


class Both:
    """One worker with the model's own dict of states, one with a manager; both are told the same."""

    def __init__(self):
        from vllm_omni.diffusion.models.dreamzero.state_dreamzero import DreamZeroState

        self.host = DreamZeroState
        self.states = {}
        self.manager = SessionStateManager(tier=HostTier(budget=1 << 24))
        self.off = Worker(SimpleNamespace(num_frame_per_block=WINDOW, _states=self.states))
        self.on = Worker(SimpleNamespace(num_frame_per_block=WINDOW, _memory_manager=self.manager))

    def fields(self, key):
        """The state object of each."""
        session = self.manager.get_or_create_session(key)
        return self.states.setdefault(key, self.host()), view_of(session, self.host, window=WINDOW)

    def step(self, key, seed):
        """What a forward does to a session, in short."""
        for state in self.fields(key):
            rng = torch.Generator().manual_seed(seed)

            def drawn(*shape, rng=rng):
                return torch.rand(shape, generator=rng)

            state.accumulate_frames(drawn(2, 2, 3).numpy())
            state.append_video_latents(drawn(1, 2, 1, 2, 2).bfloat16())
            state.prompt_embeds, state.language = drawn(1, 3), torch.tensor([seed])
            state.vae_enc_feat_map = [drawn(2), None, drawn(3)]
            if not state.vae_stream_initialized:
                state.vae_encoder_out, state.vae_stream_initialized = drawn(1, 2, 1, 1, 1), True
            else:
                state.append_vae_encoder_chunk(drawn(1, 2, 1, 1, 1))

    def window_reset(self, key, seed):
        """As the model does when its window is full."""
        for state in self.fields(key):
            state.reset_inference_state()

    def end(self, key, seed):
        """A close."""
        self.states.pop(key, None)
        self.manager.drop_session(key)

    def sizes(self):
        """Bytes of each session by both workers, on the CPU."""
        ranks = (worker.session_state_sizes()["ranks"][0] for worker in (self.off, self.on))
        return [{name: sum(held.values()) for name, held in rank["sizes"].items()} for rank in ranks]

    def compared(self, key, tmp, *, last=False):
        """What the two are said to differ in."""
        off, on = (worker.session_state_look(key, last)["ranks"] for worker in (self.off, self.on))
        return compared(tmp, off, on)


def compared(tmp, off, on):
    """What is said of two runs of one step, of which this is what the ranks saw."""
    for word, ranks in (("off", off), ("on", on)):
        made.write(tmp / word, 0)
        save_state(state_file(tmp / word, 0), ranks)
    return compare(tmp / "off", tmp / "on", made.asks(1))


def names(found):
    """Of the values that differ."""
    return [difference.tensor for difference in found.differences]


def unread(found):
    """Why nothing was compared."""
    ((_, why),) = found.unread
    return why


STEPS = st.lists(
    st.tuples(st.sampled_from(["step", "step", "step", "window_reset", "end"]), st.sampled_from("ab")),
    min_size=1,
    max_size=12,
)


def flip(tensor):
    """The last bit of its first element."""
    tensor.reshape(-1).view(torch.uint8)[0] ^= 1


MISTAKES = {
    "call_count": lambda state: setattr(state, "call_count", state.call_count + 1),
    "prompt_embeds": lambda state: flip(state.prompt_embeds),
    "language": lambda state: setattr(state, "language", None),
    "vae_enc_feat_map.2": lambda state: flip(state.vae_enc_feat_map[2]),
    "vae_encoder_out": lambda state: flip(state.vae_encoder_out),
    "video_latents_across_time.-1": lambda state: flip(state.video_latents_across_time[-1]),
    "clip_feas": lambda state: setattr(state, "clip_feas", torch.zeros(1)),
}


@sized(400)
@given(STEPS, st.booleans())
def test_while_both_do_the_same_nothing_is_said(tmp_path_factory, steps, last):
    both, tmp = Both(), tmp_path_factory.getbasetemp()
    for seed, (does, key) in enumerate(steps):
        getattr(both, does)(key, seed)
        for each in "ab":
            found = both.compared(each, tmp, last=last)
            assert (found.differences, found.unread) == ([], [])
            there = each in both.states
            assert (found.values > 0) == there
            assert (each in both.manager) == there, "looking makes no session"
        off, on = both.sizes()
        assert set(on) == set(off) == {display_id(each) for each in both.states}
        for each, state in both.states.items():
            frames = 0 if state.vae_encoder_out is None else state.vae_encoder_out.shape[2]
            unread = max(0, frames - WINDOW) * 2 * 4
            assert off[display_id(each)] == on[display_id(each)] + unread


@sized(400)
@given(STEPS, st.sampled_from(sorted(MISTAKES)))
def test_one_bit_of_one_value_is_named_and_nothing_else(tmp_path_factory, steps, mistake):
    both, tmp = Both(), tmp_path_factory.getbasetemp()
    for seed, (does, key) in enumerate([*steps, ("step", "a")]):
        getattr(both, does)(key, seed)
    MISTAKES[mistake](both.fields("a")[1])
    (found,) = both.compared("a", tmp).differences
    assert found.tensor == f"state.{mistake}"
    assert found.off != found.on
    assert both.compared("b", tmp).differences == []


def test_an_earlier_chunk_is_seen_where_everything_is_looked_at(tmp_path):
    both = Both()
    for seed in range(3):
        both.step("a", seed)
    flip(both.fields("a")[1].video_latents_across_time[0])
    assert both.compared("a", tmp_path).differences == []
    assert names(both.compared("a", tmp_path, last=True)) == ["state.video_latents_across_time.-3"]


def test_a_session_that_only_one_run_has_differs_in_all_that_it_has(tmp_path):
    both = Both()
    both.step("a", 1)
    count = both.compared("a", tmp_path).values
    both.manager.drop_session("a")
    assert {each.on for each in both.compared("a", tmp_path).differences} == {"not there"}
    both = Both()
    both.step("a", 1)
    del both.states["a"]
    found = both.compared("a", tmp_path)
    assert {each.off for each in found.differences} == {"not there"}
    assert len(found.differences) == found.values == count


def test_what_an_ended_session_still_holds_is_named(tmp_path, monkeypatch):
    def reset(session):
        del session.attrs["language"]  # and forgets to forget the rest
        session._objects.clear()

    both = Both()
    both.step("a", 1)
    assert both.compared("a", tmp_path, last=True).differences == []
    monkeypatch.setattr(SessionState, "reset", reset)
    both.end("a", 1)
    found = both.compared("a", tmp_path)
    assert "state.prompt_embeds of the session that ended" in names(found)
    assert both.compared("a", tmp_path).differences == [], "it is said once"


def test_a_session_that_is_evicted_is_held_by_nobody_here(tmp_path):
    both = Both()
    both.manager = both.on.model_runner.pipeline._memory_manager = SessionStateManager(max_sessions=1)
    both.step("a", 1)
    both.compared("a", tmp_path, last=True)
    evicted = weakref.ref(both.manager.peek("a"))
    both.step("b", 1)
    assert evicted() is not None, "it was to end with its next step"
    both.compared("b", tmp_path)
    assert evicted() is None
    both.end("a", 1)
    assert both.compared("a", tmp_path).values == 0


def test_older_chunks_that_one_run_has_let_go_of_are_what_differs(tmp_path):
    both = Both()
    for seed in range(5):
        both.step("a", seed)
    del both.fields("a")[1].video_latents_across_time[:-2]
    assert both.compared("a", tmp_path).differences == []
    found = both.compared("a", tmp_path, last=True)
    assert names(found) == [f"state.video_latents_across_time.-{n}" for n in (3, 4, 5)]
    assert {each.on for each in found.differences} == {"not there"}


def test_a_parked_session_is_left_where_it_is_and_that_is_said(tmp_path):
    both = Both()
    both.step("a", 1)
    assert both.manager.park("a")
    assert unread(both.compared("a", tmp_path)) == "flag on, rank 0: its session was parked"
    assert both.manager.peek("a").parked
    (rank,) = both.on.session_state_sizes()["ranks"]
    assert rank["sizes"] == {display_id("a"): {"parked (host)": ANY, "cpu": 48}}, "frames stay where they are"


def test_a_worker_that_cannot_look_says_why(tmp_path, monkeypatch):
    both = Both()
    both.step("a", 1)
    monkeypatch.setattr(both.off.model_runner.pipeline, "_states", None)
    assert unread(both.compared("a", tmp_path)).startswith("flag off, rank 0: AttributeError: ")


def test_a_look_refreshes_nobody(tmp_path):
    both = Both()
    for key in "ab":
        both.step(key, 1)
    both.compared("a", tmp_path)
    assert both.manager.keys() == ("a", "b")


def test_ranks_are_compared_each_with_its_own(tmp_path):
    def rank(number, **values):
        seen = {name: (f"int {value}", "") for name, value in values.items()}
        return {"rank": number, "ok": True, "parked": False, "values": seen}

    found = compared(tmp_path, [rank(0, a=1, b=2), rank(1, a=3)], [rank(0, a=1, b=2), rank(1, a=4)])
    assert [(each.tensor, each.off, each.on) for each in found.differences] == [
        ("state.a on rank 1", "int 3", "int 4")
    ]
    assert found.values == 3


def test_differences_of_state_come_after_those_of_outputs_and_few_of_a_step_are_shown(tmp_path):
    off, on = tmp_path / "off", tmp_path / "on"
    both = Both()
    for number in range(2):
        both.step("a", number)
        for folder, worker, actions in ((off, both.off, 0), (on, both.on, number)):
            made.write(folder, number, actions=np.full(2, actions, np.float32))
            save_state(state_file(folder, number), worker.session_state_look("a", False)["ranks"])
    save_state(state_file(on, 1), both.on.session_state_look("nobody", False)["ranks"])
    found = compare(off, on, made.asks(2))
    assert found.differences[0].tensor == "actions"
    assert (found.outputs, found.outputs_different) == (2, 1)
    assert found.values > found.values_different == len(found.differences) - 1 > PER_STEP
    assert len(found.shown(100)) == 1 + PER_STEP
    assert found.shown(1) == found.differences[:1]
    assert str(found.differences[1]).endswith("with the flag off, not there with it on")


def test_what_the_plugin_warns_of_is_taken_once_and_is_bounded():
    worker = Worker(SimpleNamespace())
    LOGGER.info("nothing")
    for number in range(MOST_HEARD + 1):
        LOGGER.warning("careful: %d", number)
    (rank,) = worker.session_state_warned()["ranks"]
    assert rank["said"] == [f"careful: {number}" for number in range(MOST_HEARD)]
    (rank,) = worker.session_state_warned()["ranks"]
    assert rank["said"] == []


@pytest.fixture(autouse=True)
def _as_it_was():
    handlers = list(LOGGER.handlers)
    yield
    LOGGER.handlers[:] = handlers
    assert logging.getLogger("vllm_omni.session_state") is LOGGER


def test_everything_is_looked_at_before_a_session_ends_or_begins_anew():
    sent = Robots(sessions=3, steps=12).asks
    whole = set(_last_looks(sent))
    by_session = {n: [ask for ask in sent if ask.session == n] for n in (1, 2, 3)}
    closed = next(at for at, ask in enumerate(by_session[2]) if ask.do == "close")
    reset = next(at for at, ask in enumerate(by_session[1]) if ask.do == "reset")
    anew = next(at for at, ask in enumerate(by_session[3]) if ask.words.get("reset"))
    wanted = {by_session[n][at - 1].number for n, at in ((2, closed), (1, reset), (3, anew))}
    wanted |= {asks[-1].number for asks in by_session.values()} | {by_session[3][-2].number}
    assert whole == wanted


@pytest.mark.parametrize("where", ["stage", "engine_args"])
def test_a_stage_that_has_an_extension_of_its_own_keeps_it(tmp_path, where):
    stage = {"stage_id": 3, "model_class_name": "DreamZeroPipeline"}
    more = {"worker_extension_cls": "mine.Extension"}
    file = tmp_path / "deploy.yaml"
    for extended in (False, True):
        of_engine = {"engine_args": more} if where == "engine_args" else more
        stages = [{**stage, **(of_engine if extended else {})}]
        file.write_text(json.dumps({"pipeline": "dreamzero", "stages": stages}))
        assert served_in(str(file)) == Stage("DreamZero", 3, extended)

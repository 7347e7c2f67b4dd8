"""The harness itself: it runs the real host, twice the same, and its outputs depend on what they should.

What the plugin does with vLLM-Omni is not tested here.
"""

from __future__ import annotations

import numpy as np
import pytest
from profiles import LONG

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def model(dreamzero_checkpoint):
    from omni_tiny.inproc import TinyDreamZero

    with TinyDreamZero(dreamzero_checkpoint, flag=False, capacity=4) as model:
        yield model


def run(model, prompts, *, steps=3, prefix=""):
    """Step each session in turn; the same calls give the same observations."""
    rng = np.random.default_rng(1)
    outputs = []
    for step in range(steps):
        for session, prompt in prompts.items():
            frames = 1 if step == 0 else 4
            outputs.append(model.step(f"{prefix}{session}", rng=rng, prompt=prompt, frames=frames))
    for session in prompts:
        assert model.close(f"{prefix}{session}")
    return outputs


def same(first, second):
    return [one.equals(other) for one, other in zip(first, second, strict=True)]


def test_two_sessions_give_the_same_bits_twice(model):
    prompts = {"a": "pick up the cup", "b": "open the drawer"}
    first = run(model, prompts)
    assert all(np.isfinite(step.actions).all() and step.video.isfinite().all() for step in first)
    assert all(same(first, run(model, prompts)))


def test_a_step_depends_on_its_prompt(model):
    assert not any(same(run(model, {"a": "pick up the cup"}), run(model, {"a": "open the drawer"})))


def test_a_step_depends_on_the_sessions_history(model):
    whole = run(model, {"a": "wave"})
    rng = np.random.default_rng(1)
    model.step("a", rng=rng, prompt="wave", frames=1)
    model.step("a", rng=rng, prompt="wave")
    forgotten = model.step("a", rng=rng, prompt="wave", reset=True, close=True)
    assert not forgotten.equals(whole[-1])


def test_a_session_does_not_see_its_neighbour(model):
    alone = run(model, {"a": "wave"}, steps=1)
    assert same(alone, run(model, {"a": "wave", "b": "stack"}, steps=1)[:1]) == [True]


@pytest.mark.parametrize("capacity", [1, 2, 64])
def test_the_runner_keeps_exactly_as_many_sessions_as_asked_for(dreamzero_checkpoint, capacity):
    from omni_tiny.inproc import TinyDreamZero

    with TinyDreamZero(dreamzero_checkpoint, flag=False, capacity=capacity) as model:
        assert model.capacity == capacity
        if capacity == 2:
            for session in "abc":
                model.step(session, rng=np.random.default_rng(0), frames=1)
            assert list(model.runner._sessions) == ["b", "c"]


@pytest.mark.skipif(not LONG, reason="four workers, of the harness alone: part of the long run")
def test_workers_with_and_without_the_flag_live_one_after_the_other_and_side_by_side(dreamzero_checkpoint):
    from omni_tiny.inproc import TinyDreamZero

    prompts = {"a": "pick up the cup", "b": "open the drawer"}
    outputs = {}
    for flag in (False, True):
        with TinyDreamZero(dreamzero_checkpoint, flag=flag) as model:
            assert (model.pipeline._memory_manager is not None) is flag
            outputs[flag] = run(model, prompts)
    assert all(same(outputs[False], outputs[True]))
    with (
        TinyDreamZero(dreamzero_checkpoint, flag=False) as bespoke,
        TinyDreamZero(dreamzero_checkpoint, flag=True) as managed,
    ):
        rngs = np.random.default_rng(1), np.random.default_rng(1)
        for number in range(6):
            session, frames = "ab"[number % 2], 1 if number < 2 else 4
            steps = [
                model.step(session, rng=rng, prompt=prompts[session], frames=frames)
                for model, rng in zip((bespoke, managed), rngs, strict=True)
            ]
            assert steps[0].equals(steps[1])
            assert steps[0].equals(outputs[False][number])


@pytest.mark.skipif(not LONG, reason="of the harness alone; two ranks have worker processes, too: long run")
def test_the_worker_process_gives_the_same_bits_as_this_process(model, dreamzero_checkpoint, tmp_path):
    from omni_tiny.omni_runs import OmniDreamZero, write_deploy

    prompts = {"a": "pick up the cup", "b": "open the drawer"}
    here = run(model, prompts)
    deploy = write_deploy(tmp_path / "deploy.yaml", dreamzero_checkpoint)
    with OmniDreamZero(dreamzero_checkpoint, deploy) as served:
        assert all(same(here, run(served, prompts)))
        with pytest.raises(RuntimeError, match="no_such_method"):
            served.call("no_such_method")

"""Two real DreamZeros side by side, one on its own path and one on the manager, compared to the bit.

After every operation the outputs are compared, and then everything that either model holds for any of
its sessions: the table's keys in their order of use, and each field of each session.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from omni_tiny.inproc import TinyDreamZero

from vllm_omni_session_state.accounting.append_list import AppendTrackedList
from vllm_omni_session_state.adapters.dreamzero import view_of

FEW_FRAMES = "vae_encoder_out"
"""The one field of which the managed side keeps only the end, and of how much."""


def same_bits(a: Any, b: Any) -> bool:
    """Whether two values are equal in kind, shape and every bit."""
    kinds = {
        list if type(value) is AppendTrackedList else type(value) for value in (a, b)
    }  # a list in every way
    if len(kinds) > 1:
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.device == b.device
            and a.is_inference() == b.is_inference()
            and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        )
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same_bits(list(a), list(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return bool(a == b)


class Lockstep:
    """A bespoke and a managed tiny DreamZero that get the same operations.

    Args:
        bespoke: With the flag off.
        managed: With the flag on.
        seed: Of the robot's observations.
    """

    def __init__(self, bespoke: TinyDreamZero, managed: TinyDreamZero, *, seed: int = 0) -> None:
        self.models = (bespoke, managed)
        self.bespoke, self.managed = bespoke, managed
        self.manager = managed.pipeline._memory_manager
        self.window = managed.pipeline.num_frame_per_block
        self._seed = seed
        self._draws = 0

    def fresh(self) -> Lockstep:
        """End every session on both sides, as their clients would; what is left is a model just loaded."""
        for key in list(self.bespoke.pipeline._states):
            self.bespoke.close(key)
        for key in list(self.manager._table.order):
            self.managed.close(key)
        for model in self.models:
            for key in list(model.runner._sessions):
                model.close(key)
            model.pipeline.state = None
        return self

    def step(self, session: str, **how: Any) -> None:
        """One step of one session on both; equal outputs, equal state."""
        self._draws += 1
        draw = [self._seed, self._draws]
        ours, theirs = (model.step(session, rng=np.random.default_rng(draw), **how) for model in self.models)
        assert theirs.equals(ours), f"outputs of {session} differ at operation {self._draws}"
        self.compare()

    def failing_step(self, session: str, error: type[Exception], **how: Any) -> None:
        """One step that fails after the forward has begun to change the session, on both alike."""
        self._draws += 1
        for model in self.models:
            with broken_diffuse(model.pipeline):
                try:
                    model.step(session, rng=np.random.default_rng([self._seed, self._draws]), **how)
                except error:
                    continue
            raise AssertionError(f"the step of {session} did not fail")
        self.compare()

    def call(self, name: str, session: str) -> None:
        """``close`` or ``reset`` by the worker's own remote methods, on both."""
        for model in self.models:
            getattr(model, name)(session)
        self.compare()

    def decode(self, session: str) -> None:
        """Decode every chunk of a session on both; equal pictures, equal refusals."""
        pictures = []
        for model in self.models:
            with torch.inference_mode():
                try:
                    pictures.append(model.pipeline.decode_accumulated_video_latents(session))
                except RuntimeError as error:
                    pictures.append(str(error))
        assert same_bits(*pictures), f"decoded pictures of {session} differ"

    def clear(self, session: str) -> None:
        """Forget the chunks of a session that is there, on both."""
        for model in self.models:
            model.pipeline.clear_accumulated_video_latents(session)
        self.compare()

    def fields(self, key: str) -> dict[str, Any]:
        """The managed side's fields of a session, read through a fresh view, refreshing nobody."""
        session = self.manager.peek(key)
        assert session is not None, f"the manager lost {key}"
        host_state = type(next(iter(self.bespoke.pipeline._states.values())))
        view = view_of(session, host_state, window=self.window)
        assert set(vars(view)) == {"_session", "_vae_encoder_window"}, (
            "a field stayed on the short-lived view"
        )
        names = vars(self.bespoke.pipeline._states[key])
        return {name: getattr(view, name) for name in names}

    def compare(self) -> None:
        """Equal tables in equal order, and equal fields of every session."""
        self.manager.check()
        states = self.bespoke.pipeline._states
        assert list(self.manager._table.order) == list(states), "the tables differ"
        for key, state in states.items():
            managed = self.fields(key)
            for name, value in vars(state).items():
                ours = managed[name]
                if name == FEW_FRAMES and value is not None:
                    assert ours is not None, f"{key}.{name} is gone"
                    assert ours.shape[2] == min(self.window, value.shape[2]), (
                        f"{key}.{name} keeps {ours.shape[2]} frames"
                    )
                    assert ours.untyped_storage().nbytes() == ours.numel() * ours.element_size(), (
                        f"{name} aliases"
                    )
                    value = value[:, :, -self.window :]  # noqa: PLW2901 - what the ring promises to keep
                assert same_bits(value, ours), f"{key}.{name} differs"
        alias, managed_alias = self.bespoke.pipeline.state, self.managed.pipeline.state
        assert (alias is None) == (managed_alias is None), "the alias differs"
        assert {s for s in states if states[s] is alias} == (
            {managed_alias.session_id} if managed_alias else set()
        )


@contextmanager
def broken_diffuse(pipeline: Any):
    """``diffuse`` raises: by then the forward has accumulated frames, encoded them and filled the KV."""

    def diffuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError("broken on purpose")

    pipeline.diffuse = diffuse
    try:
        yield
    finally:
        del pipeline.diffuse


def scenario(pair: Lockstep) -> int:
    """Everything that can happen to a session; returns the number of steps."""
    steps = 0

    def step(session: str, **how: Any) -> None:
        nonlocal steps
        steps += 1
        pair.step(session, **how)

    prompts = {"a": "pick up the cup", "b": "open the drawer", "c": "wave"}
    for round_ in range(7):  # interleaved, past a window reset
        for session, prompt in prompts.items():
            step(session, prompt=prompt, frames=1 if round_ == 0 else 4)
        pair.decode("a")
    step("b", prompt="close the drawer")  # a prompt change
    step("b", prompt="close the drawer")
    step("a", prompt=prompts["a"], frames=1)  # a single frame in the middle
    for _ in range(3):
        step("a", prompt=prompts["a"])
    step("c", prompt=prompts["c"], reset=True)  # an explicit reset, by request
    step("c", prompt=prompts["c"])
    pair.call("reset", "a")  # and by remote call
    step("a", prompt=prompts["a"])
    step("a", prompt=prompts["a"])
    step("b", prompt="close the drawer", close=True)  # a close, by request
    step("b", prompt=prompts["b"], frames=1)
    step("b", prompt=prompts["b"])
    pair.call("close", "b")  # and by remote call
    pair.call("close", "nobody")
    pair.failing_step("a", ValueError, prompt=prompts["a"])  # a failed forward
    step("a", prompt=prompts["a"], frames=1)
    step("a", prompt=prompts["a"])
    pair.failing_step("new", ValueError, prompt="x", frames=1)
    for round_ in range(3):  # more sessions than the runner keeps: it evicts the least recently used
        for session in ("d", "e", "f", "a"):
            step(session, prompt=f"task {session}", frames=1 if round_ == 0 else 4)
    for _ in range(8):  # a long one, alone, past two windows
        step("a", prompt="task a")
    for _ in range(4):
        step("", prompt="nobody's")
    pair.clear("a")
    pair.decode("a")
    step("a", prompt="task a")
    pair.decode("a")
    return steps

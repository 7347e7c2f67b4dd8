"""One session's rollout on the host's cache classes, which knows what the engine must hold of it."""

from __future__ import annotations

import itertools
from typing import Any

from engine import (
    CROSS,
    FRAMES_PER_BLOCK,
    TOKENS,
    Shape,
    cross_content,
    frame,
    nbytes,
    new_state,
    resident,
    same,
    same_frames,
    write,
)

from vllm_omni_session_state.omni.worker.engine_kv import SessionKV
from vllm_omni_session_state.state.paged_kv import PagedKV

_seeds = itertools.count(1000)


class Rollout:
    """A session and all that was written into it.

    Args:
        kv: vLLM-Omni's pool,
        shape: of that shape.
        session: The session's id.
        frames: How many to begin with, in chunks as a model writes them, with cross-attention K/V.
    """

    def __init__(self, kv: Any, shape: Shape, session: str = "a", *, frames: int = 0) -> None:
        self.kv, self.shape, self.session = kv, shape, session
        self.state = new_state(kv, session)
        self.frames: dict[str, list[Any]] = {branch: [] for branch in shape.branches}
        self.cross: dict[tuple[str, str], list[Any]] = {}
        if frames:
            for cache in CROSS:
                self.encode(cache)
            self.run(frames)

    @property
    def handle(self) -> PagedKV:
        """A handle to what the engine holds of it."""
        return PagedKV(SessionKV(self.state))

    def encode(self, cache: str) -> None:
        """Write the cross-attention K/V of one cache, for every branch its own."""
        for branch in self.shape.branches:
            content = cross_content(self.shape.layers, cache, next(_seeds))
            self.state.populate_cross_attention(branch, cache, iter(content))
            self.cross[cache, branch] = content

    def run(self, frames: int) -> None:
        """Write and commit so many frames on every branch."""
        while frames > 0:
            count = min(frames, FRAMES_PER_BLOCK)
            for branch in self.shape.branches:
                new = [frame(self.shape.layers, next(_seeds)) for _ in range(count)]
                write(self.state, branch, new)
                self.frames[branch] += new
            frames -= count

    def resident(self, branch: str) -> list[Any]:
        """The frames that the engine must still hold: the sink, and the end of the rest."""
        frames, sink = self.frames[branch], self.shape.sink
        return frames[:sink] + frames[sink:][-self.shape.window :]

    def check(self) -> None:
        """Assert that the engine holds this and nothing else of the session, and that it is so counted."""
        for branch, adapter in self.state.adapters.items():
            held = resident(self.state, branch)
            assert same_frames(held, self.resident(branch)), f"{branch}: another content"
            assert adapter.num_computed_tokens == len(held) * TOKENS, f"{branch}: the table is misread"
            tokens = len(self.frames[branch]) * TOKENS
            assert adapter.absolute_num_computed_tokens == tokens, f"{branch}: another position"
            assert self.state._committed[branch] == tokens, f"{branch}: another count of commits"
        held = self.kv._cross_sessions.get(self.session, {})
        pairs = {(cache, branch): pair for cache, by in held.items() for branch, pair in by.items()}
        assert set(pairs) == set(self.cross), "other cross-attention caches"
        for key, (keys, values) in pairs.items():
            for layer, (k, v) in enumerate(self.cross[key]):
                assert same(keys[layer], k[0]), f"{key}: another K"
                assert same(values[layer], v[0]), f"{key}: another V"
        assert sum(self.handle.nbytes_by_device().values()) == nbytes(self.state), "other bytes"

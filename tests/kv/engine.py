"""Small pools of vLLM-Omni's own engine KV classes, written and read through the engine's own contexts.

Not here: attention. What a forward of a model would compute, these tests draw at random and write to the
slots that the engine names.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

TOKENS = 2
"""Tokens of a frame, which is a block."""

FRAMES_PER_BLOCK = 2
HEADS, HEAD_SIZE = 2, 4
DTYPE = torch.bfloat16
CROSS = {"text": 3, "image": 2}
CROSS_HEADS = {"image": 1}
CPU = torch.device("cpu")

Frame = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""K and V of each layer for one frame, ``(TOKENS, HEADS, HEAD_SIZE)``."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one pool is like.

    Attributes:
        branches: Names of the KV branches.
        layers: Layers of the model.
        window: Frames of the sliding window.
        sink: Frames before it that never leave: the table is compacted around the gap.
        sessions: Sessions that the pool is for.
    """

    branches: tuple[str, ...] = ("positive", "negative")
    layers: int = 2
    window: int = 3
    sink: int = 0
    sessions: int = 3
    staging: bool = False

    @property
    def page(self) -> int:
        """Bytes of one block in all layers, K and V."""
        return 2 * self.layers * TOKENS * HEADS * HEAD_SIZE * DTYPE.itemsize

    @property
    def blocks(self) -> int:
        """Blocks of the pool, the null block among them: exactly what the engine wants for its sessions."""
        return len(self.branches) * (self.sessions * (self.sink + self.window) + FRAMES_PER_BLOCK) + 2


LIKE_DREAMZERO = Shape()
LIKE_LINGBOT = Shape(branches=("main",), layers=3, window=3, sink=2)
SHAPES = (
    LIKE_DREAMZERO,
    LIKE_LINGBOT,
    Shape(sink=1, window=2, sessions=2),
    Shape(branches=("main",), layers=1, window=4, sessions=1),
    Shape(sink=1, window=1, sessions=1),
)


def make_pool(shape: Shape) -> Any:
    """vLLM-Omni's ``ARDiffusionKVCache`` of that shape, in which memory means something: it is all ones."""
    from vllm_omni.experimental.ar_diffusion.capability import ARDiffusionKVBranchSpec
    from vllm_omni.experimental.ar_diffusion.kv_cache import ARDiffusionKVCache, ARDiffusionKVConfig

    config = ARDiffusionKVConfig(
        enable=True,
        chunk_size=TOKENS,
        window_chunks=shape.window,
        sink_chunks=shape.sink,
        gpu_memory_fraction=1.0,
        reuse_history_staging=shape.staging,
    )
    names = len(shape.branches)
    heads = {name: CROSS_HEADS.get(name, HEADS) for name in CROSS}
    cross = sum(2 * names * shape.layers * CROSS[c] * heads[c] * HEAD_SIZE * DTYPE.itemsize for c in CROSS)
    scratch = names * FRAMES_PER_BLOCK * shape.page
    staged = 0
    if shape.staging:
        staged = shape.page * (shape.window + shape.sink + 1)
    kv = ARDiffusionKVCache(
        config,
        num_layers=shape.layers,
        num_kv_heads=HEADS,
        head_size=HEAD_SIZE,
        dtype=DTYPE,
        block_size=TOKENS,
        max_model_len=1 << 20,
        available_bytes=scratch + staged + shape.sessions * cross + shape.blocks * shape.page,
        kv_branches=tuple(ARDiffusionKVBranchSpec(name, i) for i, name in enumerate(shape.branches)),
        session_capacity=shape.sessions,
        cross_attention_lengths=CROSS,
        cross_attention_kv_heads=CROSS_HEADS,
        device=CPU,
        frames_per_block=FRAMES_PER_BLOCK,
    )
    assert kv.managed_num_blocks == shape.blocks
    assert kv.session_capacity == shape.sessions
    for layer in range(shape.layers):
        kv.key_cache(layer).fill_(1)
        kv.value_cache(layer).fill_(1)
    return kv


def new_state(kv: Any, session: str) -> Any:
    """A session's ``ARDiffusionKVState``, made by vLLM-Omni's runner."""
    from vllm_omni.experimental.ar_diffusion.runner import ARDiffusionModelRunner

    spec = SimpleNamespace(kv_branches=kv.kv_branches, num_layers=kv.num_layers)
    runner = SimpleNamespace(kv_cache=kv, _ar_diffusion_kv_cache_spec=spec)
    return ARDiffusionModelRunner._new_session_state(runner, session)


def bits(*shape: int, seed: int) -> torch.Tensor:
    """A tensor of any bits, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(DTYPE)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, type and every bit."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))
    )


def frame(layers: int, seed: int) -> Frame:
    """One frame's K and V."""
    parts = bits(layers, 2, TOKENS, HEADS, HEAD_SIZE, seed=seed)
    return tuple((part[0], part[1]) for part in parts)


def write(state: Any, branch: str, frames: list[Frame], *, commit: bool = True) -> Any:
    """One forward of one branch: the engine names the slots. Returns its context.

    Raises:
        RuntimeError: The engine's own, where the pool is exhausted.
    """
    state.get_kv_caches(branch, seq_len=TOKENS * len(frames), commit_current=True)
    context = state._paged_pending[branch]
    context.prepare(CPU, 0, TOKENS * len(frames))
    for layer in range(state.num_layers):
        inputs = context.layer_inputs(layer)
        inputs.key_pool[inputs.video_slots] = torch.cat([each[layer][0] for each in frames])
        inputs.value_pool[inputs.video_slots] = torch.cat([each[layer][1] for each in frames])
    if commit:
        state.commit_paged_context(branch)
    return context


def look(state: Any, branch: str) -> Any:
    """A forward that commits nothing, as a denoising step is: its context, prepared."""
    state.get_kv_caches(branch, seq_len=TOKENS, commit_current=False)
    context = state._paged_pending[branch]
    context.prepare(CPU, 0, TOKENS)
    return context


def resident(state: Any, branch: str) -> list[Frame]:
    """What the engine would attend to, frame by frame, read through its own block table."""
    kv = state.kv_cache
    return [
        tuple((kv.key_cache(layer)[block], kv.value_cache(layer)[block]) for layer in range(kv.num_layers))
        for block in kv.window_block_ids(state.adapters[branch])
    ]


def same_frames(a: list[Frame], b: list[Frame]) -> bool:
    """Equal to the bit."""
    return len(a) == len(b) and all(
        same(x, y) for left, right in zip(a, b, strict=True) for p, q in zip(left, right, strict=True)
        for x, y in zip(p, q, strict=True)
    )  # fmt: skip


def cross_content(layers: int, cache: str, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer, as a model projects them: ``(1, length, heads, HEAD_SIZE)``."""
    parts = bits(layers, 2, 1, CROSS[cache], CROSS_HEADS.get(cache, HEADS), HEAD_SIZE, seed=seed)
    return [(part[0], part[1]) for part in parts]


def nbytes(state: Any) -> int:
    """The session's bytes, counted from the block lists of vLLM's own manager and the cross-attention."""
    kv = state.kv_cache
    (manager,) = kv.manager.coordinator.single_type_managers
    total = 0
    for adapter in state.adapters.values():
        blocks = [block for block in manager.req_to_blocks.get(adapter.request_id, ()) if not block.is_null]
        assert all(block.ref_cnt == 1 for block in blocks)
        total += len(blocks) * kv.spec.page_size_bytes * kv.num_layers
    cross = kv._cross_sessions.get(state.session_id, {}).values()
    tensors = [tensor for by in cross for pair in by.values() for part in pair for tensor in part]
    sizes = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}
    return total + sum(sizes.values())


def free(kv: Any) -> int:
    """Blocks of the pool that are nobody's."""
    return kv.manager.block_pool.get_num_free_blocks()


def all_free(kv: Any) -> None:
    """Assert that nobody holds anything of the pool."""
    assert free(kv) == kv.managed_num_blocks - 1  # the null block
    assert kv._adapters == {}
    assert kv._cross_sessions == {}

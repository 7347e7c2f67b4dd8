"""Attention over windows with sink blocks, as LingBot-World runs it: four probes and a commit a block.

The engine's own fused op writes and attends; every output is compared with a rollout that never left.
"""

import pytest
import torch
from engine import (
    CPU,
    FRAMES_PER_BLOCK,
    HEAD_SIZE,
    HEADS,
    LIKE_DREAMZERO,
    LIKE_LINGBOT,
    TOKENS,
    Shape,
    all_free,
    make_pool,
    new_state,
)
from travel_kv import WAYS, packed, take_out

from vllm_omni_session_state.omni.worker import engine_kv

pytestmark = pytest.mark.host

LENGTH = TOKENS * FRAMES_PER_BLOCK
PROBES = 4


def forward(state, branch, seed, *, commit):
    """All layers, each on the output of the one below; returns the last one's."""
    from vllm_omni.experimental.ar_diffusion.kv_cache import paged_write_attn

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(LENGTH, HEADS, HEAD_SIZE, generator=generator).bfloat16()
    for layer in state.get_kv_caches(branch, seq_len=LENGTH, commit_current=commit):
        layer.forward_ctx.prepare(CPU, 0, LENGTH)
        x = x + paged_write_attn(layer.to_layer_inputs(), x, x * 0.5, x + 1, None, None, 0.5)
    if commit:
        state.commit_paged_context(branch)
    return x


def rollout(pool, session, blocks, between):
    """Every output of a session; ``between`` is called wherever no chunk is half written."""
    state, outputs = new_state(pool, session), []
    for block in range(blocks):
        for ordinal, branch in enumerate(state.adapters):
            for step in range(PROBES + 1):
                seed = 1000 * block + 100 * ordinal + step
                outputs.append(forward(state, branch, seed, commit=step == PROBES))
                state = between(state, at_the_end=step == PROBES and branch == list(state.adapters)[-1])
    state.close()
    return outputs


def stay(state, *, at_the_end):
    return state


@pytest.fixture(params=[False, True], ids=["between blocks", "between any two forwards"])
def often(request):
    return request.param


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    "shape", [LIKE_LINGBOT, LIKE_DREAMZERO, Shape(sink=1, window=1)], ids=["LingBot", "DreamZero", "short"]
)
def test_attention_is_bit_equal_although_the_kv_was_out(shape, way, often):
    def leave(state, *, at_the_end):
        if not (often or at_the_end):
            return state
        tree = way(take_out(state))
        all_free(pool)
        moved = new_state(pool, "other")  # so that the blocks are others than they were
        forward(moved, shape.branches[0], 1, commit=True)
        back = new_state(pool, state.session_id) if often else state
        engine_kv.put_back(back, tree)
        moved.close()
        return back

    pool = make_pool(shape)
    alone = rollout(pool, "a", 5, stay)
    all_free(pool)
    for left, right in zip(alone, rollout(pool, "a", 5, leave), strict=True):
        assert torch.equal(left, right)
    all_free(pool)


def test_the_outputs_tell_the_sink_from_the_window():
    """With two blocks in each other's place the comparison above fails."""

    def swap(state, *, at_the_end):
        if at_the_end:
            tree = packed(take_out(state))
            keys = tree["keys"][0]
            if len(keys) > 2:
                keys[0] = keys[-1]
            engine_kv.put_back(state, tree)
        return state

    pool = make_pool(LIKE_LINGBOT)
    alone = rollout(pool, "a", 5, stay)
    assert not all(map(torch.equal, alone, rollout(pool, "a", 5, swap)))

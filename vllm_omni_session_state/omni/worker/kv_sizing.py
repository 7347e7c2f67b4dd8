"""How large the engine's KV pool is where a device budget bounds the rest of a session.

The engine plans a session's own state on the device for each place of its pool. With a device budget at most
that much of it stays there, so this reserves the budget, and what one session in flight takes beside it, and
leaves the rest to KV. It is decided once, when the model is loaded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from vllm_omni_session_state.manager.manager import SessionStateManager


def preallocate(
    runner: Any, manager: SessionStateManager, original: Callable[..., None], available_bytes: int | None
) -> int:
    """vLLM-Omni's ``_preallocate_kv_cache``, with what is kept for the models' own state taken off before.

    Args:
        runner: vLLM-Omni's, with its pipeline loaded.
        manager: The pipeline's, with a device budget.
        original: vLLM-Omni's own method, bound.
        available_bytes: As vLLM-Omni gives it.

    Returns:
        The bytes that were taken off.
    """
    pipeline = runner.pipeline
    spec = pipeline.ar_diffusion_kv_cache_spec()
    own = int(spec.model_owned_state_bytes_per_session)
    budget = manager.device_budget
    assert budget is not None, "without one vLLM-Omni's plan is right"
    free = runner._available_memory_bytes() if available_bytes is None else available_bytes
    reserved = reserve(own, budget, kv_nbytes=_kv_nbytes(runner, spec))
    left = free - math.ceil(reserved / runner.ar_diffusion_kv_config.gpu_memory_fraction)
    pipeline.ar_diffusion_kv_cache_spec = lambda: dataclasses.replace(
        spec, model_owned_state_bytes_per_session=0
    )
    try:
        original(available_bytes=left)
    finally:
        del pipeline.ar_diffusion_kv_cache_spec  # the class's own is there again
    return reserved


def reserve(own: int, device_budget: int, *, kv_nbytes: int) -> int:
    """Bytes of the device that no KV may take.

    Args:
        own: What a model keeps of one session on the device, as it declares.
        device_budget: What idle sessions may keep there.
        kv_nbytes: KV of one session, which is copied beside the pool when it leaves or comes back.

    Returns:
        The budget, but at least one session; one session in flight; its KV; and the feature map that the VAE
        keeps for itself.
    """
    return max(device_budget, own) + own + kv_nbytes + own


def _kv_nbytes(runner: Any, spec: Any) -> int:
    """KV of one session at most: sink and window of each branch, and cross-attention."""
    config = runner.ar_diffusion_kv_config
    frames = (config.window_chunks or spec.window_frames) + (config.sink_chunks or spec.sink_frames)
    token = 2 * spec.num_layers * spec.head_size * runner.od_config.dtype.itemsize
    heads = spec.cross_attention_kv_heads
    cross = sum(
        length * heads.get(name, spec.num_kv_heads) for name, length in spec.cross_attention_lengths.items()
    )
    window = frames * spec.tokens_per_frame * spec.num_kv_heads
    return int(len(spec.kv_branches) * token * (window + cross))

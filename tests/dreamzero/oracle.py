"""A recount from nothing of what DreamZero's sessions hold: by the fields' names, address by address.

It knows the fields and what each holds; it asks neither the plugin's walk nor its ledger.
"""

from __future__ import annotations

import numpy as np
import torch

ONE_TENSOR = ("clip_feas", "ys", "language", "prompt_embeds", "vae_pending_body_frames")
COUNTERS = ("call_count", "current_start_frame", "vae_stream_initialized")
BUFFERS = ("stitched_buffer", "video_latents_across_time", "vae_encoder_out")
ENGINE = "engine_kv"
ON_HOST = ("stitched_buffer", "video_latents_across_time")


def values(session, *, without=()):
    """Every tensor and array of a session, one by one."""
    known = {*ONE_TENSOR, *COUNTERS, "vae_enc_feat_map"}
    assert set(session.attrs) <= known, f"the oracle does not know {set(session.attrs) - known}"
    assert set(session.objects) <= {*BUFFERS, ENGINE}
    for name in ONE_TENSOR:
        if session.attrs.get(name) is not None and name not in without:
            yield session.attrs[name]
    yield from (entry for entry in session.attrs.get("vae_enc_feat_map") or () if entry is not None)
    for name in BUFFERS:
        buffer = session.get(name)
        if buffer is not None and buffer.resident and name not in without:
            yield from buffer.container
    if ENGINE in session.objects and session.get(ENGINE).resident and ENGINE not in without:
        yield from of_engine(session.get(ENGINE).view())


def of_engine(state):
    """The engine's own blocks of a session, each an extent of the pool, and its cross-attention tensors."""
    cache = state.kv_cache
    for adapter in state.adapters.values():
        for block in cache.block_table(adapter):
            for layer in range(cache.num_layers):
                for page in (cache.key_cache(layer)[block], cache.value_cache(layer)[block]):
                    yield page.data_ptr(), page.numel() * page.element_size()
    for branches in cache._cross_sessions.get(state.session_id, {}).values():
        for keys, values in branches.values():
            yield from (*keys, *values)


def extent(value):
    """First address and length of the memory that a tensor or an array keeps alive."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, torch.Tensor):
        assert value.device.type == "cpu"
        return value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()
    assert isinstance(value, np.ndarray), type(value)
    if isinstance(value.base, np.ndarray | torch.Tensor):
        return extent(value.base)
    assert value.base is None
    return value.ctypes.data, value.nbytes


def reached(values, *more, times=1):
    """Bytes that at least so many of the sessions reach, each given by its values."""
    edges = []
    for session in (values, *more):
        edges += swept({extent(value) for value in session})
    edges.sort()
    nbytes = cover = here = 0
    for address, step in edges:
        nbytes += (address - here) * (cover >= times)
        here, cover = address, cover + step
    return nbytes


def swept(extents):
    """Where the union of some extents begins (1) and where it ends (-1)."""
    edges, stop = [], -1
    for start, size in sorted(extents):
        if start >= stop:
            edges += [(start, 1), (start + size, -1)]
        elif start + size > stop:
            edges[-1] = (start + size, -1)
        stop = max(stop, start + size)
    return edges

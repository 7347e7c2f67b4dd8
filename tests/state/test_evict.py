"""``evict()``: storage only, never staged bytes, and what it returns is what went."""

import gc

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_session_state import LatentBuffer
from vllm_omni_session_state.accounting.footprint import footprint

KEPT_BY = st.sampled_from(["nobody", "a view", "the storage's tensor", "the staged payload"])


@given(st.lists(st.tuples(st.integers(1, 64), KEPT_BY, st.booleans()), max_size=8))
def test_evict_returns_the_bytes_that_are_really_gone(items):
    buffer = LatentBuffer()
    buffer.allocate()
    kept, staged, gone = [], [], 0
    for size, kept_by, as_array in items:
        item = np.ones(size, np.uint8) if as_array else torch.ones(size, dtype=torch.uint8)
        buffer.append(item)
        if kept_by == "a view":
            kept.append(item[:1])
        elif kept_by == "the storage's tensor":
            kept.append(item)
        elif kept_by == "the staged payload":
            staged.append(item)
        else:
            gone += size
        del item
    buffer.stage(staged)
    before = buffer.nbytes
    assert before == sum(size for size, _, _ in items)

    assert buffer.evict() == gone

    assert not buffer.resident
    assert buffer.nbytes == 0
    assert buffer.staged == (staged,)
    assert footprint(buffer.staged).nbytes == sum(size for size, by, _ in items if by == "the staged payload")


def test_evicting_one_alias_frees_nothing_and_the_last_one_frees_it_once():
    first, second = LatentBuffer(), LatentBuffer()
    base = torch.ones(100, dtype=torch.uint8)
    first.replace([base[:10], base[50:]])
    second.replace([base])
    del base
    assert first.evict() == 0
    assert second.evict() == 100


def test_evicting_twice_frees_once():
    buffer = LatentBuffer()
    buffer.replace([torch.ones(8, dtype=torch.uint8)])
    assert buffer.evict() == 8
    assert buffer.evict() == 0


def test_evict_does_not_ask_the_garbage_collector():
    gc.disable()
    try:
        buffer = LatentBuffer()
        buffer.replace([torch.ones(8, dtype=torch.uint8), np.ones(8, np.uint8)])
        assert buffer.evict() == 16
    finally:
        gc.enable()

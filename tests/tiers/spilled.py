"""Chunks to spill, and whether what came back is what was spilled."""

from __future__ import annotations

import torch

from vllm_omni_session_state import LatentBuffer


def chunk(number, *, inference=True):
    """As DreamZero appends one: transposed, bfloat16, an inference tensor."""
    generator = torch.Generator().manual_seed(number)
    with torch.inference_mode(inference):
        made = torch.randn(1, 2 + number % 2, 3, 2, 2, generator=generator)
        return made.to(torch.bfloat16).transpose(1, 2)


def chunks(count, start=0):
    return [chunk(number) for number in range(start, start + count)]


def described(item):
    """Everything of a tensor."""
    storage = torch.empty(0, dtype=torch.uint8).set_(item.untyped_storage())
    layout = (item.dtype, item.shape, item.stride(), item.storage_offset())
    return (*layout, item.requires_grad, item.is_inference(), storage.numpy().tobytes())


def same(items, wanted):
    return list(map(described, items)) == list(map(described, wanted))


def filled(spiller, items, key="robot"):
    """A buffer to which the items came one by one, with a spill after each."""
    buffer = LatentBuffer()
    buffer.allocate()
    for item in items:
        buffer.append(item)
        spiller.spill(key, buffer)
    return buffer

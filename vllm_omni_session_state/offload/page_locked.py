"""Page-locked host memory as torch's caching allocator hands it out: what a block takes, what stays cached.

The rule is that of ``CachingHostAllocator.h`` in torch 2.13. A block is rounded up to a power of two, and one
that is let go of stays for the next block of its size; unless it is larger than what the operator says.
"""

from __future__ import annotations

import os
import re

import torch

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch has its settings from; the first that is set wins."""


def taken_nbytes(nbytes: int) -> int:
    """Bytes of page-locked memory that a block of ``nbytes`` takes."""
    if nbytes > min(_limit("pinned_max_round_threshold_mb"), _limit("pinned_max_cached_size_mb")):
        return nbytes
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def stays_cached(nbytes: int) -> bool:
    """Whether a block of ``nbytes`` stays page-locked when it is let go of."""
    return 0 < nbytes <= _limit("pinned_max_cached_size_mb")


def allocate(nbytes: int) -> torch.Tensor:
    """A block, ``(nbytes,)`` uint8.

    Raises:
        RuntimeError: If vLLM-Omni has no room for it, or there is no accelerator.
    """
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def give_back() -> None:
    """Let go of every cached block of this process, where this torch can; else they stay."""
    of_cuda = getattr(torch._C, "_host_emptyCache", None)  # noqa: SLF001 - it has no public name
    empty = of_cuda or getattr(torch.accelerator, "empty_host_cache", None)
    if empty is not None:
        empty()


def is_used() -> bool:
    """Whether sessions of this process lie on an accelerator, which copies to such memory."""
    return torch.accelerator.is_available()


def _limit(name: str) -> float:
    conf = next((os.environ[each] for each in _VARIABLES if each in os.environ), "")
    found = re.search(rf"{name}\s*:\s*([0-9]+)", conf)
    return float("inf") if found is None else int(found[1]) << 20

"""Copies of storages between pools, fenced: when a call returns, the copies hold the bytes.

The only file that names a stream. On an accelerator the copies of one call run on a stream of their own,
after everything that the current stream has queued, and the call waits for them once, at the end.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from itertools import accumulate

import torch

from vllm_omni_session_state.offload import page_locked

ALIGNMENT = 512
"""Bytes to which each storage's place in a slab is rounded up, as allocators on accelerators do."""

_HUGE = 2 << 20
"""Bytes of a huge page, and what its address is a multiple of."""


def on_accelerator(storages: Sequence[torch.UntypedStorage]) -> bool:
    """Whether one of them is not in host memory: copies of these are fast to page-locked memory only."""
    return any(storage.device.type != "cpu" for storage in storages)


def slab_nbytes(sizes: Sequence[int], *, pinned: bool = False) -> int:
    """Bytes that the slab for storages of these sizes takes; all of them are in it, used or not.

    Args:
        sizes: In bytes.
        pinned: Whether it is page-locked.
    """
    nbytes = _places(sizes)[-1]
    return page_locked.taken_nbytes(nbytes) if pinned else nbytes


def to_slab(storages: Sequence[torch.UntypedStorage], *, pinned: bool = False) -> torch.Tensor:
    """Copy storages into one new slab of host memory, one after the other.

    Args:
        storages: On an accelerator or in host memory.
        pinned: Whether the slab is page-locked.

    Returns:
        The slab, ``(slab_nbytes(sizes, pinned=pinned),)``, uint8.

    Raises:
        MemoryError: If vLLM-Omni has no room for it; nothing has changed.
    """
    sizes = [storage.nbytes() for storage in storages]
    nbytes = slab_nbytes(sizes, pinned=pinned)
    try:
        slab = page_locked.allocate(nbytes) if pinned else host_memory(nbytes)
    except RuntimeError as error:
        raise MemoryError(f"no host memory for {nbytes} bytes: {error}") from error
    _copy([(_bytes(storage), part) for storage, part in zip(storages, parts(slab, sizes), strict=True)])
    return slab


def parts(slab: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Each storage's bytes in a slab, by reference: uint8, ``(size,)``."""
    return [slab[start : start + size] for start, size in zip(_places(sizes), sizes, strict=False)]


def from_slab(
    slab: torch.Tensor, sizes: Sequence[int], devices: Sequence[torch.device]
) -> list[torch.UntypedStorage]:
    """Copy storages out of a slab into new ones.

    Args:
        slab: From ``to_slab()``; unharmed.
        sizes: Of the storages in bytes, in their order.
        devices: Where each of the new storages lies.

    Raises:
        MemoryError: If a device has no room for them; nothing has changed.
    """
    return _copied(parts(slab, sizes), devices)


def from_host(
    storages: Sequence[torch.UntypedStorage], devices: Sequence[torch.device]
) -> list[torch.UntypedStorage]:
    """Storages of host memory where they belong: one of vLLM-Omni is handed on as it is.

    Args:
        storages: Nobody else's.
        devices: Where each of the returned storages lies.

    Raises:
        MemoryError: If a device has no room for them; nothing has changed.
    """
    away = [index for index, device in enumerate(devices) if device.type != "cpu"]
    copied = _copied([_bytes(storages[index]) for index in away], [devices[index] for index in away])
    there = dict(zip(away, copied, strict=True))
    return [there.get(index, storage) for index, storage in enumerate(storages)]


def _copied(sources: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> list[torch.UntypedStorage]:
    sizes = [len(source) for source in sources]
    try:
        new = [
            torch.empty(size, dtype=torch.uint8, device=device)
            for size, device in zip(sizes, devices, strict=True)
        ]
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        where = ", ".join(sorted({str(device) for device in devices}))
        raise MemoryError(f"no memory on {where} for {sum(sizes)} bytes: {error}") from error
    _copy(list(zip(sources, new, strict=True)))
    return [tensor.untyped_storage() for tensor in new]


def host_memory(nbytes: int) -> torch.Tensor:
    """New pageable memory of which every byte is about to be written, ``(nbytes,)`` uint8.

    It is torch's own, as a model's tensors are: a storage of it can be resized.

    Raises:
        RuntimeError: If vLLM-Omni has no room for it.
    """
    block = torch.empty(nbytes, dtype=torch.uint8)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        # Each page is written once, and the fault that brings it takes several times as long as its bytes do.
        first = -(-block.data_ptr() // _HUGE) * _HUGE
        length = (block.data_ptr() + nbytes) // _HUGE * _HUGE - first
        if length > 0:  # a kernel without huge pages refuses, and small ones do
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice)
    return block


def host_storages(sizes: Sequence[int]) -> list[torch.UntypedStorage]:
    """New storages of these sizes in pageable memory, of which every byte is about to be written.

    Raises:
        MemoryError: If the machine has no room for them.
    """
    try:
        return [host_memory(size).untyped_storage() for size in sizes]
    except RuntimeError as error:
        raise MemoryError(f"no host memory for {sum(sizes)} bytes: {error}") from error


def _places(sizes: Sequence[int]) -> list[int]:
    """Where each storage begins in a slab, and where the last one ends."""
    return [*accumulate([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes], initial=0)]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    # A fresh, ordinary tensor over the storage: whether its own tensors are inference tensors is no matter.
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    away = [tensor.device for pair in pairs for tensor in pair if tensor.device.type != "cpu"]
    if not away:
        for source, target in pairs:
            target.copy_(source)
        return
    here = torch.accelerator.current_stream(away[0])
    stream = torch.Stream(away[0])
    stream.wait_stream(here)
    with stream:
        for source, target in pairs:
            target.copy_(source, non_blocking=True)
    stream.synchronize()  # a copy is fenced before its source is let go

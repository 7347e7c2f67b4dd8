"""The memory of arrays and of storages: whose it is, where it is, and whether somebody still has it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from vllm_omni_session_state.accounting.footprint import StridedView
from vllm_omni_session_state.offload import slots

Array = np.ndarray[Any, Any]

Memory = torch.UntypedStorage | Array
"""What has memory of its own, or shows another's."""


def owner_of(array: Array) -> Memory | None:
    """Whose the memory is that an array shows: an array's, itself or another one, or a tensor's storage.

    An array over ``bytes`` counts as their owner: they are the same for ever, whoever else has them.

    Returns:
        The owner; ``None`` where something of another kind has the memory: a buffer, a file.
    """
    owner = array
    while True:
        base: Any = owner.base
        while type(base) in (StridedView, memoryview):
            base = base.obj if type(base) is memoryview else base.base
        if base is None or type(base) is bytes:
            return owner
        if type(base) is torch.Tensor and base.is_cpu and slots.is_own(base.untyped_storage()):
            return base.untyped_storage()
        if type(base) is not np.ndarray:
            return None
        owner = base


def has_own(array: Array) -> bool:
    """Whether an array has memory of its own that its elements fill."""
    return array.flags.owndata and array.size > 0 and extent(array)[1] == array.nbytes


def extent(array: Array) -> tuple[int, int]:
    """Address and length in bytes of the memory that an array's elements span."""
    start = stop = array.__array_interface__["data"][0]
    if not array.size:
        return start, 0
    for size, stride in zip(array.shape, array.strides, strict=True):
        reach = (size - 1) * stride
        start, stop = start + min(reach, 0), stop + max(reach, 0)
    return start, stop + array.itemsize - start


def memory_of(owner: Memory) -> Array:
    """The memory of a storage in host memory, or that an array's elements span: uint8, ``(nbytes,)``.

    ``Tensor.numpy()`` would do for a storage, but for ever after it could not be resized.
    """
    if isinstance(owner, np.ndarray):
        start, nbytes = extent(owner)
    else:
        start, nbytes = owner.data_ptr(), owner.nbytes()
    if not nbytes:
        return np.empty(0, np.uint8)
    interface = {"data": (start, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
    return np.asarray(StridedView(interface, base=owner))


def bytes_of(tensor: torch.Tensor) -> Array:
    """A tensor's elements as uint8, ``(nbytes,)``; of a contiguous one in host memory it is no copy."""
    whole = tensor.detach().cpu().contiguous()
    start = whole.storage_offset() * whole.element_size()
    return memory_of(whole.untyped_storage())[start : start + whole.nbytes]


def weakly(memory: Memory) -> Callable[[], Memory | None]:
    """A way to get a storage or an array back if, by then, somebody else holds it."""
    if not isinstance(memory, torch.UntypedStorage):
        return weakref.ref(memory)
    reference = StorageWeakRef(memory)  # type: ignore[no-untyped-call]
    again = torch.UntypedStorage._new_with_weak_ptr  # noqa: SLF001 - the only way
    return lambda: cast("torch.UntypedStorage | None", again(reference.cdata))

"""The memory of tensors and arrays: whose it is, where it is, whether bytes are all that a tensor is."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from operator import mul
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from vllm_omni_session_state.accounting.allocations import HOST, PINNED, Allocation
from vllm_omni_session_state.accounting.footprint import StridedView

Array = np.ndarray[Any, Any]

Memory = torch.UntypedStorage | Array
"""What has memory of its own, or shows another's."""

Span = tuple[str, int, int]
"""What memory is known by: device, address of its first byte, length in bytes."""


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
        if type(base) is torch.Tensor and base.is_cpu and is_own(base.untyped_storage()):
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


def views_of(pieces: Iterable[Memory | torch.Tensor]) -> list[memoryview]:
    """The bytes of memory of the host, and of contiguous uint8 tensors there; by reference."""
    views = []
    for piece in pieces:
        if isinstance(piece, torch.Tensor):
            start = int(piece.storage_offset())
            views.append(memory_of(piece.untyped_storage())[start : start + piece.nbytes].data)
        else:
            views.append(memory_of(piece).data)
    return views


def let_go(memory: dict[int, Memory]) -> dict[int, Memory]:
    """Empty a dict of memory; returns what of it somebody else still holds."""
    weak: dict[int, Any] = {
        number: weakref.ref(each) if isinstance(each, np.ndarray) else StorageWeakRef(each)  # type: ignore[no-untyped-call]
        for number, each in memory.items()
    }
    memory.clear()
    again = torch.UntypedStorage._new_with_weak_ptr  # noqa: SLF001 - the only way
    held = {
        number: again(each.cdata) if isinstance(each, StorageWeakRef) else each()
        for number, each in weak.items()
    }
    return {number: each for number, each in held.items() if each is not None}


def elements_end(offset: int, size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements that a storage must have for a tensor of that layout."""
    return 0 if 0 in size else offset + sum(map(mul, size, stride)) - sum(stride) + 1


def more_than_bytes(value: torch.Tensor) -> str:  # noqa: C901, PLR0911 - a reason, a line
    """What a tensor is or has that its layout and its bytes would not bring back; ``""`` if nothing is."""
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        return "its elements are not all that it is made of"
    if value.grad_fn is not None or value.grad is not None:
        return "it has a graph or a gradient"
    if value._backward_hooks or value._post_accumulate_grad_hooks:  # noqa: SLF001 - there is no other way
        return "it has hooks"
    if vars(value):
        return "it has attributes"
    if value.is_conj() or value.is_neg() or value._is_zerotensor():  # noqa: SLF001 - as above
        return "its bytes are not its elements"
    if value.requires_grad and getattr(value, "grad_dtype", None) not in (None, value.dtype):
        return "its gradients are of another type than it is"
    try:
        storage = value.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):  # a wrapper or a fake: a shape without memory
        return "it has no memory of its own"
    if value.is_meta or (nbytes and not address):
        return f"it has no memory on {value.device}"
    if elements_end(int(value.storage_offset()), value.shape, value.stride()) * value.itemsize > nbytes:
        return f"its storage was cut to {nbytes} bytes"
    if nbytes and value.is_cpu and value.is_pinned():
        return "its memory is page-locked"
    if nbytes and not is_own(storage):
        return "its memory is not its own: an array, a buffer, a process or a file has it"
    return ""


def is_own(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is the only one of its memory, which goes when it goes."""
    if storage.device.type != "cpu":
        return storage.resizable()
    if storage.is_shared():
        return False
    if storage.resizable():
        return True
    # It may have been so: numpy() ends it. Torch itself knows, for it clones lazily only what is its own.
    with torch.inference_mode(False), contextlib.suppress(RuntimeError):
        torch.empty(0, dtype=torch.uint8).set_(storage)._lazy_clone()  # noqa: SLF001 - as above
        return True
    return False


def entangled(spans: Iterable[Span], taken: Iterable[Allocation]) -> set[Span]:
    """Those of some spans that overlap another of them, in part or in whole, or memory that is taken."""
    every = [(device, start, nbytes, True) for device, start, nbytes in set(spans)]
    every += [(HOST if device == PINNED else device, start, nbytes, False) for device, start, nbytes in taken]
    found: set[Span] = set()
    group: list[Span] = []
    count, where, stop = 0, "", 0
    for device, start, nbytes, ours in sorted(every):
        if device != where or start >= stop:
            group, count, where, stop = [], 0, device, start
        count, stop = count + 1, max(stop, start + nbytes)
        if ours:
            group.append((device, start, nbytes))
        if count > 1:
            found.update(group)
            group.clear()
    return found

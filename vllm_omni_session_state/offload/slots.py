"""A tensor without its bytes: what is noted of one whose storage goes elsewhere, and which are more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vllm_omni_session_state.accounting.allocations import HOST, PINNED, Allocation

Span = tuple[str, int, int]
"""What a storage is known by: device, address of its first byte, length in bytes."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where a tensor stood: all of it but its bytes.

    Attributes:
        storage: Index of its storage.
        dtype: Its element type.
        offset: First element, counted in elements from the start of the storage.
        size: Its shape.
        stride: Its strides in elements.
        requires_grad: As it was.
        inference: Whether it was an inference tensor; one that is not recompiles compiled code.
        resizable: Whether its storage can be resized, which ends with the first ``numpy()``.
    """

    storage: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    inference: bool
    resizable: bool

    def fits(self, nbytes: int) -> bool:
        """Whether a storage of so many bytes has all of its elements."""
        if 0 in self.size:
            return True
        reach = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True)) + 1
        return (self.offset + reach) * self.dtype.itemsize <= nbytes


def slot_of(tensor: torch.Tensor, storage: int) -> TensorSlot:
    """Where a plain tensor stands in the storage of that number."""
    return TensorSlot(
        storage=storage,
        dtype=tensor.dtype,
        offset=int(tensor.storage_offset()),
        size=tuple(tensor.size()),
        stride=tuple(tensor.stride()),
        requires_grad=tensor.requires_grad,
        inference=tensor.is_inference(),
        resizable=tensor.untyped_storage().resizable(),
    )


def more_than_a_slot(value: torch.Tensor) -> str:  # noqa: PLR0911 - a reason, a line
    """What a tensor is or has that its slot and its bytes would not bring back; ``""`` where that is all."""
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
    return _more_than_bytes(value, storage, address, nbytes)


def _more_than_bytes(value: torch.Tensor, storage: torch.UntypedStorage, address: int, nbytes: int) -> str:
    if value.is_meta or (nbytes and not address):
        return f"it has no memory on {value.device}"
    if not slot_of(value, 0).fits(nbytes):
        return f"its storage was cut to {nbytes} bytes"
    if not nbytes:
        return ""
    if value.is_cpu and value.is_pinned():
        return "its memory is page-locked"
    return (
        "" if is_own(storage) else "its memory is not its own: an array, a buffer, a process or a file has it"
    )


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


def span_of(storage: torch.UntypedStorage) -> Span:
    """Where a storage lies."""
    return str(storage.device), storage.data_ptr(), storage.nbytes()


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

"""Taking a tree of values apart into a skeleton and the storages that its tensors live in, and back.

What comes back is what left: dtype, shape, strides, offset, aliasing between tensors, shared containers,
container kinds, ``requires_grad`` and ``is_inference()``. The storages are handed out as they are; whoever
moves them gives others of the same bytes to ``unpack()``.

A value that cannot be taken apart (a tensor with a graph or of another layout, an object, a container of
another kind) stays in the skeleton as it is, with whatever it holds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from vllm_omni_session_state.chunks import Chunks

_DEPTH = 100
"""Levels of nesting that are taken apart; what lies deeper stays whole. It bounds the recursion."""


Storages = Sequence[torch.UntypedStorage] | Mapping[int, torch.UntypedStorage]
"""Storages by the index that slots name them by."""

_CONTAINERS = (list, deque, dict, tuple)


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
    """

    storage: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    inference: bool


@dataclass(frozen=True, slots=True)
class Whole:
    """A container that was not taken apart, to be handed back as it is."""

    value: Any


@dataclass(frozen=True, slots=True)
class Packed:
    """A tree taken apart.

    Attributes:
        skeleton: The tree with a ``TensorSlot`` for each tensor; containers are copies.
        storages: What the slots' indices name, each once.
    """

    skeleton: Any
    storages: list[torch.UntypedStorage]


def pack(
    tree: object,
    *,
    take: Callable[[torch.UntypedStorage], bool] = lambda _: True,
    first: int = 0,
    known: Mapping[int, torch.UntypedStorage] = MappingProxyType({}),
) -> Packed:
    """Take a tree apart; the tree itself is left as it is.

    Args:
        tree: Nested dicts, lists, tuples, deques and values.
        take: Whether a storage is to be taken out; tensors of others stay in the skeleton.
        first: The index of the first storage that is taken out here, where others come before it.
        known: Storages among those others, by index, in which tensors of this tree may lie too.
    """
    walk = _Packing(take, first, known)
    return Packed(walk.visit(tree, 0), walk.storages)


def unpack(skeleton: Any, storages: Storages) -> Any:
    """Put a tree together again.

    Args:
        skeleton: From ``pack()``; unharmed, so that a failed attempt can be made again.
        storages: One for each that ``pack()`` took out, of the same length in bytes.
    """
    return _Unpacking(storages).visit(skeleton)


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
    )


class _Packing:
    def __init__(
        self,
        take: Callable[[torch.UntypedStorage], bool],
        first: int,
        known: Mapping[int, torch.UntypedStorage],
    ) -> None:
        self.take = take
        self.storages: list[torch.UntypedStorage] = []
        self._first = first
        self._index = {storage.data_ptr(): index for index, storage in known.items()}
        self._done: dict[int, Any] = {}
        self._held: list[object] = []  # so that no id is used twice meanwhile

    def visit(self, value: Any, depth: int) -> Any:
        if id(value) in self._done:
            return self._done[id(value)]
        if type(value) is torch.Tensor:
            packed = self._tensor(value)
        elif depth >= _DEPTH:
            packed = Whole(value) if isinstance(value, _CONTAINERS) else value
        else:
            packed = self._container(value, depth + 1)
        self._done[id(value)] = packed
        self._held.append(value)
        return packed

    def _container(self, value: Any, depth: int) -> Any:
        kind: Any = list if type(value) is Chunks else type(value)
        if kind in (list, deque, dict, OrderedDict):
            # Known before its items are looked at: it may hold itself.
            copy: Any = deque(maxlen=value.maxlen) if kind is deque else kind()
            self._done[id(value)] = copy
            if kind in (dict, OrderedDict):
                copy.update((key, self.visit(item, depth)) for key, item in value.items())
            else:
                copy.extend(self.visit(item, depth) for item in value)
            return copy
        if kind is tuple:
            return tuple(self.visit(item, depth) for item in value)
        return value

    def _tensor(self, value: torch.Tensor) -> Any:
        if value.layout is not torch.strided or value.grad_fn is not None or value.grad is not None:
            return value
        if value.is_quantized or value.is_nested or value.is_conj() or value.is_neg() or vars(value):
            return value
        try:
            storage = value.untyped_storage()
            address = storage.data_ptr()
        except (NotImplementedError, RuntimeError):  # a wrapper or a fake: a shape without memory
            return value
        if not storage.nbytes() or not address or not self.take(storage):
            return value
        if address not in self._index:
            self._index[address] = self._first + len(self.storages)
            self.storages.append(storage)
        return slot_of(value, self._index[address])


class _Unpacking:
    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._done: dict[int, Any] = {}

    def visit(self, packed: Any) -> Any:
        if id(packed) in self._done:
            return self._done[id(packed)]
        kind = type(packed)
        if kind is TensorSlot:
            value: Any = self._tensor(packed)
        elif kind is Whole:
            value = packed.value
        elif kind in (list, deque, dict, OrderedDict):
            value = deque(maxlen=packed.maxlen) if kind is deque else kind()
            self._done[id(packed)] = value
            if kind in (dict, OrderedDict):
                value.update((key, self.visit(item)) for key, item in packed.items())
            else:
                value.extend(self.visit(item) for item in packed)
        elif kind is tuple:
            value = tuple(self.visit(item) for item in packed)
        else:
            value = packed
        self._done[id(packed)] = value
        return value

    def _tensor(self, slot: TensorSlot) -> torch.Tensor:
        storage = self._storages[slot.storage]
        with torch.inference_mode(slot.inference):
            tensor = torch.empty(0, dtype=slot.dtype, device=storage.device)
            tensor.set_(storage, slot.offset, slot.size, slot.stride)
            if slot.requires_grad:  # of an inference tensor it can be set nowhere else
                tensor.requires_grad_(True)
        return tensor

"""Values from their nodes: what ``pack()`` took apart, or what a file says, which nobody has to trust.

What a file says is checked before it is used, and nothing in it is executed: a part that is not there, a
tensor that leaves its storage, a key that would take for ever to hash are a ``BadFileError``.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from operator import mul
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_omni_session_state.base.errors import BadFileError, NotWritableError
from vllm_omni_session_state.offload import schema
from vllm_omni_session_state.offload.memory import Array, memory_of
from vllm_omni_session_state.offload.pack import Packed
from vllm_omni_session_state.offload.registered import MOST_DEEP, registered
from vllm_omni_session_state.offload.schema import READERS, Part, Tree

KEY_WEIGHT = 1000
"""Values that a dict's key may consist of: hashing is recursive, and so is what it costs."""

Storages = Sequence[torch.UntypedStorage | None] | Mapping[int, torch.UntypedStorage]
"""Storages by their numbers."""

_SHELLS: dict[type, Any] = {schema.List: list, schema.Dict: dict, schema.ODict: OrderedDict}
"""Containers that are made empty and filled later, so that they may hold themselves."""

_TREE = msgspec.json.Decoder(Tree)


def unpack(
    tree: Tree,
    storages: Storages,
    *,
    owners: Mapping[int, Array] = MappingProxyType({}),
    trial: bool = False,
) -> Any:
    """Put a tree together.

    Args:
        tree: From ``pack()``, or from anywhere; unharmed, so that a failed attempt can be made again.
        storages: Those that it names; tensors and arrays take them over.
        owners: Arrays whose memory is to be shown in place of such a storage, by its number.
        trial: Whether the storages are somebody else's and the result is thrown away. One that is ``None``
            is not looked at.

    Raises:
        BadFileError: If the tree says what cannot be, or does not go with the storages.
        MemoryError: If the machine has no room.
    """
    try:
        return _Unpacking(storages, owners, trial=trial).table(tree, 0)
    except (BadFileError, MemoryError):
        raise
    except Exception as error:  # of torch, NumPy or an adapter: whatever they say of a wrong word
        raise BadFileError(f"a value cannot be made: {error!r:.200}") from error


def prove(packed: Packed, before: int = 0) -> None:
    """Read what is to be written, by the function that will read it: what goes into a file comes out again.

    Args:
        packed: From ``pack_whole()``.
        before: How many storages come before its own.

    Raises:
        NotWritableError: If it could not be read.
    """
    try:
        tree = _TREE.decode(msgspec.json.encode(packed.tree))
        unpack(tree, [*[None] * before, *packed.storages], trial=True)
    except (BadFileError, msgspec.ValidationError) as error:
        why = error.why if isinstance(error, BadFileError) else str(error)
        raise NotWritableError("", "its content", why=f"it could not be read again: {why}") from error


class _Unpacking:
    def __init__(self, storages: Storages, owners: Mapping[int, Array], *, trial: bool) -> None:
        self._storages = storages
        self._memories = {number: memory_of(owner) for number, owner in owners.items()}
        self._trial = trial

    def table(self, tree: Tree, depth: int) -> Any:  # noqa: C901 - a kind, a line
        if depth > MOST_DEEP:
            raise BadFileError("registered values stand too deep in each other")
        nodes: list[Any] = tree.nodes
        built: list[Any] = [None] * len(nodes)
        later = []
        for number, node in enumerate(nodes):
            kind = type(node)
            if kind in _SHELLS:
                built[number] = _SHELLS[kind]()
            elif kind is schema.Tensor:
                built[number] = self._tensor(node)
            elif kind is schema.Deque:
                built[number] = deque(maxlen=node.maxlen)
            elif kind is schema.Leaf:
                built[number] = _part(node.part, built)
            elif kind is schema.Stay:
                built[number] = node.kept
            elif kind is schema.Array and node.how == "own":  # others may show its memory
                built[number] = self._array(node)
            elif kind is not schema.Tuple:
                later.append(number)
        for number in later:
            node = nodes[number]
            built[number] = self._array(node) if type(node) is schema.Array else self._registered(node, depth)
        weights = _build_tuples(nodes, built)
        for number, node in enumerate(nodes):
            if type(node) in _SHELLS or type(node) is schema.Deque:
                _fill(built[number], node, built, weights)
        return _part(tree.root, built)

    def _tensor(self, node: schema.Tensor) -> torch.Tensor | None:
        storage: Any = self._storages[node.storage]
        if storage is None:  # of a trial
            return None
        dtype = getattr(torch, node.dtype)
        if len(node.size) != len(node.stride) or math.prod(node.size) >= 2**63:
            raise BadFileError("a tensor's shape is none")
        if node.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            raise BadFileError("its type takes no gradients")
        last = node.offset + sum(map(mul, node.size, node.stride)) - sum(node.stride)
        if 0 not in node.size and (last + 1) * dtype.itemsize > storage.nbytes():
            raise BadFileError("a tensor leaves its storage")
        with torch.inference_mode(node.inference):
            tensor = torch.empty(0, dtype=dtype, device=storage.device)
            tensor.set_(storage, node.offset, node.size, node.stride)
            if node.requires_grad:  # of an inference tensor it can be set nowhere else
                tensor.requires_grad_(True)
        if not node.resizable and storage.device.type == "cpu":
            torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # it was this that made it so
        return tensor

    def _array(self, node: schema.Array) -> Array:
        dtype = schema.array_type(node.dtype)
        count, nbytes = math.prod(node.size), self._nbytes(node.storage)
        if len(node.size) != len(node.strides) or count >= 2**63:
            raise BadFileError("an array's shape is none")
        low = high = node.first
        for size, step in zip(node.size, node.strides, strict=True):
            low, high = low + min(0, (size - 1) * step), high + max(0, (size - 1) * step)
        if count and (low < 0 or high + dtype.itemsize > nbytes):
            raise BadFileError("an array leaves its memory")
        if node.how == "own" and count * dtype.itemsize != nbytes:
            raise BadFileError("an array does not fill the memory that it has")
        new = node.storage not in self._memories
        memory = self._memory(node.storage, node.how)
        array: Array = np.ndarray(node.size, dtype, buffer=memory, offset=node.first, strides=node.strides)
        if new and node.how == "own" and not self._trial:
            array = array.copy(order="K")
            self._memories[node.storage] = memory_of(array)
        array.flags.writeable = node.writeable
        return array

    def _nbytes(self, number: int) -> int:
        if number in self._memories:
            return self._memories[number].nbytes
        storage = self._storages[number]
        assert storage is not None, "only tensors of a tree that this one begins with lie there"
        return storage.nbytes()

    def _memory(self, number: int, how: str) -> Array:
        """A storage's memory for the arrays that show it; NumPy's own, but for those over tensors."""
        if number not in self._memories:
            storage = self._storages[number]
            assert storage is not None, "as above"
            memory = memory_of(storage)
            if how == "tensor" and not self._trial:
                memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self._memories[number] = memory.copy() if how == "view" and not self._trial else memory
        return self._memories[number]

    def _registered(self, node: schema.Registered, depth: int) -> object:
        if node.name not in registered:
            raise BadFileError(f"type {node.name!a:.60} is not registered here")
        tree = self.table(node.tree, depth + 1)
        # Of a content that it does not own an adapter gets a copy: it may build it in.
        return registered[node.name].from_tree(copy.deepcopy(tree) if self._trial else tree)


def _part(part: Part, built: Sequence[Any]) -> Any:
    return built[part] if type(part) is int else READERS[type(part)](part) if type(part) in READERS else part


def _build_tuples(nodes: Sequence[Any], built: list[Any]) -> dict[int, int]:
    """Make the tuples, each after those that it holds; returns of how many values each consists."""
    weights: dict[int, int] = {}
    stack = [number for number, node in enumerate(nodes) if type(node) is schema.Tuple]
    opened = set()
    while stack:
        number = stack[-1]
        parts = nodes[number].parts
        inner = {part for part in parts if type(part) is int and type(nodes[part]) is schema.Tuple}
        if number in weights:
            stack.pop()
        elif inner <= weights.keys():
            built[stack.pop()] = tuple([_part(part, built) for part in parts])
            weights[number] = 1 + sum([weights.get(part, 1) if type(part) is int else 1 for part in parts])
        elif number in opened:
            raise BadFileError("tuples hold each other")
        else:
            opened.add(number)
            stack += inner - weights.keys()
    return weights


def _fill(shell: Any, node: Any, built: Sequence[Any], weights: Mapping[int, int]) -> None:
    values = [_part(part, built) for part in node.parts]
    if not isinstance(shell, dict):
        if isinstance(shell, deque) and shell.maxlen is not None and len(values) > shell.maxlen:
            raise BadFileError("a deque leaves its bound")
        shell.extend(values)
        return
    keys = [key for key in node.parts[::2] if type(key) is int]
    if keys and max([weights.get(key, 1) for key in keys]) > KEY_WEIGHT:
        raise BadFileError("a dict's key is too large")
    shell.update(zip(values[::2], values[1::2], strict=True))
    if len(shell) != len(values) // 2:
        raise BadFileError("a dict has a key twice, or one without a value")

"""A skeleton from its document: every word is checked before it is used, and nothing in it is executed.

What ``skeleton.write()`` would not have written is a ``BadFileError``: an unknown kind, a part that is not
there, a tensor that leaves its storage, a nest that is too deep to be put together.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from vllm_omni_session_state.base.errors import BadFileError, NotWritableError
from vllm_omni_session_state.offload import scalars
from vllm_omni_session_state.offload.arrays import Array, memory_of
from vllm_omni_session_state.offload.pack import Whole, unpack
from vllm_omni_session_state.offload.slots import TensorSlot
from vllm_omni_session_state.offload.tree_spec import (
    KEY_WEIGHT,
    REGISTERED_DEPTH,
    VERSION,
    Written,
    registered,
)

_DEPTH = 200
"""Levels of containers that a skeleton may have, twice what ``pack()`` makes: ``unpack()`` is recursive."""

_CONTAINERS = (list, tuple, dict, OrderedDict, deque)

_SHELLS: dict[str, type] = {"list": list, "dict": dict, "odict": OrderedDict, "deque": deque}
"""Containers that can be made empty and filled later: their parts may come after them."""

_WORDS = {
    "list": 0,
    "tuple": 0,
    "dict": 0,
    "odict": 0,
    "deque": 1,
    "whole": 0,
    "slot": 8,
    "tensor": 10,
    "array": 7,
    "registered": 2,
}
"""The kinds of nodes, each with the number of words that follow its parts."""


def read(
    document: Any,
    storages: Sequence[torch.UntypedStorage],
    *,
    owners: Mapping[int, Array] = MappingProxyType({}),
    trial: bool = False,
) -> Any:
    """The skeleton of a document.

    Args:
        document: From ``skeleton.write()``, or from anywhere.
        storages: The session's, then those of the document's arrays and whole tensors, in host memory.
            Arrays and whole tensors take them over; slots name them by number.
        owners: Arrays whose memory is to be shown in place of such a storage, by its number.
        trial: Whether the storages are somebody else's and the result is thrown away.

    Raises:
        BadFileError: If the document is not one, or does not go with the storages; nothing was used.
    """
    _want(isinstance(document, dict), "the document is no object")
    _want(document.get("version") == VERSION, f"its version is not {VERSION}")
    own = document.get("storages")
    _want(scalars.is_count(own) and own <= len(storages), "it names more storages than there are")
    reading = _Reading(storages, own, owners, trial=trial)
    skeleton = reading.table(document, depth=0)
    _measure(skeleton, 0, set())
    return skeleton


def prove(written: Written, storages: Sequence[torch.UntypedStorage]) -> None:
    """Read what was written, by the function that will read it: what goes into a file comes out again.

    Args:
        written: From ``skeleton.write()``.
        storages: The session's, as they are.

    Raises:
        NotWritableError: If it could not be read.
    """
    try:
        read(written.document, [*storages, *written.extra], trial=True)
    except BadFileError as error:
        raise NotWritableError("", "its content", why=f"it could not be read again: {error.why}") from error


def _want(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise BadFileError(otherwise)


class _Reading:
    def __init__(
        self,
        storages: Sequence[torch.UntypedStorage],
        own: int,
        owners: Mapping[int, Array],
        *,
        trial: bool,
    ) -> None:
        self._storages = storages
        self._memories = {number: memory_of(owner) for number, owner in owners.items()}
        self._trial = trial
        self._sizes = [storage.nbytes() for storage in storages]
        self._own = own

    def table(self, table: Any, *, depth: int) -> Any:
        _want(depth <= REGISTERED_DEPTH, "registered values stand too deep in each other")
        nodes = _nodes_of(table)
        built = [self._shell(kind, words) for kind, _, *words in nodes]
        weights = [1] * len(nodes)

        def part(written: Any, before: int) -> Any:
            if type(written) is not int:
                try:
                    return scalars.read_scalar(written)
                except ValueError as error:
                    raise BadFileError(str(error)) from error
            _want(0 <= written < len(nodes), "a node is named that is not there")
            _want(written < before or nodes[written][0] in _SHELLS, "a node is used before it is made")
            return built[written]

        for number in sorted(range(len(nodes)), key=lambda each: not _owns(nodes[each])):
            kind, written, *words = nodes[number]
            if kind not in _SHELLS:
                built[number] = self._make(kind, [part(each, number) for each in written], words, depth)
            if kind == "tuple":
                weights[number] += sum(weights[each] if type(each) is int else 1 for each in written)
        for number, (kind, written, *_) in enumerate(nodes):
            if kind in _SHELLS:
                parts = [part(each, len(nodes)) for each in written]
                keys = written[::2] if kind in ("dict", "odict") else []
                light = all(weights[key] <= KEY_WEIGHT for key in keys if type(key) is int)
                _want(light, "a dict's key is too large")
                _fill(built[number], parts)
        return part(table["root"], len(nodes))

    def _shell(self, kind: str, words: list[Any]) -> Any:
        if kind != "deque":
            return _SHELLS[kind]() if kind in _SHELLS else None
        _want(words[0] is None or scalars.is_count(words[0]), "a deque's bound is no number")
        return deque(maxlen=words[0])

    def _make(self, kind: str, parts: list[Any], words: list[Any], depth: int) -> Any:
        if kind == "tuple":
            return tuple(parts)
        if kind == "whole":
            _want(len(parts) == 1, "a whole value is not one")
            return Whole(parts[0])
        _want(not parts, f"a {kind} has parts")
        try:
            if kind == "slot":
                return self._slot(words, range(self._own))
            if kind == "tensor":
                return self._tensor(words)
            return self._array(words) if kind == "array" else self._registered(words, depth)
        except BadFileError:
            raise
        except Exception as error:  # of torch, NumPy or an adapter: whatever they say of a wrong word
            raise BadFileError(f"a {kind} cannot be made: {error!r:.200}") from error

    def _slot(self, words: list[Any], among: range) -> TensorSlot:
        number, name, offset, size, stride, *flags = words
        requires_grad, inference, resizable = flags
        _want(scalars.is_count(number) and number in among, "a tensor's storage is not there")
        dtype = scalars.named_dtype(name)
        _want(_counts(size) and _counts(stride) and len(size) == len(stride), "a tensor's shape is none")
        _want(len(size) <= 64 and _product(size) < 2**63, "a tensor is too large")
        _want(all(type(flag) is bool for flag in flags), "a tensor's flags are none")
        _want(not requires_grad or dtype.is_floating_point or dtype.is_complex, "its type takes no gradients")
        _want(scalars.is_count(offset), "a tensor's offset is none")
        layout = (offset, tuple(size), tuple(stride))
        slot = TensorSlot(number, dtype, *layout, requires_grad, inference, resizable)
        _want(slot.fits(self._sizes[number]), "a tensor leaves its storage")
        return slot

    def _tensor(self, words: list[Any]) -> torch.Tensor:
        slot = self._slot(words[:8], range(self._own, len(self._storages)))
        device = scalars.read_device(words[8], words[9])
        storage = self._storages[slot.storage]
        if device.type != "cpu":
            _want(not storage.nbytes(), "a tensor of another device has elements")
            storage = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        tensor: torch.Tensor = unpack(slot, {slot.storage: storage})
        return tensor

    def _array(self, words: list[Any]) -> np.ndarray[Any, Any]:
        number, name, first, shape, strides, writeable, how = words
        _want(
            scalars.is_count(number) and self._own <= number < len(self._storages),
            "an array's memory is not there",
        )
        dtype = scalars.named_array_type(name)
        _want(_counts(shape) and len(shape) <= 64 and _product(shape) < 2**63, "an array's shape is none")
        steps_fit = isinstance(strides, list) and all(
            type(step) is int and abs(step) < 2**63 for step in strides
        )
        _want(steps_fit and len(strides) == len(shape), "an array's strides are none")
        _want(scalars.is_count(first) and type(writeable) is bool, "an array's start or flag is none")
        low = high = first
        for size, step in zip(shape, strides, strict=True):
            low, high = low + min(0, (size - 1) * step), high + max(0, (size - 1) * step)
        inside = low >= 0 and high + dtype.itemsize <= self._sizes[number]
        _want(inside or not _product(shape), "an array leaves its memory")
        _want(how in ("own", "view", "tensor"), "an array's memory is nobody's")
        new = number not in self._memories
        memory = self._memory(number, how)
        array: Array = np.ndarray(shape, dtype, buffer=memory, offset=first, strides=strides)
        if new and how == "own" and not self._trial:
            array = array.copy(order="K")
            self._memories[number] = memory_of(array)
        array.flags.writeable = writeable
        return array

    def _memory(self, number: int, how: str) -> Array:
        """A storage's memory for the arrays that show it; NumPy's own, but for those over tensors."""
        if number not in self._memories:
            memory = memory_of(self._storages[number])
            if how == "tensor" and not self._trial:
                memory = torch.empty(0, dtype=torch.uint8).set_(self._storages[number]).numpy()
            self._memories[number] = memory.copy() if how == "view" and not self._trial else memory
        return self._memories[number]

    def _registered(self, words: list[Any], depth: int) -> object:
        name, table = words
        _want(isinstance(name, str) and name in registered, f"type {name!a:.60} is not registered here")
        tree = self.table(table, depth=depth + 1)
        # Of a content that it does not own an adapter gets a copy: it may build it in.
        return registered[name].from_tree(copy.deepcopy(tree) if self._trial else tree)


def _nodes_of(table: Any) -> list[Any]:
    nodes = table.get("nodes") if isinstance(table, dict) else None
    if not isinstance(nodes, list) or "root" not in table:
        raise BadFileError("a table has no nodes or no root")
    for node in nodes:
        _want(isinstance(node, list) and len(node) >= 2, "a node is no list")
        kind, parts, *words = node
        _want(isinstance(kind, str) and kind in _WORDS, f"kind {kind!a:.60} is not known")
        _want(isinstance(parts, list) and len(words) == _WORDS[kind], f"a {kind} is not written like that")
    return nodes


def _owns(node: list[Any]) -> bool:
    """Whether a node is an array with memory of its own, which others may show."""
    return bool(node[0] == "array" and node[-1] == "own")


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(scalars.is_count(value) for value in values)


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _fill(shell: Any, parts: list[Any]) -> None:
    if not isinstance(shell, dict):
        _want(
            getattr(shell, "maxlen", None) is None or len(parts) <= shell.maxlen, "a deque leaves its bound"
        )
        shell.extend(parts)
        return
    _want(len(parts) % 2 == 0, "a dict has a key without a value")
    try:
        shell.update(zip(parts[::2], parts[1::2], strict=True))
    except TypeError as error:
        raise BadFileError(f"a dict's key is none: {error}") from error
    _want(len(shell) == len(parts) // 2, "a dict has a key twice")


def _measure(value: Any, depth: int, met: set[int]) -> None:
    """Refuse what ``unpack()``, which goes the same way, could not put together."""
    _want(depth <= _DEPTH, f"its containers are more than {_DEPTH} deep")
    if id(value) in met or type(value) not in _CONTAINERS:
        return
    met.add(id(value))
    for item in value.values() if isinstance(value, dict) else value:
        _measure(item, depth + 1, met)

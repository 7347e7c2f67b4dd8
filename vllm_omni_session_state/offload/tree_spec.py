"""A packed session's skeleton to and from a plain JSON document: a closed list of kinds, no code.

The document is a flat table of nodes, so that a nest of any depth is read without recursion, and shared and
cyclic containers keep their sharing: a part that is a whole number names a node, any other part is a value
of its own. Arrays, and tensors that ``pack()`` left whole, hand out their memory as further storages.

Not here: the bytes of storages, and files.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_omni_session_state.base.errors import NotWritableError
from vllm_omni_session_state.offload import scalars
from vllm_omni_session_state.offload.arrays import Array, Memory, extent, has_own, memory_of, owner_of
from vllm_omni_session_state.offload.pack import Whole
from vllm_omni_session_state.offload.slots import TensorSlot, more_than_a_slot, slot_of

VERSION = 1
KEY_WEIGHT = 1000
"""Values that a dict's key may consist of: hashing is recursive, and so is what it costs."""

REGISTERED_DEPTH = 16
"""How deep registered values may stand in each other."""

CONTAINERS: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    dict: "dict",
    OrderedDict: "odict",
    deque: "deque",
}


@dataclass(frozen=True, slots=True)
class Registered:
    """How values of one type are written.

    Attributes:
        kind: The type itself; subclasses are not meant.
        name: What a file calls it.
        to_tree: Its content as plain values, containers, tensors and arrays.
        from_tree: A value of that content.
    """

    kind: type
    name: str
    to_tree: Callable[[Any], object]
    from_tree: Callable[[Any], object]


registered: dict[str, Registered] = {}


def register_kind(
    kind: type, name: str, *, to_tree: Callable[[Any], object], from_tree: Callable[[Any], object]
) -> None:
    """Let values of one more type be written. A later call for the same type and name replaces.

    Args:
        kind: The type itself; subclasses are registered on their own.
        name: What files call it: the same for as long as files live.
        to_tree: Hands out a value's content as plain values, containers, tensors and arrays.
        from_tree: Makes a value from such a content, which it owns. It is also called for trial, on a copy,
            when a value is written: what it refuses then is not written.

    Raises:
        TypeError: ``kind`` is not a class.
        ValueError: ``kind`` is written already, or the name means another type.
    """
    if not isinstance(kind, type):
        raise TypeError(f"register_kind takes a class, not {kind!r}: pass type(value)")
    if (
        kind in CONTAINERS
        or kind in (TensorSlot, Whole, np.ndarray, torch.Tensor)
        or scalars.is_scalar_type(kind)
    ):
        raise ValueError(f"{kind.__qualname__} is written already: register another class")
    for other in registered.values():
        if (other.name == name) != (other.kind is kind):
            raise ValueError(f"{other.kind.__qualname__} is registered as {other.name!r}: take another name")
    registered[name] = Registered(kind, name, to_tree, from_tree)


@dataclass(frozen=True, slots=True)
class Written:
    """A skeleton in writing.

    Attributes:
        document: Plain JSON.
        extra: Memory of arrays and whole tensors, by reference, to stand behind the session's storages.
        owners: Whose each of these is: an array, or the storage itself.
        names: Where each stands: the key in the second level of the skeleton.
    """

    document: dict[str, Any]
    extra: list[torch.UntypedStorage]
    owners: list[Memory]
    names: list[str]


def write(skeleton: Any, storages: Sequence[torch.UntypedStorage]) -> Written:
    """A skeleton as a document; the skeleton is unharmed.

    Args:
        skeleton: From ``pack()``.
        storages: What its slots name.

    Raises:
        NotWritableError: If it holds a value that is not of a kind on the list; it says where.
    """
    writing = _Writing(storages)
    table = _Table(writing, "", depth=0).write(skeleton)
    return Written(
        {"version": VERSION, "storages": len(storages), **table}, writing.extra, writing.owners, writing.names
    )


def type_name(value: object) -> str:
    """The qualified name of a value's type."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class _Writing:
    """What the tables of one document share: the memory that was met, and by which table each value was."""

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self.first = len(storages)
        self.extra: list[torch.UntypedStorage] = []
        self.owners: list[Memory] = []
        self.names: list[str] = []
        self.met: dict[
            int, int
        ] = {}  # to the number of the table, which refers to this: what is let go of dies
        self.held: list[object] = []  # so that no id is used twice meanwhile
        self.tables = 0
        taken = {(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.device.type == "cpu"}
        self._spans: list[tuple[int, int]] = sorted(taken)
        self._index: dict[tuple[int, int], int] = {}

    def entry(self, span: tuple[int, int], owner: Memory, name: str) -> int | None:
        """The number of the storage that holds this memory; ``None`` if it lies partly in another's."""
        start, stop = span
        if start < stop and span in self._index:
            return self._index[span]
        if start < stop:
            at = bisect(self._spans, span)
            if any(start < b and a < stop for a, b in self._spans[max(0, at - 1) : at + 1]):
                return None
            insort(self._spans, span)
        self._index[span] = self.first + len(self.extra)
        if start == stop:
            storage = torch.empty(0).untyped_storage()
        elif isinstance(owner, np.ndarray):
            storage = torch.from_numpy(memory_of(owner)).untyped_storage()
        else:
            storage = owner
        self.extra.append(storage)
        self.owners.append(owner)
        self.names.append(name)
        return self._index[span]


@dataclass(slots=True)
class _Frame:
    """A node whose parts are being written."""

    number: int
    parts: Iterator[tuple[str, object]]
    step: str = ""


class _Table:
    """One table of nodes in writing. A node that cannot be made without its parts comes after them."""

    def __init__(self, writing: _Writing, path: str, *, depth: int, name: str = "") -> None:
        writing.tables += 1
        self._writing = writing
        self._number = writing.tables
        self._path = path
        self._depth = depth
        self._name = name
        self._nodes: list[list[Any]] = []
        self._weights: list[int] = []
        self._numbers: dict[int, int] = {}
        self._stack: list[_Frame] = []

    def write(self, root: object) -> dict[str, Any]:
        order: list[int] = []
        top = self._part(root)
        while self._stack:
            frame, depth = self._stack[-1], len(self._stack)
            for step, part in frame.parts:
                frame.step = step
                self._nodes[frame.number][1].append(self._part(part))
                if len(self._stack) > depth:
                    break
            else:
                self._finish(frame.number)
                order.append(frame.number)
                self._stack.pop()
        place = {number: position for position, number in enumerate(order)}
        for node in self._nodes:
            node[1] = [place[part] if type(part) is int else part for part in node[1]]
        root_part = place[top] if type(top) is int else top
        return {"nodes": [self._nodes[number] for number in order], "root": root_part}

    def _part(self, value: object) -> Any:
        written = scalars.write_scalar(value)
        if written is not scalars.NO_ATOM:
            return written
        if id(value) in self._numbers:
            return self._numbers[id(value)]
        self._writing.held.append(value)
        if type(value) is not tuple and self._writing.met.setdefault(id(value), self._number) != self._number:
            raise self._refusal(value, "a registered value shares it with the rest of the session")
        number = self._numbers[id(value)] = len(self._nodes)
        self._nodes.append([])
        self._weights.append(1)
        node, parts = self._node(value)
        self._nodes[number] = node
        self._stack.append(_Frame(number, iter(parts)))
        return number

    def _finish(self, number: int) -> None:
        kind, parts, *_ = self._nodes[number]
        if kind == "tuple":
            self._weights[number] += sum(self._weight(part) for part in parts)
        if kind in ("dict", "odict") and any(self._weight(key) > KEY_WEIGHT for key in parts[::2]):
            raise self._refusal(None, f"a key of more than {KEY_WEIGHT} values")

    def _weight(self, part: Any) -> int:
        return self._weights[part] if type(part) is int else 1

    def _node(self, value: Any) -> tuple[list[Any], Iterable[tuple[str, object]]]:
        kind = type(value)
        if kind is OrderedDict and vars(value):
            raise self._refusal(value, "it has attributes")
        if kind in (dict, OrderedDict):
            return [CONTAINERS[kind], []], _items(value, named=len(self._stack) < 2)
        if kind in CONTAINERS:
            more = [value.maxlen] if kind is deque else []
            return [CONTAINERS[kind], [], *more], ((f"[{i}]", part) for i, part in enumerate(value))
        if kind is Whole:
            return ["whole", []], [("", value.value)]
        if kind is TensorSlot:
            return ["slot", [], value.storage, *self._layout(value, value)], ()
        if kind is torch.Tensor:
            return self._tensor(value), ()
        return (self._array(value) if kind is np.ndarray else self._registered(value)), ()

    def _registered(self, value: object) -> list[Any]:
        entry = next((entry for entry in registered.values() if entry.kind is type(value)), None)
        if entry is None:
            raise self._refusal(value, "its type is not on the list of what files hold")
        if self._depth >= REGISTERED_DEPTH:
            raise self._refusal(value, f"more than {REGISTERED_DEPTH} registered values stand in each other")
        try:
            tree = entry.to_tree(value)
        except Exception as error:
            raise self._refusal(value, f"its adapter's to_tree() raised {error!r}") from error
        inner = _Table(self._writing, self._where(), depth=self._depth + 1, name=self._top())
        table = inner.write(tree)
        return ["registered", [], entry.name, table]

    def _layout(self, value: object, slot: TensorSlot) -> list[Any]:
        if slot.dtype not in scalars.DTYPE_NAMES:
            raise self._refusal(value, f"its element type {slot.dtype} is not on the list")
        flags = [slot.requires_grad, slot.inference, slot.resizable]
        return [scalars.DTYPE_NAMES[slot.dtype], slot.offset, list(slot.size), list(slot.stride), *flags]

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        if why := more_than_a_slot(value):
            raise self._refusal(value, why)
        storage = value.untyped_storage()
        if storage.nbytes() and not value.is_cpu:
            raise self._refusal(value, f"it stands on {value.device} where it cannot be moved from")
        number, _ = self._memory(value, storage)
        slot = slot_of(value, number)
        return ["tensor", [], number, *self._layout(value, slot), value.device.type, value.device.index]

    def _array(self, value: Array) -> list[Any]:
        name = scalars.array_type_name(value.dtype)
        if name is None:
            raise self._refusal(value, f"its element type {value.dtype} holds objects or fields")
        owner = owner_of(value)
        if owner is None:
            raise self._refusal(value, "its memory is not NumPy's own: a buffer or a file has it")
        how = "view" if isinstance(owner, np.ndarray) else "tensor"
        how = "own" if owner is value and has_own(value) else how
        number, start = self._memory(value, owner)
        first = value.__array_interface__["data"][0] - start if value.size else 0
        layout = [list(value.shape), list(value.strides), value.flags.writeable]
        return ["array", [], number, name, first, *layout, how]

    def _memory(self, value: object, owner: Memory) -> tuple[int, int]:
        """The number of the storage that is to hold the memory of that owner, and the memory's address."""
        if isinstance(owner, np.ndarray):
            start, nbytes = extent(owner)
        else:
            start, nbytes = owner.data_ptr(), owner.nbytes()
        number = self._writing.entry((start, start + nbytes), owner, self._top())
        if number is None:
            raise self._refusal(value, "it shares its memory with a value of another kind")
        return number, start

    def _refusal(self, value: object, why: str) -> NotWritableError:
        return NotWritableError(self._where(), type_name(value), why=why)

    def _top(self) -> str:
        """The key in the second level at which this stands."""
        return self._name or (self._stack[1].step.removeprefix(".") if len(self._stack) > 1 else "")

    def _where(self) -> str:
        return (self._path + "".join(frame.step for frame in self._stack)).removeprefix(".")


def _items(value: dict[Any, Any], *, named: bool) -> Iterator[tuple[str, object]]:
    """Keys and values in turn, each with its step in a path; ``named``: the levels that have names."""
    for key, item in value.items():
        shown = f".{key}" if named and isinstance(key, str) else f"[{ascii(key)[:60]}]"
        yield "[a key]", key
        yield shown, item

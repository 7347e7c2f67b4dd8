"""Taking a tree of values apart into nodes and the memory that its tensors and arrays live in.

What ``unpack()`` brings back is what left: dtype, shape, strides, offset, aliasing, shared containers,
container kinds, ``requires_grad`` and ``is_inference()``. The memory is handed out by reference; who moves it
gives other memory of the same bytes to ``unpack()``.

For host memory, what cannot be taken apart stays as it is: see ``Survey``. For a file, all of a tree is taken
apart, or refused with its place.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_omni_session_state.accounting.reach import reach
from vllm_omni_session_state.base.errors import NotWritableError
from vllm_omni_session_state.offload import schema
from vllm_omni_session_state.offload.memory import (
    Array,
    Memory,
    Span,
    extent,
    has_own,
    memory_of,
    more_than_bytes,
    owner_of,
)
from vllm_omni_session_state.offload.registered import MOST_DEEP, kind_of
from vllm_omni_session_state.offload.schema import SCALARS, Container, Node, Part, Stay, Tree
from vllm_omni_session_state.offload.survey import Survey

_NOBODY: Mapping[int, str] = MappingProxyType({})
_SEQUENCES: dict[type, type[Container]] = {list: schema.List, tuple: schema.Tuple}
_DICTS: dict[type, type[Container]] = {dict: schema.Dict, OrderedDict: schema.ODict}


class Kept(NamedTuple):
    """A value that is not taken apart: the key in the second level of the tree, the value, what keeps it."""

    name: str
    value: Any
    why: str


@dataclass(frozen=True, slots=True)
class Packed:
    """A tree taken apart.

    Attributes:
        tree: Its nodes.
        memory: What their numbers of storages name, each once; beyond those of a tree that it began with.
        kept: What is in the nodes as it is.
        met: Of the containers that should be looked for, the identities of those that were found.
    """

    tree: Tree
    memory: list[Memory]
    kept: list[Kept]
    met: frozenset[int]

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """The memory as storages, by reference."""
        return [
            torch.from_numpy(memory_of(each)).untyped_storage() if isinstance(each, np.ndarray) else each
            for each in self.memory
        ]


def pack(tree: object, *, beside: Iterable[object] = (), live: Collection[int] = ()) -> Packed:
    """Take a tree apart as far as that goes; the tree itself is left as it is.

    Args:
        tree: Nested dicts, lists, tuples, deques and values.
        beside: Values that stay beside the tree: what of the tree they refer to stays too.
        live: Identities of containers to look for, of which the tree has copies; they are not taken apart.
    """
    survey = Survey(tree, beside, live)
    walk = _Walk(_Known(), keep=survey.why)
    return Packed(walk.run(tree), walk.known.owners, walk.kept, survey.met)


def pack_whole(
    tree: Any, *, live: Mapping[int, str] = _NOBODY, base: Tree | None = None, first: int = 0
) -> Packed:
    """Take all of a tree apart, for a file.

    Args:
        tree: Nested dicts, lists, tuples, deques and values.
        live: As above, each with its buffer's name; none may be met, for a file makes another of it.
        base: Of a tree of the same two levels, whose values come after: what ``pack()`` made of them.
        first: The number of the first storage, where those of ``base`` come before it.

    Raises:
        NotWritableError: If it holds a value that is not of a kind on the list; it says where.
    """
    known = _Known(first, live)
    packed = _Walk(known, base=base).run(tree)
    reached = reach(known.registered).objects if known.registered else {}
    for each in known.live.keys() & reached.keys():
        known.refuse_live(each)
    return Packed(packed, known.owners, [], frozenset())


def type_name(value: object) -> str:
    """The qualified name of a value's type."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class _Known:
    """What the tables of one tree share: the memory that was met, and by which table each value was."""

    def __init__(self, first: int = 0, live: Mapping[int, str] = _NOBODY) -> None:
        self.first = first
        self.live = live
        self.owners: list[Memory] = []
        self.tables: list[list[Any]] = []  # their values, so that no identity is used twice meanwhile
        self.table_of: dict[int, int] = {}  # a number, not the table: what is let go of dies
        self.registered: list[object] = []
        self._number: dict[Span, int] = {}
        self._spans: list[Span] = []

    def refuse_live(self, identity: int) -> None:
        """Raise, as this is the container of a buffer."""
        why = "something else in the session refers to its container, of which a file makes another"
        raise NotWritableError(f"objects.{self.live[identity]}", "a buffer", why=why)

    def number(self, device: str, start: int, nbytes: int, owner: Memory) -> int | None:
        """The number of the storage that holds this memory; ``None`` if it lies partly in another's."""
        span = device, start, nbytes
        if nbytes:
            if span in self._number:
                return self._number[span]
            at = bisect(self._spans, span)
            for other, begin, length in self._spans[max(0, at - 1) : at + 1]:
                if other == device and start < begin + length and begin < start + nbytes:
                    return None
            insort(self._spans, span)
        number = self._number[span] = self.first + len(self.owners)
        self.owners.append(owner)
        return number


class _Walk:
    """One table of nodes in the making, breadth first.

    Args:
        known: What its tables share.
        keep: Why values stay, by identity; ``None`` where none may.
        base: A table that this one begins with.
        path: Where its root stands.
        depth: How many tables it stands in.
    """

    def __init__(
        self,
        known: _Known,
        *,
        keep: Mapping[int, str] | None = None,
        base: Tree | None = None,
        path: str = "",
        depth: int = 0,
    ) -> None:
        self.known = known
        self.kept: list[Kept] = []
        self._keep = keep
        self._keys: set[int] = set()
        self._base = base
        self._before: list[Any] = [] if base is None else list(base.nodes)
        self._path = path
        self._depth = depth
        self._table = len(known.tables)
        self._values = [node.kept if type(node) is Stay else node for node in self._before]
        known.tables.append(self._values)
        self._numbers = {id(node.kept): n for n, node in enumerate(self._before) if type(node) is Stay}
        self._nodes: list[Any] = []
        self._parents: dict[int, int] = {}
        for number, node in enumerate(self._before):
            for part in node.parts if isinstance(node, Container) else ():
                if type(part) is int:
                    self._parents.setdefault(part, number)

    def run(self, tree: Any) -> Tree:
        """The table of a tree; with a base, of both trees' two levels in one."""
        root: Any = self._part(tree) if self._base is None else self._base.root
        more: dict[int, Mapping[Any, Any]] = {}
        if self._base is not None:
            names, numbers = self._before[root].parts[::2], self._before[root].parts[1::2]
            more = {number: tree[name] for name, number in zip(names, numbers, strict=True)}
        for number, value in enumerate(self._values):  # there come more
            if number in more:
                here: Any = self._items(more[number])
                node: Any = schema.Dict([*here, *self._before[number].parts])
            elif number < len(self._before) and type(self._before[number]) is not Stay:
                node = value
            else:
                node = self._node(value)
            self._nodes.append(node)
        return Tree(self._nodes, root)

    def _part(self, value: Any) -> Part:
        kind = type(value)
        if kind is str and value.isascii():
            return value  # type: ignore[no-any-return]
        if kind in SCALARS and (kind is not torch.dtype or self._keep is not None):
            return SCALARS[kind](value)
        if self._keep is None and (kind is torch.dtype or isinstance(value, np.generic)):
            try:
                return schema.scalar_of(value)
            except KeyError:
                pass  # it is refused in its turn, with its place
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._values)
            self._parents[number] = len(self._nodes)
            self._values.append(value)
        return number

    def _items(self, value: Mapping[Any, Any]) -> list[Part]:
        parts = []
        for key, item in value.items():
            parts += [self._part(key), self._part(item)]
            if self._keep is not None and type(parts[-2]) is int:
                self._keys.add(id(key))
        return parts

    def _node(self, value: Any) -> Node:  # noqa: C901, PLR0911 - a kind, a line
        kind = type(value)
        if self._keep is not None and (id(value) in self._keep or id(value) in self._keys):
            if id(value) in self._keep:
                self.kept.append(Kept(self._name(), value, self._keep[id(value)]))
            return Stay(value)
        if self._keep is None:
            if kind is not tuple and self.known.table_of.setdefault(id(value), self._table) != self._table:
                raise self._refusal(value, "a registered value shares it with the rest of the session")
            if id(value) in self.known.live:
                self.known.refuse_live(id(value))
        if kind is torch.Tensor:
            return self._tensor(value)
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]([self._part(item) for item in value])
        if kind is deque:
            return schema.Deque([self._part(item) for item in value], value.maxlen)
        if kind in _DICTS:
            if kind is OrderedDict and vars(value):
                raise self._refusal(value, "it has attributes")
            return _DICTS[kind](self._items(value))
        if kind is np.ndarray:
            return self._array(value)
        if isinstance(value, np.generic) and schema.array_type_name(value.dtype) is not None:
            return schema.Leaf(schema.scalar_of(value))
        return self._registered(value)

    def _tensor(self, value: torch.Tensor) -> schema.Tensor:
        name: Any = str(value.dtype).removeprefix("torch.")
        if self._keep is None:
            if why := more_than_bytes(value):
                raise self._refusal(value, why)
            if name not in schema.TENSOR_TYPES:
                raise self._refusal(value, f"its element type {value.dtype} is not on the list")
        storage = value.untyped_storage()
        number = self.known.number(str(storage.device), storage.data_ptr(), storage.nbytes(), storage)
        if number is None:
            raise self._refusal(value, "it shares its memory with a value of another kind")
        layout = int(value.storage_offset()), tuple(value.shape), value.stride()
        flags = value.requires_grad, value.is_inference(), storage.resizable()
        return schema.Tensor(number, name, *layout, *flags)

    def _array(self, value: Array) -> schema.Array:
        name = schema.array_type_name(value.dtype)
        if name is None:
            raise self._refusal(value, f"its element type {value.dtype} holds objects or fields")
        owner = owner_of(value)
        if owner is None:
            raise self._refusal(value, "its memory is not NumPy's own: a buffer or a file has it")
        if isinstance(owner, np.ndarray):
            how: Any = "own" if owner is value and has_own(value) else "view"
            start, nbytes = extent(owner)
        else:
            how, start, nbytes = "tensor", owner.data_ptr(), owner.nbytes()
        number = self.known.number("cpu", start, nbytes, owner)
        if number is None:
            raise self._refusal(value, "it shares its memory with a value of another kind")
        first = value.__array_interface__["data"][0] - start if value.size else 0
        return schema.Array(number, name, first, value.shape, value.strides, value.flags.writeable, how)

    def _registered(self, value: object) -> schema.Registered:
        entry = kind_of(value)
        if entry is None:
            raise self._refusal(value, "its type is not on the list of what files hold")
        if self._depth >= MOST_DEEP:
            raise self._refusal(value, f"more than {MOST_DEEP} registered values stand in each other")
        self.known.registered.append(value)
        try:
            tree = entry.to_tree(value)
        except Exception as error:
            raise self._refusal(value, f"its adapter's to_tree() raised {error!r}") from error
        inner = _Walk(self.known, path=self._where(), depth=self._depth + 1)
        return schema.Registered(entry.name, inner.run(tree))

    def _refusal(self, value: object, why: str) -> NotWritableError:
        return NotWritableError(self._where().removeprefix("."), type_name(value), why=why)

    def _steps(self) -> list[str]:
        """The way from the root to the value whose turn it is."""
        way = [len(self._nodes)]
        while way[-1] in self._parents and self._parents[way[-1]] != way[-1]:
            way.append(self._parents[way[-1]])
        way.reverse()
        steps = []
        for level, (above, number) in enumerate(pairwise(way)):
            node: Any = self._nodes[above]
            place = node.parts.index(number)
            if not isinstance(node, schema.Dict | schema.ODict):
                steps.append(f"[{place}]")
            elif place % 2 == 0:
                steps.append("[a key]")
            else:
                key = node.parts[place - 1]
                named = level < 2 and isinstance(key, str)
                steps.append(f".{key}" if named else f"[{self._shown(key)}]")
        return steps

    def _shown(self, key: Part) -> str:
        value = self._values[key] if type(key) is int else schema.value_of(key)
        return ascii(value)[:60]

    def _where(self) -> str:
        return self._path + "".join(self._steps())

    def _name(self) -> str:
        """The key in the second level at which the value stands."""
        steps = self._steps()
        return steps[1].removeprefix(".") if len(steps) > 1 else ""

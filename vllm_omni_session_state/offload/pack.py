"""Taking a tree of values apart into a skeleton and the storages that its tensors live in, and back.

What comes back is what left: dtype, shape, strides, offset, aliasing between tensors, shared containers,
container kinds, ``requires_grad`` and ``is_inference()``. The storages are handed out as they are; whoever
moves them gives others of the same bytes to ``unpack()``.

What cannot be taken apart stays in the skeleton as it is, and so does all that it refers to and all that lies
in its memory: a tensor that is more than a slot says, an object, a container of another kind. So nothing that
two values share becomes two.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_omni_session_state.accounting.reach import ATOMS, reach
from vllm_omni_session_state.offload.slots import (
    Span,
    TensorSlot,
    entangled,
    more_than_a_slot,
    slot_of,
    span_of,
)

_DEPTH = 100
"""Levels of nesting that are taken apart; what lies deeper stays whole. It bounds the recursion."""

_OWN = 2
"""Of these, the topmost: a session's buckets and their names, which are the tree's own and no value's."""

Storages = Sequence[torch.UntypedStorage] | Mapping[int, torch.UntypedStorage]
"""Storages by the index that slots name them by."""

_CONTAINERS = (list, deque, dict, OrderedDict, tuple)
_DICTS = (dict, OrderedDict)


@dataclass(frozen=True, slots=True)
class Whole:
    """A container that was not taken apart, to be handed back as it is."""

    value: Any


class Stay(NamedTuple):
    """A value that is not taken apart.

    Attributes:
        name: Where it stands: the key in the second level of the tree.
        value: The value.
        why: What keeps it.
    """

    name: str
    value: Any
    why: str


@dataclass(frozen=True, slots=True)
class Packed:
    """A tree taken apart.

    Attributes:
        skeleton: The tree with a ``TensorSlot`` for each tensor; containers are copies.
        storages: What the slots' indices name, each once.
        stays: What stands in the skeleton as it is.
        met: Of the containers that should be looked for, the identities of those that were found.
        made: The skeleton's copies of containers.
    """

    skeleton: Any
    storages: list[torch.UntypedStorage]
    stays: list[Stay]
    met: frozenset[int]
    made: list[Any]

    def dissolve(self) -> None:
        """Let go of all of it, also where containers hold each other."""
        for copy in self.made:
            copy.clear()
        for held in (self.storages, self.stays, self.made):
            held.clear()


def pack(
    tree: object, *, first: int = 0, beside: Iterable[object] = (), live: Collection[int] = ()
) -> Packed:
    """Take a tree apart; the tree itself is left as it is.

    Args:
        tree: Nested dicts, lists, tuples, deques and values; also a skeleton whose slots come before.
        first: The index of the first storage that is taken out here, where others come before it.
        beside: Values that stay beside the tree: what of the tree they refer to stays too.
        live: Identities of containers to look for, of which the tree has copies; they are not taken apart.
    """
    survey = _Survey(tree, beside, live)
    walk = _Packing(survey, first)
    skeleton = walk.visit(tree)
    return Packed(skeleton, walk.storages, walk.stays, survey.met, walk.made)


def unpack(skeleton: Any, storages: Storages) -> Any:
    """Put a tree together again.

    Args:
        skeleton: From ``pack()``; unharmed, so that a failed attempt can be made again.
        storages: One for each that ``pack()`` took out, of the same length in bytes.
    """
    return _Unpacking(storages).visit(skeleton)


class _Survey:
    """What of a tree can be taken apart. It holds all of it, so that no identity is used twice meanwhile.

    Attributes:
        open: Identities of containers.
        spans: Where the storage of each tensor lies, by the tensor's identity.
        why: Why a value stays, by its identity.
        met: Of the containers that were looked for, those that were found.
    """

    def __init__(self, tree: object, beside: Iterable[object], live: Collection[int]) -> None:
        self.open: set[int] = set()
        self.spans: dict[int, Span] = {}
        self.why: dict[int, str] = {}
        self._live = live
        self._seen: dict[int, object] = {}
        self._odd: list[object] = []
        self._own: set[int] = set()
        self._look(tree, 0)
        taken = reach([*self._odd, *beside])
        self.met = frozenset(each for each in live if each in self._seen or each in taken.objects)
        stuck = entangled(self.spans.values(), taken.allocations)
        for each in (*self.open, *self.spans):
            if each in taken.objects:
                self.why[each] = "something that stays refers to it"
            elif not taken.complete and each not in self._own:
                self.why[each] = "something that stays refers to more than can be looked through"
            elif each in self.spans and self.spans[each] in stuck:
                self.why[each] = "its memory is another value's as well"

    def _look(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in ATOMS or kind is TensorSlot or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if kind is Whole:
            self._look(value.value, depth)
        elif kind is torch.Tensor:
            why = more_than_a_slot(value)
            storage = None if why else value.untyped_storage()
            if storage is not None and storage.nbytes():
                self.spans[id(value)] = span_of(storage)
            else:
                self._stays(value, why)
        elif kind not in _CONTAINERS:
            self._stays(value, "it is of a kind that is not taken apart")
        elif depth >= _DEPTH or id(value) in self._live or (kind is OrderedDict and vars(value)):
            self._stays(value, "it lies too deep, has attributes or is a buffer's own")
        else:
            self.open.add(id(value))
            if depth < _OWN:
                self._own.add(id(value))
            if kind in _DICTS:
                self._odd += [key for key in value if type(key) not in ATOMS]
            for item in value.values() if kind in _DICTS else value:
                self._look(item, depth + 1)

    def _stays(self, value: object, why: str) -> None:
        self.why[id(value)] = why
        self._odd.append(value)


class _Packing:
    def __init__(self, survey: _Survey, first: int) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self.stays: list[Stay] = []
        self.made: list[Any] = []
        self._survey = survey
        self._first = first
        self._index: dict[Span, int] = {}
        self._done: dict[int, Any] = {}
        self._path: list[object] = []

    def visit(self, value: Any) -> Any:
        kind = type(value)
        if kind in ATOMS or kind is TensorSlot:
            return value
        if kind is Whole:
            return self.visit(value.value)
        if id(value) not in self._done:
            why = self._survey.why.get(id(value))
            if why is not None:
                packed: Any = Whole(value) if kind in _CONTAINERS else value
                self.stays.append(Stay(str(self._path[1]) if len(self._path) > 1 else "", value, why))
            elif kind is torch.Tensor:
                packed = self._tensor(value, self._survey.spans[id(value)])
            elif kind is tuple:
                packed = tuple(self._item(place, item) for place, item in enumerate(value))
            else:
                return self._container(value, kind)
            self._done.setdefault(id(value), packed)  # there is one already of a tuple that holds itself
        return self._done[id(value)]

    def _item(self, step: object, item: Any) -> Any:
        self._path.append(step)
        packed = self.visit(item)
        self._path.pop()
        return packed

    def _container(self, value: Any, kind: Any) -> Any:
        # Known before its items are looked at: it may hold itself.
        copy: Any = deque(maxlen=value.maxlen) if kind is deque else kind()
        self._done[id(value)] = copy
        self.made.append(copy)
        if kind in _DICTS:
            copy.update((key, self._item(key, item)) for key, item in value.items())
        else:
            copy.extend(self._item(place, item) for place, item in enumerate(value))
        return copy

    def _tensor(self, value: torch.Tensor, span: Span) -> TensorSlot:
        if span not in self._index:
            self._index[span] = self._first + len(self.storages)
            self.storages.append(value.untyped_storage())
        return slot_of(value, self._index[span])


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
            value = self._done.get(id(packed), value)  # a list of its own refers to it, and was made first
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
        if not slot.resizable and storage.device.type == "cpu":
            torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # it was this that made it so
        return tensor

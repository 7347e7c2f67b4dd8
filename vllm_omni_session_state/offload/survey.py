"""What of a tree cannot be taken apart for host memory, where nothing that two values share may become two.

A tensor that is more than its bytes, an object, an array stay as they are, and so does all that they refer to
and all that lies in their memory.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from typing import Any

import torch

from vllm_omni_session_state.accounting.reach import ATOMS, reach
from vllm_omni_session_state.offload.memory import Span, entangled, more_than_bytes

DICTS = (dict, OrderedDict)
CONTAINERS = (*DICTS, list, tuple, deque)
"""What is taken apart: these types, no subclasses."""


class Survey:
    """A look through a tree. It holds all of it, so that no identity is used twice meanwhile.

    Args:
        tree: The tree.
        beside: Values that stay beside it.
        live: Identities of containers that stay as well.

    Attributes:
        why: Why a value stays, by its identity.
        met: Of ``live``, those that were found in the tree or by what stays.
    """

    def __init__(self, tree: Any, beside: Iterable[object], live: Collection[int]) -> None:
        self.why: dict[int, str] = {}
        self._seen: dict[int, object] = {}
        self._odd: list[object] = []
        self._opens: set[int] = set()
        spans: dict[int, Span] = {}
        top = tree.values() if type(tree) in DICTS else tree if type(tree) in CONTAINERS else ()
        own = {id(tree), *map(id, top)}  # a session's buckets and their names are nobody else's
        self._look_through(tree, live, spans)
        taken = reach([*self._odd, *beside])
        self.met = frozenset(each for each in live if each in self._seen or each in taken.objects)
        stuck = entangled(spans.values(), taken.allocations)
        for each in (*self._opens, *spans):
            if each in taken.objects:
                self.why[each] = "something that stays refers to it"
            elif not taken.complete and not (each in own and each in self._opens):
                self.why[each] = "something that stays refers to more than can be looked through"
            elif each in spans and spans[each] in stuck:
                self.why[each] = "its memory is another value's as well"

    def _look_through(self, tree: Any, live: Collection[int], spans: dict[int, Span]) -> None:
        stack = [tree]
        while stack:
            value = stack.pop()
            kind = type(value)
            if kind in ATOMS or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if kind is torch.Tensor:
                why = more_than_bytes(value)
                storage = None if why else value.untyped_storage()
                if storage is not None and storage.nbytes():
                    spans[id(value)] = str(storage.device), storage.data_ptr(), storage.nbytes()
                else:
                    self._stays(value, why)
            elif kind not in CONTAINERS:
                self._stays(value, "it is of a kind that is not taken apart")
            elif id(value) in live or (kind is OrderedDict and vars(value)):
                self._stays(value, "it has attributes or is a buffer's own")
            else:
                self._opens.add(id(value))
                if kind in DICTS:
                    self._odd += [key for key in value if type(key) not in ATOMS]
                stack += value.values() if kind in DICTS else value

    def _stays(self, value: object, why: str) -> None:
        self.why[id(value)] = why
        self._odd.append(value)

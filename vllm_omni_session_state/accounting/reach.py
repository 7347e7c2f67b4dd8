"""All that some values refer to, whatever they are: which objects, and which memory.

Where ``footprint()`` stops, at an instance that it does not know, this goes on: a list that such an instance
refers to is shared with it, whether or not its bytes count. It stops at classes, modules, what functions find
by name, and at the sessions themselves. As ``footprint()`` it asks the garbage collector what an object
refers to, and runs no code of a value.
"""

from __future__ import annotations

import array
import gc
import mmap
import types
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_omni_session_state.accounting.allocations import Allocation
from vllm_omni_session_state.accounting.append_list import AppendTrackedList, is_plain
from vllm_omni_session_state.accounting.footprint import footprint

MOST = 200_000
"""Objects that are looked at. It bounds what a session costs that refers to half of the process."""

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Types whose values are what they are: nobody can tell one from an equal one, nor change it."""

_NOWHERE = (type, types.ModuleType, types.CodeType)
_MEMORY = (
    *(torch.Tensor, torch.UntypedStorage, torch.TypedStorage, np.ndarray, np.void),
    *(memoryview, bytearray, array.array, mmap.mmap),
)
_OURS = __name__.partition(".")[0]
_NoTorchFunction: Any = torch._C.DisableTorchFunction  # noqa: SLF001 - as in footprint.py


@dataclass(frozen=True, slots=True)
class Reach:
    """What some values refer to, themselves included.

    Attributes:
        objects: By identity; held, so that no identity is used twice meanwhile. Atoms are left out.
        allocations: The memory that they keep alive, each once.
        complete: Whether that is all; not where there were more than ``MOST``, or one could not be looked at.
    """

    objects: dict[int, object]
    allocations: tuple[Allocation, ...]
    complete: bool


def reach(values: Iterable[object]) -> Reach:
    """All that ``values`` refer to. No value makes it raise: what cannot be looked at may hold anything."""
    stack, met, complete = list(values), dict[int, object](), True
    with _NoTorchFunction():
        while stack and complete:
            value = stack.pop()
            if type(value) in ATOMS or id(value) in met:
                continue
            met[id(value)] = value
            complete = len(met) <= MOST
            try:
                if not is_plain(value):
                    stack += _referents(value, type(value))
            except Exception:  # noqa: BLE001 - whatever it raised
                complete = False
    memory = [value for value in met.values() if issubclass(type(value), _MEMORY)]
    return Reach(met, footprint(*memory).allocations, complete)


def _referents(value: Any, kind: type) -> list[Any]:
    if issubclass(kind, _NOWHERE) or (
        kind.__module__.partition(".")[0] == _OURS and kind is not AppendTrackedList
    ):
        return []
    if kind is types.FunctionType:
        closure, named = value.__closure__ or (), value.__kwdefaults__ or {}
        return [*closure, *(value.__defaults__ or ()), *named.values(), value.__dict__]
    if issubclass(kind, weakref.ReferenceType):
        return [value()]
    held = gc.get_referents(value)
    if issubclass(kind, torch.Tensor):
        held += _of_tensor(value)
    elif issubclass(kind, np.ndarray):
        held += [np.ndarray.base.__get__(value), *_elements(np.asarray(value))]
    elif issubclass(kind, memoryview):
        held.append(value.obj)
    return held


def _elements(plain: np.ndarray[Any, Any]) -> list[Any]:
    if not plain.dtype.hasobject:
        return []
    names = plain.dtype.names
    return plain.ravel().tolist() if names is None else [plain[name] for name in names]


def _of_tensor(value: Any) -> list[Any]:
    held = [value.__dict__, value._backward_hooks]  # noqa: SLF001 - there is no other way to see them
    if value.is_leaf:
        held += [value.grad, value._post_accumulate_grad_hooks]  # noqa: SLF001 - as above
    graph, met = [value.grad_fn], set[Any]()
    while graph and len(met) <= MOST:
        node = graph.pop()
        if node is not None and node not in met:
            met.add(node)
            held.append(getattr(node, "variable", None))  # a leaf: gradients go into this very tensor
            graph += [before for before, _ in node.next_functions]
    return held

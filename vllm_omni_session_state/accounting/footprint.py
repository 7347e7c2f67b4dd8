"""The footprint of a value: every allocation that the value keeps alive.

It covers tensors of every layout, NumPy arrays of every origin, buffers, containers, dataclasses, ``Blocks``
of an engine, and types that somebody registered. At any other instance the walk stops, counts 0 bytes and
reports the type, so that one reference to a pipeline never counts its weights. What a container holds is
asked of the garbage collector, whose traversal runs no line of the value's own code.

A view leads to its owner, and an allocation is the owner's extent. Where Python does not know the owner
(torch over part of a NumPy array), the value's own extent is the allocation; one that lies within another
one of the same walk is that one.
"""

from __future__ import annotations

import array
import contextlib
import datetime as dt
import decimal
import enum
import fractions
import gc
import mmap
import pathlib
import types
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_omni_session_state.accounting import allocations as counted
from vllm_omni_session_state.accounting.allocations import HOST, PINNED, Allocation, Blocks, as_allocation

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_NoTorchFunction: Any = torch._C.DisableTorchFunction  # noqa: SLF001  # the public one leaves modes on
_referents = gc.get_referents
_length = itemgetter(2)

_PLAIN: frozenset[type] = frozenset(
    {type(None), type(...), type(NotImplemented), bool, int, float, complex, str, range}
    | {dt.datetime, dt.date, dt.time, dt.timedelta, decimal.Decimal, fractions.Fraction, uuid.UUID}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme, torch.Size}
    | {torch.SymInt, torch.SymFloat, torch.SymBool}
    | {kind for kind in np.sctypeDict.values() if not issubclass(kind, (np.void, np.bytes_))}
    | {weakref.ReferenceType, *weakref.ProxyTypes}  # they keep nothing alive
)
"""Types whose values hold nothing a session is charged for, and which are not worth a report."""

_PLAIN_BASES = (int, float, complex, str, pathlib.PurePath, weakref.ReferenceType)
"""Types whose subclasses hold nothing either, apart from the attributes put on them."""

_ATOMS = (np.generic, np.dtype, enum.Enum)
"""Types whose subclasses hold nothing at all; an enum's members belong to the program."""

_CONTAINERS: frozenset[type] = frozenset(
    {dict, list, tuple, set, frozenset, deque, OrderedDict, slice, types.SimpleNamespace}
    | {types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items())}
)
"""Types that the garbage collector's traversal opens, exactly."""

_CONTAINER_BASES = (dict, list, tuple, set, frozenset, deque, Mapping, Sequence, AbstractSet)
_BUFFERS = (bytes, bytearray, array.array, mmap.mmap)
StridedView: type = type(np.lib.stride_tricks.as_strided(np.empty(1)).base)
_OWNERS = (np.ndarray, _Tensor, memoryview, StridedView, *_BUFFERS)
"""Types that, as the base of an array, say themselves which memory they hold."""

_GC_TYPE = 1 << 14  # Py_TPFLAGS_HAVE_GC: the type has a traversal
_ROW_SPARSE, _COLUMN_SPARSE = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)

_registered: dict[type, Callable[[Any], Iterable[object]]] = {}


class Footprint(NamedTuple):
    """What some values keep alive.

    Attributes:
        allocations: Each once, sorted by device and address; an engine's blocks last.
        opaque: Qualified names of the types at which the walk stopped without seeing inside.
    """

    allocations: tuple[Allocation, ...]
    opaque: frozenset[str]

    @property
    def nbytes(self) -> int:
        """Bytes on all devices together."""
        return sum(map(_length, self.allocations))

    def nbytes_by_device(self) -> dict[str, int]:
        """Bytes per device; a device with none is absent."""
        return counted.nbytes_by_device(self.allocations)


NOTHING = Footprint((), frozenset())


def register_children(kind: type, children: Callable[[Any], Iterable[object]]) -> None:
    """Open a type that the walk would otherwise stop at, or close one that it would open.

    Args:
        kind: The class; its subclasses follow unless registered themselves. A later call replaces.
        children: Hands out the values that an instance holds. If it raises, the instance is opaque.

    Raises:
        TypeError: ``kind`` is not a class.
        ValueError: ``kind`` is one of the builtin kinds, which are never asked.
    """
    if not isinstance(kind, type):
        raise TypeError(f"register_children takes a class, not {kind!r}: pass type(value)")
    if kind in _PLAIN | _CONTAINERS | {_Tensor, _Parameter, np.ndarray, memoryview, *_BUFFERS}:
        raise ValueError(f"{kind.__qualname__} is a builtin kind of the footprint: register a subclass of it")
    _registered[kind] = children


def footprint(*values: object) -> Footprint:
    """The allocations that are reachable from ``values``, by one walk.

    No value makes it raise, none is changed, and no code of one is run but for ``__tensor_flatten__`` and
    what ``register_children`` was given.
    """
    walk = _Walk(list(values))
    with _NoTorchFunction():
        walk.run()
    found = counted.distinct(walk.spans)
    if walk.blocks:
        found += tuple(sorted(set(walk.blocks)))
    return Footprint(found, frozenset(walk.opaque))


def owned_allocations(*values: object) -> list[tuple[Any, Allocation]]:
    """Who owns what ``values`` keep alive: each storage, array or buffer with its allocation.

    One that lies within another stands there too, and an owner met through several views as often.
    """
    owners: list[Any] = []
    walk = _Walk(list(values), owners)
    with _NoTorchFunction():
        walk.run()
    return list(zip(owners, map(as_allocation, walk.spans), strict=True))


@dataclass(slots=True)
class _Walk:
    """One walk: what is still to be looked at, and what was found."""

    stack: list[Any]
    owners: list[Any] | None = None  # of each span, for whoever asks
    # By identity, and held: an object that dies during the walk would lend its id to another.
    seen: dict[int, object] = field(default_factory=dict)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    blocks: list[Allocation] = field(default_factory=list)
    opaque: set[str] = field(default_factory=set)

    def run(self) -> None:  # noqa: C901, PLR0912  # the usual kinds stand here: a call costs as much again
        stack, seen, spans, owners = self.stack, self.seen, self.spans, self.owners
        while stack:
            value = stack.pop()
            kind = type(value)
            try:
                if kind is _Tensor or kind is _Parameter:
                    try:
                        storage = value.untyped_storage()
                        start, nbytes = storage.data_ptr(), storage.nbytes()
                    except (NotImplementedError, RuntimeError):
                        self.odd_tensor(value)
                    else:
                        if start and nbytes:  # memory at address 0 is none: a meta tensor
                            device = HOST if value.is_cpu and not value.is_pinned() else _device_of(value)
                            spans.append((device, start, nbytes))
                            if owners is not None:
                                owners.append(storage)
                        if value.is_quantized or value.is_nested:
                            self.parts(value)
                    more = not value.is_leaf or value.grad is not None or value.__dict__
                    if more and id(value) not in seen:
                        seen[id(value)] = value
                        self.extras(value)
                elif kind in _PLAIN:
                    pass
                elif kind in _CONTAINERS:
                    if id(value) not in seen:
                        seen[id(value)] = value
                        stack += _referents(value)
                elif id(value) not in seen:
                    seen[id(value)] = value
                    if kind is np.ndarray:
                        self.array(value, value.base, value)
                    else:
                        self.other(value, kind)
            except Exception:  # noqa: BLE001  # a value that cannot be looked at is reported, whatever it raised
                self.opaque.add(_name(kind))

    def other(self, value: Any, kind: type) -> None:  # noqa: C901, PLR0912  # one branch per kind, in order
        """Look at a value that is none of the usual, exact types."""
        for base in kind.__mro__ if _registered else ():
            if base in _registered:
                self.stack += list(_registered[base](value))
                return
        if issubclass(kind, _Tensor):
            self.tensor_subclass(value, kind)
        elif issubclass(kind, np.ndarray):
            self.attributes(value)
            # Nothing that a subclass may override is used.
            self.array(np.asarray(value), np.ndarray.base.__get__(value), value)
        elif issubclass(kind, np.void):  # a structured scalar is a view into its array
            self.array(np.asarray(value), value.base, value)
        elif issubclass(kind, memoryview):
            self.stack.append(value.obj)
            if not issubclass(type(value.obj), _OWNERS):
                plain = np.frombuffer(value, np.uint8) if value.contiguous else np.asarray(value)
                self.extent(plain, value)
        elif issubclass(kind, _BUFFERS):
            self.attributes(value)
            if len(value):
                self.extent(np.frombuffer(value, np.uint8), value)
        elif issubclass(kind, torch.UntypedStorage):
            self.storage(value)
        elif kind is StridedView or issubclass(kind, torch.TypedStorage):
            self.stack.append(value.base if kind is StridedView else value._untyped_storage)  # noqa: SLF001
        elif kind is Blocks:
            self.blocks += value
        elif not issubclass(kind, torch.nn.Module) and (issubclass(kind, _PLAIN_BASES) or _opens(kind)):
            self.attributes(value)
        elif not issubclass(kind, _ATOMS):
            self.opaque.add(_name(kind))

    def attributes(self, value: object) -> None:
        """Go on to all that an instance refers to, its class and other classes left out."""
        self.stack += [held for held in _referents(value) if not issubclass(type(held), type)]

    def extras(self, value: torch.Tensor) -> None:
        """Go on to what hangs on a tensor: its gradient, its attributes; its graph cannot be seen."""
        if value.grad_fn is not None:
            self.opaque.add(_name(type(value.grad_fn)))
        if value.is_leaf or value.retains_grad:  # else reading the gradient warns
            self.stack.append(value.grad)
        self.stack.append(value.__dict__)

    def tensor_subclass(self, value: Any, kind: type) -> None:
        storage = None
        with contextlib.suppress(NotImplementedError):  # sparse
            storage = _Tensor.untyped_storage(value)
        if storage is not None and storage.device.type == "meta":
            return  # a fake tensor: what it carries describes memory and holds none
        self.attributes(value)
        if not hasattr(kind, "__tensor_flatten__"):
            self.odd_tensor(value)
        else:
            self.stack += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
            if storage is not None:
                self.storage(storage)
        self.extras(value)

    def odd_tensor(self, value: Any) -> None:
        """Add the memory of a tensor that has no plain storage, or may have none."""
        layout = value.layout
        with torch.no_grad():
            if layout is torch.sparse_coo:
                self.stack += [value._indices(), value._values()]  # noqa: SLF001  # the public ones may refuse
            elif layout in _ROW_SPARSE:
                self.stack += [value.crow_indices(), value.col_indices(), value.values()]
            elif layout in _COLUMN_SPARSE:
                self.stack += [value.ccol_indices(), value.row_indices(), value.values()]
            elif layout is torch._mkldnn:  # type: ignore[attr-defined]  # noqa: SLF001
                ops = torch.ops.mkldnn
                self.claim(value, HOST, ops.data_ptr(value), ops._nbytes(value))  # noqa: SLF001
            else:
                self.storage(value.untyped_storage())
                self.parts(value)

    def parts(self, value: Any) -> None:
        """Go on to the tensors that a quantized or nested one keeps beside its storage."""
        if value.is_quantized and value.qscheme() in _PER_CHANNEL:
            self.stack += [value.q_per_channel_scales(), value.q_per_channel_zero_points()]
        elif value.is_nested and value.layout is torch.strided:
            self.stack += [value._nested_tensor_size(), value._nested_tensor_strides()]  # noqa: SLF001
            self.stack.append(value._nested_tensor_storage_offsets())  # noqa: SLF001

    def storage(self, value: torch.UntypedStorage) -> None:
        with contextlib.suppress(RuntimeError):  # the storage of a wrapper: a size without memory
            self.claim(value, _device_of(value), value.data_ptr(), value.nbytes())

    def array(self, plain: np.ndarray[Any, Any], base: object, owner: object) -> None:
        """Add the memory of an array: its owner's if it is a view, else its own and its elements'."""
        if base is not None:
            self.stack.append(base)
            if issubclass(type(base), _OWNERS):
                return
        if self.extent(plain, owner) and plain.dtype.hasobject:
            self.elements(plain)

    def elements(self, plain: np.ndarray[Any, Any]) -> None:
        """Go on to the objects in an array: field by field, for a row made into a tuple is no element."""
        if plain.dtype.names is not None:
            for name in plain.dtype.names:
                if plain[name].dtype.hasobject:
                    self.elements(plain[name])
        elif plain.dtype.kind == "T":  # its strings lie in an arena of their own
            self.opaque.add(_name(type(plain.dtype)))
        else:
            self.stack += plain.ravel().tolist()

    def extent(self, plain: np.ndarray[Any, Any], owner: object) -> bool:
        """Add the bytes from the lowest to the highest that an array can touch; False if it has none."""
        if not plain.nbytes:
            return False
        low = plain.__array_interface__["data"][0]
        stop = low + plain.nbytes
        if not plain.flags.forc:
            stop = low + plain.itemsize
            for length, stride in zip(plain.shape, plain.strides, strict=True):
                low += min(0, stride * (length - 1))
                stop += max(0, stride * (length - 1))
        self.claim(owner, HOST, low, stop - low)
        return True

    def claim(self, owner: object, device: str, start: int, nbytes: int) -> None:
        if start > 0 and nbytes > 0:
            self.spans.append((device, int(start), int(nbytes)))
            if self.owners is not None:
                self.owners.append(owner)


def _device_of(value: Any) -> str:
    """The pool of a tensor or storage: the device's name, or ``"pinned"``."""
    if value.device.type != HOST:
        return str(value.device)
    return PINNED if value.is_pinned() else HOST


def _opens(kind: type) -> bool:
    """Whether an instance of ``kind`` is a container whose traversal shows all it holds."""
    opens = issubclass(kind, _CONTAINER_BASES) or hasattr(kind, "__dataclass_fields__")
    return opens and bool(kind.__flags__ & _GC_TYPE)


def _name(kind: type) -> str:
    try:
        return f"{kind.__module__}.{kind.__qualname__}"
    except Exception:  # noqa: BLE001  # a metaclass may answer for the class, and fail
        return type.__repr__(kind)

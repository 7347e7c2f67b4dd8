"""One session's state: its named objects, its carried attributes, and how a model's field reaches them.

A value belongs in a ``StateObject`` when the manager must be able to act on it. It belongs in ``attrs``
when the manager only carries it: the model assigns it, reads it back, clears it. Bytes count the same in
both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar, overload

from vllm_omni_session_state.contract import StateObject
from vllm_omni_session_state.footprint import Footprint, footprint

T = TypeVar("T")
ObjectT = TypeVar("ObjectT", bound=StateObject[Any, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a model says of its sessions.

    Attributes:
        device_nbytes: Bytes that one session may hold on the device, as the host reserves them.
        host_fields: Names of the values that live in host memory; all others live on the device.
    """

    device_nbytes: int
    host_fields: frozenset[str]


_serials = itertools.count(1)


class SessionState:
    """The named state objects and the attributes of one session.

    Attributes:
        key: The session's table key.
        serial: Its number in the order of creation, unique in this process.
        attrs: Values that the manager only carries, by name.
    """

    __slots__ = ("__weakref__", "_objects", "attrs", "key", "serial")

    def __init__(self, key: str) -> None:
        self.key = key
        self.serial = next(_serials)
        self.attrs: dict[str, object] = {}
        self._objects: dict[str, StateObject[Any, Any]] = {}

    @property
    def objects(self) -> dict[str, StateObject[Any, Any]]:
        """The state objects by name, live."""
        return self._objects

    @property
    def empty(self) -> bool:
        """Whether nothing has been put into the session."""
        return not self._objects and not self.attrs

    def get(self, name: str) -> StateObject[Any, Any] | None:
        """The object of that name, or ``None``."""
        return self._objects.get(name)

    def put(self, name: str, obj: ObjectT) -> ObjectT:
        """Hold ``obj`` under ``name``, in place of what was there, and return it."""
        self._objects[name] = obj
        return obj

    def get_or_create(self, name: str, factory: Callable[[], ObjectT], kind: type[ObjectT]) -> ObjectT:
        """The resident object of that name and kind; ``factory`` builds one where there is none."""
        held = self._objects.get(name)
        if isinstance(held, kind) and held.resident:
            return held
        return self.put(name, factory())

    def reset(self) -> None:
        """Reset every object, staged payloads too, and forget every attribute."""
        for obj in self._objects.values():
            obj.reset()
        self.attrs.clear()

    def contents(
        self, *, only: AbstractSet[str] | None = None, without: AbstractSet[str] = frozenset()
    ) -> Iterator[object]:
        """The committed content of both buckets, by reference.

        Args:
            only: Names of the values to hand out, instead of all.
            without: Names of the values to leave out.
        """
        for name, value in list(self.attrs.items()):
            if name not in without and (only is None or name in only):
                yield value
        for name, obj in list(self._objects.items()):
            if obj.resident and name not in without and (only is None or name in only):
                yield obj.export_payload()

    def footprint(self) -> Footprint:
        """The memory that the committed content of both buckets keeps alive; aliases count once."""
        return footprint(*self.contents())

    def staged_footprint(self) -> Footprint:
        """The memory that staged payloads keep alive."""
        return footprint(*(obj.staged for obj in self._objects.values()))

    def nbytes_by_device(self) -> dict[str, int]:
        """Bytes by device."""
        return self.footprint().nbytes_by_device()

    @property
    def nbytes(self) -> int:
        """Bytes over all devices."""
        return self.footprint().nbytes


class Unset(Enum):
    """The default of a field that has none: reading it while it is unset is an ``AttributeError``."""

    UNSET = "unset"


_UNSET = Unset.UNSET  # an enum's member is looked up by code, a global is not


class HoldsSession(Protocol):
    """What a field descriptor needs of the object that it is declared on."""

    _session: SessionState


class SessionAttr(Generic[T]):
    """A field that lives in the session's ``attrs``, under its own name.

    ::

        class Fields:
            call_count = SessionAttr[int](default=0, coerce=int)

    Args:
        default: What an unset field reads as; ``Unset.UNSET`` for one that must be set first.
        coerce: Applied to every value that is written.
    """

    __slots__ = ("coerce", "default", "name")

    def __init__(self, *, default: T | Unset, coerce: Callable[[Any], T] | None = None) -> None:
        self.default = default
        self.coerce = coerce
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, obj: None, owner: type) -> SessionAttr[T]: ...

    @overload
    def __get__(self, obj: HoldsSession, owner: type) -> T: ...

    def __get__(self, obj: HoldsSession | None, owner: type) -> SessionAttr[T] | T:
        if obj is None:
            return self
        value: Any = obj._session.attrs.get(self.name, self.default)  # noqa: SLF001 - the field's declared home
        if value is _UNSET:
            raise AttributeError(self.name)
        return value  # type: ignore[no-any-return]  # a step reads some seventy fields, and a cast is a call

    def __set__(self, obj: HoldsSession, value: T) -> None:
        obj._session.attrs[self.name] = value if self.coerce is None else self.coerce(value)  # noqa: SLF001

    def __delete__(self, obj: HoldsSession) -> None:
        try:
            del obj._session.attrs[self.name]  # noqa: SLF001
        except KeyError:
            raise AttributeError(self.name) from None

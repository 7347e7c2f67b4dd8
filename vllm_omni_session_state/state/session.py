"""One session's state: its named objects, its carried attributes, and how a model's field reaches them.

A value belongs in a ``StateObject`` when the manager must be able to act on it. It belongs in ``attrs``
when the manager only carries it: the model assigns it, reads it back, clears it. Bytes count the same in
both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar, overload

from vllm_omni_session_state.accounting import append_list
from vllm_omni_session_state.accounting.append_list import AllocationLog, AppendTrackedList
from vllm_omni_session_state.accounting.footprint import Footprint, footprint
from vllm_omni_session_state.base.errors import SessionParkedError
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.state.paged_kv import PagedKV
from vllm_omni_session_state.state.state_object import StateObject

T = TypeVar("T")
ObjectT = TypeVar("ObjectT", bound=StateObject[Any, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a model says of its sessions.

    Attributes:
        device_nbytes: Bytes that one session may hold on the device, as vLLM-Omni reserves them.
        host_fields: Names of the values that live in host memory; all others live on the device.
    """

    device_nbytes: int
    host_fields: frozenset[str]


def host_fields(declaration: Declaration | None) -> frozenset[str]:
    """Names of the values that a model keeps in host memory itself; none where it declares nothing."""
    return frozenset() if declaration is None else declaration.host_fields


class Role(NamedTuple):
    """Values of a session that live in the same kind of place.

    Attributes:
        values: Those that are walked at each settlement.
        lists: Those that are mostly appended to, and long.
    """

    values: list[object]
    lists: list[AppendTrackedList[Any]]


_serials = itertools.count(1)


class SessionState:
    """The named state objects and the attributes of one session.

    Attributes:
        key: The session's table key.
        serial: Its number in the order of creation, unique in this process.
        attrs: Values that the manager only carries, by name.
        log: What its growing lists reached at the last settlement.
    """

    __slots__ = ("__weakref__", "_away", "_objects", "attrs", "key", "log", "serial")

    def __init__(self, key: str) -> None:
        self.key = key
        self.serial = next(_serials)
        self.attrs: dict[str, object] = {}
        self._objects: dict[str, StateObject[Any, Any]] = {}
        self._away: _Away | None = None
        self.log: AllocationLog | None = None

    @property
    def objects(self) -> dict[str, StateObject[Any, Any]]:
        """The state objects by name, live."""
        return self._objects

    @property
    def empty(self) -> bool:
        """Whether its model has put nothing into the session; a handle to an engine's bytes is none of it."""
        return not self.attrs and all(isinstance(obj, PagedKV) for obj in self._objects.values())

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

    @property
    def parked(self) -> bool:
        """Whether a part of the session is elsewhere; until ``put_back()`` every touch of it raises."""
        return self._away is not None

    @property
    def gone_to(self) -> object:
        """What ``let_go()`` was told that brings a parked session back."""
        return None if self._away is None else self._away.to

    def _here(self) -> tuple[dict[str, object], dict[str, StateObject[Any, Any]]]:
        """Attributes and objects, of a parked session too."""
        return (self.attrs, self._objects) if self._away is None else self._away[:2]

    @property
    def staging(self) -> bool:
        """Whether any object holds a staged payload: a window is in progress."""
        return any(obj.staged is not None for obj in self._objects.values())

    def part(self, choose: Callable[[str], bool]) -> dict[str, dict[str, object]]:
        """Committed content by reference, as the tree that ``put_back()`` takes.

        Args:
            choose: Whether the value of a name belongs to it; of a parked session only what is still there.
        """
        attrs, objects = self._here()
        return {
            "attrs": {name: value for name, value in attrs.items() if choose(name)},
            "objects": {
                name: obj.export_payload() for name, obj in objects.items() if choose(name) and obj.resident
            },
        }

    def values(self, choose: Callable[[str], bool]) -> list[object]:
        """The content by the identity of its containers: an object's own one, where it has one.

        Args:
            choose: Whether the value of a name belongs to it; of a parked session only what is still there.
        """
        attrs, objects = self._here()
        chosen = [obj for name, obj in objects.items() if choose(name) and obj.resident]
        return [
            *(value for name, value in attrs.items() if choose(name)),
            *(obj.holds() if obj.live is None else obj.live for obj in chosen),
        ]

    def live(self, choose: Callable[[str], bool]) -> dict[int, str]:
        """Names of objects, by the identity of the container that each hands out and exports a copy of."""
        _, objects = self._here()
        return {id(obj.live): name for name, obj in objects.items() if choose(name) and obj.live is not None}

    def let_go(self, part: dict[str, dict[str, object]], to: object = None) -> None:
        """Drop what ``part()`` handed out, and refuse every touch; ``to`` is what brings it back.

        All of it or nothing, also where the process is stopped on the way: ``gone_to`` tells.
        """
        before = self._away, self.attrs, self._objects
        attrs, objects = self._here()
        away = _Away(attrs, objects, to)
        sealed: tuple[_Sealed, _Sealed] = _Sealed(self.key), _Sealed(self.key)
        released: list[str] = []
        try:
            for name in part["objects"]:
                released.append(name)
                objects[name]._release()  # noqa: SLF001 - not evict(): freed is judged for all at once
            for name in part["attrs"]:
                attrs[name] = None  # its place in the order stays
        except BaseException:
            for name in released:
                if not isinstance(objects[name], PagedKV) or not objects[name].resident:
                    objects[name].import_payload(part["objects"][name])
            attrs.update(part["attrs"])
            self._away, self.attrs, self._objects = before
            raise
        self._away, (self.attrs, self._objects) = away, sealed

    def put_back(self, part: dict[str, Any]) -> None:
        """Take back what was let go of; afterwards the session is as it was.

        If an object refuses, for want of room or whatever it is, the session stays away, all of it.
        """
        assert self._away is not None, "only a parked session is put back"
        attrs, objects = self._here()
        back: list[StateObject[Any, Any]] = []
        try:
            for name, payload in part["objects"].items():
                objects[name].import_payload(payload)
                back.append(objects[name])
            attrs.update(part["attrs"])
        except BaseException as error:
            if not isinstance(error, Exception):  # no refusal: it is not known which of them are there
                back = [objects[name] for name in part["objects"]]
            for obj in back:
                obj._release()  # noqa: SLF001 - as above
            attrs.update(dict.fromkeys(part["attrs"]))
            raise
        self.attrs, self._objects, self._away = attrs, objects, None

    def reset(self) -> None:
        """Reset every object, staged payloads too, and forget every attribute; also of a parked session."""
        self.attrs, self._objects = self._here()
        self._away = None
        for obj in self._objects.values():
            obj.reset()
        self.attrs.clear()
        self.log = None

    def contents(
        self, *, only: AbstractSet[str] | None = None, without: AbstractSet[str] = frozenset()
    ) -> list[object]:
        """The committed content of both buckets, by reference: all, ``only`` some names, ``without`` some."""
        attrs, objects = list(self.attrs.items()), list(self._objects.items())
        names = ({name for name, _ in (*attrs, *objects)} if only is None else only) - without
        values = [value for name, value in attrs if name in names]
        values += [obj.holds() for name, obj in objects if name in names and obj.resident]
        return values

    @property
    def engine_names(self) -> frozenset[str]:
        """Names of the objects whose bytes lie in an engine's pool."""
        return frozenset(name for name, obj in self._objects.items() if isinstance(obj, PagedKV))

    def parts(self, on_host: AbstractSet[str]) -> tuple[Role, Role, list[object], list[object]]:
        """The content by where it lives, by reference: device, host memory, an engine's pool; what is staged.

        Args:
            on_host: Names of the values that live in host memory.
        """
        device, host, engine, staged = Role([], []), Role([], []), list[object](), list[object]()
        for name, value in list(self.attrs.items()):
            (host if name in on_host else device).values.append(value)
        for name, obj in list(self._objects.items()):
            role = host if name in on_host else device
            if (growing := obj.growing) is not None:
                if len(growing) > append_list.SHORT:
                    role.lists.append(growing)
                else:
                    role.values.extend(growing)
            elif obj.resident:
                (engine if isinstance(obj, PagedKV) else role.values).append(obj.holds())
            if (payload := obj.staged) is not None:
                staged.append(payload)
        return device, host, engine, staged

    def footprint(self) -> Footprint:
        """The memory that the committed content of both buckets keeps alive; aliases count once."""
        return footprint(*self.contents())

    def nbytes_by_device(self) -> dict[str, int]:
        """Bytes by device."""
        return self.footprint().nbytes_by_device()

    @property
    def nbytes(self) -> int:
        """Bytes over all devices."""
        return self.footprint().nbytes


class _Away(NamedTuple):
    """What a parked session is made of, less what has left, and what brings that back."""

    attrs: dict[str, object]
    objects: dict[str, StateObject[Any, Any]]
    to: object


class _Sealed(dict[str, Any]):
    """In place of a parked session's content: whoever touches it is told, and can change nothing."""

    def __init__(self, key: str) -> None:
        self._key = key

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise SessionParkedError(display_id(self._key))

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse
    get = items = keys = values = pop = popitem = setdefault = update = clear = copy = _refuse


class Unset(Enum):
    """The default of a field that has none: reading it while it is unset is an ``AttributeError``."""

    UNSET = "unset"


_UNSET = Unset.UNSET  # an enum's member is looked up by code, a global is not


class HoldsSession(Protocol):
    """What a field is declared on."""

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

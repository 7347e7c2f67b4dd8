"""What an operator sees of a session: each value's name, kind, place, bytes and shape; never its content."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from vllm_omni_session_state.accounting.footprint import footprint
from vllm_omni_session_state.base.ids import digest, display_id
from vllm_omni_session_state.state.session import Declaration, SessionState, host_fields


@dataclass(frozen=True, slots=True)
class Value:
    """One value of a session, as a listing shows it.

    Attributes:
        name: The field's name in the model's own state.
        kind: Class of the state object, or type of the attribute.
        bucket: ``"object"`` or ``"attrs"``.
        nbytes: Bytes by device that this value keeps alive; one that several values share is in each.
        shape: Shape of a tensor or an array, ``"n x (shape)"`` for a container of alike ones.
    """

    name: str
    kind: str
    bucket: str
    nbytes: dict[str, int]
    shape: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One session, as a listing shows it.

    Attributes:
        session: The session's shown id.
        digest: What tells it apart for a program, the same wherever the session is; it is shown to nobody.
        place: ``"device"``, or ``"host"`` or ``"disk"`` for a parked one, of which no values are listed.
        used: Whether somebody uses it, or it is on its way.
        nbytes: Bytes by device, each allocation once.
        parked_nbytes: Bytes that it takes in the tier in which it is parked, by device, ``disk`` for a file.
        device_nbytes: Bytes of the values that its model keeps on the device, without an engine's pool.
        declared_nbytes: What the model declared of these; ``None`` where it declares nothing.
        values: What it holds, objects first.
    """

    session: str
    digest: str
    place: str
    used: bool
    nbytes: dict[str, int]
    parked_nbytes: dict[str, int]
    device_nbytes: int
    declared_nbytes: int | None
    values: tuple[Value, ...]


class Whereabouts(NamedTuple):
    """Where a session is.

    Attributes:
        place: As ``Entry`` has it,
        used: this too,
        parked_nbytes: and this.
        in_place: What of a parked one is where it was.
    """

    place: str
    used: bool
    parked_nbytes: dict[str, int]
    in_place: tuple[object, ...]


def entry_of(session: SessionState, declaration: Declaration | None, where: Whereabouts) -> Entry:
    """List one session. It walks the values, so it is for an operator's look and not for every step.

    Args:
        session: The session.
        declaration: What its model declared.
        where: Where it is.
    """
    declared = None if declaration is None else declaration.device_nbytes
    if session.parked:
        held = footprint(*where.in_place).nbytes_by_device()
        names = display_id(session.key), digest(session.key)
        return Entry(*names, where.place, where.used, held, where.parked_nbytes, 0, declared, ())
    objects = [
        _value(name, type(obj).__name__, "object", obj.holds() if obj.resident else None)
        for name, obj in list(session.objects.items())
    ]
    carried = [
        _value(name, type(value).__name__, "attrs", value) for name, value in list(session.attrs.items())
    ]
    on_device, *_ = session.parts(host_fields(declaration))
    return Entry(
        session=display_id(session.key),
        digest=digest(session.key),
        place="device",
        used=where.used,
        parked_nbytes={},
        nbytes=session.nbytes_by_device(),
        device_nbytes=footprint(*on_device.values, *on_device.lists).nbytes,
        declared_nbytes=declared,
        values=(*objects, *carried),
    )


def _value(name: str, kind: str, bucket: str, content: object) -> Value:
    return Value(name, kind, bucket, footprint(content).nbytes_by_device(), shape_of(content))


def shape_of(value: object, levels: int = 8) -> str:
    """Shape of a tensor or an array as text; ``"n x shape"`` for a container of alike ones, else ``""``.

    Args:
        value: Any.
        levels: Of containers that are looked into: one may hold itself.
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return str(tuple(shape))
    if isinstance(value, dict) and set(value) == {"maxlen", "items"}:
        value = value["items"]
    if isinstance(value, list | tuple | deque):
        shapes = {shape_of(item, levels - 1) for item in value if levels} - {""}
        return f"{len(value)} x {shapes.pop()}" if len(shapes) == 1 else f"{len(value)} items"
    return ""

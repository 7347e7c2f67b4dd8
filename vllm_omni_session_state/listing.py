"""What an operator sees of a session: each value's name, kind, place, bytes and shape; never its content."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from vllm_omni_session_state.footprint import footprint
from vllm_omni_session_state.ids import shown
from vllm_omni_session_state.session import SessionState


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
        nbytes: Bytes by device, each region once.
        values: What it holds, objects first.
    """

    session: str
    nbytes: dict[str, int]
    values: tuple[Value, ...]


def entry_of(session: SessionState) -> Entry:
    """List one session. It walks the values, so it is for an operator's look and not for every step."""
    objects = [
        _value(name, type(obj).__name__, "object", obj.export_payload() if obj.resident else None)
        for name, obj in list(session.objects.items())
    ]
    carried = [
        _value(name, type(value).__name__, "attrs", value) for name, value in list(session.attrs.items())
    ]
    return Entry(shown(session.key), session.nbytes_by_device(), (*objects, *carried))


def _value(name: str, kind: str, bucket: str, content: object) -> Value:
    return Value(name, kind, bucket, footprint(content).nbytes_by_device(), shape_of(content))


def shape_of(value: object) -> str:
    """Shape of a tensor or an array as text; ``"n x shape"`` for a container of alike ones, else ``""``."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return str(tuple(shape))
    if isinstance(value, dict) and set(value) == {"maxlen", "items"}:
        value = value["items"]
    if isinstance(value, list | tuple | deque):
        shapes = {shape_of(item) for item in value} - {""}
        return f"{len(value)} x {shapes.pop()}" if len(shapes) == 1 else f"{len(value)} items"
    return ""

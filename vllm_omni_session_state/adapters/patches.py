"""Attributes set on one object of vLLM-Omni, all of which can be taken back."""

from __future__ import annotations

import weakref

_ABSENT = object()


class Patches:
    """What was set on which object, in order, and keeps none alive; nothing on a class is ever touched."""

    def __init__(self) -> None:
        self._before: list[tuple[weakref.ref[object], str, object]] = []

    def set(self, target: object, name: str, value: object) -> None:
        """Set ``target.name`` and remember what the object itself held there."""
        before = vars(target).get(name, _ABSENT)
        setattr(target, name, value)
        self._before.append((weakref.ref(target), name, before))

    def undo(self) -> None:
        """Put everything back, the last change first."""
        while self._before:
            held, name, before = self._before.pop()
            target = held()
            if target is None:
                continue
            if before is _ABSENT:
                delattr(target, name)
            else:
                setattr(target, name, before)

    def forget(self) -> None:
        """Leave everything as it is set; what was there before is held no longer."""
        self._before.clear()

"""Leading items of a list that are elsewhere: whoever holds the list holds a handle for each run of them.

Not here: where they are, and how they get there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_NOBODY = object()


class Segment(Protocol):
    """A handle of consecutive items that are elsewhere. Only its holder has it, and drops it once."""

    @property
    def count(self) -> int:
        """How many items."""

    def read(self) -> list[Any]:
        """The items, made anew; they also stay where they are.

        Raises:
            Exception: If they cannot be read; nothing has changed.
        """

    def drop(self) -> None:
        """Let go of the items. Never raises; a second call does nothing."""


class Segments:
    """What comes before the first item of a list, oldest first, for as long as that item is the first.

    A model sees the list alone. If it assigns or leaves one that begins with another item, or with none,
    then what came before is not wanted any more.
    """

    __slots__ = ("_first", "_segments")

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._first: object = _NOBODY  # held: an address alone could be another item's by now

    def before(self, items: Sequence[Any]) -> list[Segment]:
        """Those that come before these items: all of them, or none."""
        return list(self._segments) if len(items) and items[0] is self._first else []

    def add(self, segment: Segment, items: Sequence[Any]) -> None:
        """Have one more stand before the items that are left, at least one."""
        self._segments.append(segment)
        self._first = items[0]

    def keep(self, items: Sequence[Any]) -> None:
        """Drop all unless they come before these items."""
        if self._segments and not self.before(items):
            self.drop()

    def leave(self) -> None:
        """The items go elsewhere too; until ``arrive()`` these come before nothing."""
        self._first = _NOBODY

    def arrive(self, items: Sequence[Any]) -> None:
        """The items are back, as other objects."""
        self._first = items[0] if self._segments and items else _NOBODY

    def drop(self) -> None:
        """Let go of all of them."""
        self._first = _NOBODY
        while self._segments:
            self._segments.pop().drop()

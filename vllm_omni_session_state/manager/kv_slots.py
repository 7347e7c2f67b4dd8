"""What an engine that keeps sessions on the device in places of its own answers about them."""

from __future__ import annotations

from typing import Protocol


class KVSlots(Protocol):
    """Places that an engine has for sessions on the device; it is asked under the table's lock as well."""

    @property
    def places(self) -> int:
        """How many there are."""

    def holds(self, key: str) -> bool:
        """Whether a session has one."""

    def has_place(self, key: str) -> bool:
        """Whether a session has one or can have one now."""

"""The eviction order: which session was used least recently. It never sees a byte.

What is in use is not in the order, so whoever asks for the oldest cannot be handed something that must
not move; there is nothing to skip.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class RecencyOrder:
    """Keys from least to most recently used.

    Not locked: its owner holds a lock around every call.
    """

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        """Keys, oldest first."""
        return iter(self._keys)

    def use(self, key: str) -> None:
        """Make ``key`` the most recent one, adding it where it is absent."""
        self._keys[key] = None
        self._keys.move_to_end(key)

    def remove(self, key: str) -> None:
        """Take ``key`` out.

        Raises:
            KeyError: If it is not in the order; what is removed was once added.
        """
        del self._keys[key]

    def oldest(self) -> str | None:
        """The least recently used key, or ``None`` where there is none."""
        return next(iter(self._keys), None)

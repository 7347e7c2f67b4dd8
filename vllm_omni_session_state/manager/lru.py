"""The eviction order: which session was used least recently. It never sees a byte.

What is in use or on its way is not in the order, so whoever asks for the oldest cannot be handed something
that must not move; there is nothing to skip.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class LruOrder:
    """Keys from least to most recently used, each with the number of its last use.

    Not locked: its owner holds a lock around every call.
    """

    __slots__ = ("_keys", "_uses")

    def __init__(self) -> None:
        self._keys: OrderedDict[str, int] = OrderedDict()
        self._uses = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        """Keys, oldest first."""
        return iter(self._keys)

    def use(self, key: str) -> int:
        """Make ``key`` the most recent one, adding it where it is absent; returns the number of this use."""
        self._uses += 1
        self._keys[key] = self._uses
        self._keys.move_to_end(key)
        return self._uses

    def remove(self, key: str) -> None:
        """Take ``key`` out.

        Raises:
            KeyError: If it is not in the order; what is removed was once added.
        """
        del self._keys[key]

    def put_back(self, key: str, place: int) -> None:
        """Undo a ``remove()``: the key stands where it stood, whatever was used meanwhile.

        Args:
            key: The key.
            place: The number of its last use. A second call of the same changes nothing.
        """
        last = next(reversed(self._keys.values()), 0)
        self._keys[key] = place
        if place > last:
            return  # behind all others, as most are
        self._keys = OrderedDict(sorted(self._keys.items(), key=lambda item: item[1]))

    def check(self) -> None:
        """Assert that keys stand in the order of their last uses. An expensive no-op."""
        assert list(self._keys.values()) == sorted(self._keys.values()), "the order is out of order"

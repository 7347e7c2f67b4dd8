"""An order of keys: which session was used least recently. It never sees a byte.

What is in use or on its way is in no order that anybody chooses from. So whoever asks for the oldest cannot
be handed something that must not move; there is nothing to skip.
"""

from __future__ import annotations

from collections import OrderedDict


class LruOrder(OrderedDict[str, int]):
    """Keys from least to most recently used, each with the number of its last use.

    Not locked: its owner holds a lock around every call.
    """

    def put(self, key: str, turn: int) -> None:
        """Have a key stand where its last use says, whatever was used meanwhile; again changes nothing.

        Args:
            key: The key.
            turn: The number of its last use.
        """
        self.pop(key, None)
        last = self[next(reversed(self))] if self else 0
        self[key] = turn
        if turn < last:  # else it is behind all others, as most are
            for later in sorted((key for key in self if self[key] > turn), key=self.__getitem__):
                self.move_to_end(later)

    def check(self) -> None:
        """Assert that keys stand in the order of their last uses. An expensive no-op."""
        turns = list(self.values())
        assert turns == sorted(turns), "the order is out of order"

"""Several calls that run by turns: one at a time, each until it passes the turn on.

Covers the turns and nothing else. What a turn is, is for the caller to say: whoever calls ``pass_on``
inside its function hands over.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Lockstep:
    """Run functions in threads of which one at a time moves, in round-robin order.

    Each function starts when the turn first reaches it. One that returns or raises leaves the circle.
    """

    def __init__(self, functions: Sequence[Callable[[], Any]], *, head_start: int = 0) -> None:
        self._functions = functions
        self._head_start = head_start
        self._turn = 0
        self._running = set(range(len(functions)))
        self._outcomes: list[Any] = [None] * len(functions)
        self._changed = threading.Condition()
        self._local = threading.local()

    def run(self) -> list[Any]:
        """Run all to their ends.

        Returns:
            For each function what it returned, or the exception that it raised.
        """
        threads = [
            threading.Thread(target=self._one, args=(index,), daemon=True)
            for index in range(len(self._functions))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._outcomes

    def pass_on(self) -> None:
        """Let the next one move and wait for the own turn; the first keeps its first ``head_start``."""
        me = self._local.index
        if me == 0 and self._head_start > 0:
            self._head_start -= 1
            return
        with self._changed:
            self._hand_over(me)
            self._changed.wait_for(lambda: self._turn == me)

    def _one(self, index: int) -> None:
        self._local.index = index
        with self._changed:
            self._changed.wait_for(lambda: self._turn == index)
        try:
            self._outcomes[index] = self._functions[index]()
        except BaseException as error:  # noqa: BLE001  the outcome of a call is whatever it raised
            self._outcomes[index] = error
        with self._changed:
            self._running.discard(index)
            self._hand_over(index)

    def _hand_over(self, me: int) -> None:
        """Give the turn to the next that still runs; under the condition's lock."""
        if self._running:
            count = len(self._functions)
            self._turn = next(i % count for i in range(me + 1, me + 1 + count) if i % count in self._running)
            self._changed.notify_all()

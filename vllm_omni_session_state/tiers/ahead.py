"""Reading ahead: files of sessions whose next step is known come into host memory before it begins.

One at a time, by a thread of its own, and few are held: who asks for another one has the oldest forgotten.
A read that failed is as one that never began: who needs the session reads it then, and hears why it fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

MOST = 2
"""Sessions that are held: while one is read the one before it waits for its step."""

T = TypeVar("T")


class Sized(Protocol):
    """What is read, by its ticket."""

    @property
    def nbytes(self) -> int:
        """Of the file."""


K = TypeVar("K", bound=Sized)


class ReadAhead(Generic[K, T]):
    """Files that are read before they are asked for.

    Args:
        read: Reads one; called in the background.

    Attributes:
        taken: How many were there when they were asked for, or on their way.
    """

    def __init__(self, read: Callable[[K], T]) -> None:
        self.taken = 0
        self._read = read
        self._lock = threading.Lock()
        self._coming: dict[K, Future[T]] = {}  # oldest first
        self._reader: ThreadPoolExecutor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the files that are here or on their way."""
        with self._lock:
            return sum(ticket.nbytes for ticket in self._coming)

    def begin(self, ticket: K) -> None:
        """Begin to read a file, unless that has begun."""
        with self._lock:
            if ticket in self._coming:
                return
            while len(self._coming) >= MOST:
                self._coming.pop(next(iter(self._coming))).cancel()
            if self._reader is None:
                self._reader = ThreadPoolExecutor(1, thread_name_prefix="session-state-ahead")
            self._coming[ticket] = self._reader.submit(self._read, ticket)

    def take(self, ticket: K) -> T | None:
        """What was read; ``None`` if that has not begun or has failed. Waits for a read under way."""
        with self._lock:
            future = self._coming.pop(ticket, None)
        if future is None or future.cancel():
            return None
        try:
            content = future.result()
        except Exception:  # noqa: BLE001 - whoever asks reads it again, and hears of it
            return None
        self.taken += 1
        return content

    def drop(self, ticket: K) -> None:
        """Nobody will ask for it."""
        with self._lock:
            future = self._coming.pop(ticket, None)
        if future is not None:
            future.cancel()

    def close(self) -> None:
        """Forget all; returns when nothing is read any more."""
        with self._lock:
            coming, self._coming = list(self._coming.values()), {}
            reader, self._reader = self._reader, None
        for future in coming:
            future.cancel()
        if reader is not None:
            reader.shutdown()

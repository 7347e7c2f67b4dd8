"""Reading ahead: files of sessions whose next step is known come into host memory before it begins.

One at a time, by a thread of its own, and few are held: who asks for another one has the oldest forgotten.
A read that failed is as one that never began: who needs the session reads it then, and hears why it fails.
The thread is there while there is something to read, and no process waits for its end: a disk may hang.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from vllm_omni_session_state.base.log import LOGGER

MOST = 2
"""Sessions that are held: while one is read the one before it waits for its step."""

CLOSE_WAIT_S = 2.0
"""How long a close waits for a read under way: a worker that is told to end has seconds."""

K = TypeVar("K")
T = TypeVar("T")


class ReadAhead(Generic[K, T]):
    """Files that are read before they are asked for.

    Args:
        read: Reads one; called in the background.
        nbytes_of: The bytes of one.

    Attributes:
        taken: How many were there when they were asked for, or on their way.
    """

    def __init__(self, read: Callable[[K], T], nbytes_of: Callable[[K], int]) -> None:
        self.taken = 0
        self._nbytes_of = nbytes_of
        self._read = read
        self._lock = threading.Lock()
        self._coming: dict[K, Future[T]] = {}  # oldest first
        self._wanted: deque[tuple[K, Future[T]]] = deque()
        self._reader: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the files that are here or on their way."""
        with self._lock:
            return sum(map(self._nbytes_of, self._coming))

    def begin(self, ticket: K) -> None:
        """Begin to read a file, unless that has begun."""
        with self._lock:
            if ticket in self._coming:
                return
            while len(self._coming) >= MOST:
                self._coming.pop(next(iter(self._coming))).cancel()
            future = self._coming[ticket] = Future[T]()
            self._wanted.append((ticket, future))
            if self._reader is None:
                self._reader = threading.Thread(target=self._work, name="session-state-ahead", daemon=True)
                self._reader.start()

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
        """Forget all; returns when nothing is read any more, or a read under way takes too long."""
        with self._lock:
            coming, self._coming = list(self._coming.values()), {}
            reader = self._reader
        for future in coming:
            future.cancel()
        if reader is not None:
            reader.join(CLOSE_WAIT_S)
            if reader.is_alive():
                LOGGER.warning("a read of a parked session does not end: the disk tier is closed without it")

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._reader = None
                    return
                ticket, future = self._wanted.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._read(ticket))
                except BaseException as error:  # noqa: BLE001 - who waits for it must hear of it
                    future.set_exception(error)
            del ticket, future  # what was read is held by who asked for it, or by nobody

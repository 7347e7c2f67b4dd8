"""Where a worker's file of figures is: in memory, in a folder that is the user's alone, locked for life.

The lock goes with the process, however that ends: one that is free means a dead worker, and the next worker
that starts removes what it left. A forked child lets go of it, and leaves the file to its parent.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
import weakref
from collections.abc import Callable
from pathlib import Path

from vllm_omni_session_state.base.log import LOGGER
from vllm_omni_session_state.omni.stats_file.layout import Snapshot, UnreadableError, read_snapshot

BASE = "/dev/shm"  # noqa: S108 - what is made there is the user's alone, and that is looked at

_NAME = re.compile(r"[0-9]+-[0-9a-f]{32}", re.ASCII)
_TRIES = 4
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC


class OwnFile:
    """The file of this process.

    Attributes:
        path: Of it.

    Raises:
        OSError: If it cannot be made, or others could reach what is there.
    """

    def __init__(self) -> None:
        top = f"{BASE}/vllm-omni-session-state-{os.geteuid()}"
        Path(top).mkdir(0o700, exist_ok=True)
        self._pid = os.getpid()
        self._fds: list[int] = []
        try:
            self._top = self._opened(top, os.O_RDONLY | os.O_DIRECTORY)
            _refuse_shared(top, os.fstat(self._top), stat.S_ISDIR)
            _clean(top, self._top)
            self._name, lock = self._locked()
            # Opened once more: a mapping holds on to the open file that it maps, also in a forked child.
            self._fd = self._opened(self._name, os.O_RDWR, within=self._top)
        except BaseException:
            self._close()
            raise
        self.path = f"{top}/{self._name}"
        _locks[self] = lock

    def grow(self, nbytes: int) -> mmap.mmap:
        """The file's bytes, at least so many.

        Raises:
            OSError: If there is no room; it is as it was.
        """
        # A mapped byte that has no room when it is written is the end of the process.
        os.posix_fallocate(self._fd, 0, nbytes)
        return mmap.mmap(self._fd, nbytes)

    @property
    def ours(self) -> bool:
        """Whether this is the process that made it, not one that was forked from it."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """Remove it, and let go of the lock. Never raises."""
        if self.ours and _locks.pop(self, None) is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._top)
            self._close()

    def _locked(self) -> tuple[str, int]:
        """Make the file: its name, and the descriptor that holds the lock."""
        while True:
            name = f"{self._pid}-{secrets.token_hex(16)}"
            fd = self._opened(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, within=self._top)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return name, fd
            # A worker that cleans came before the lock, and has taken it for one of a dead worker.

    def _opened(self, name: str, how: int, *, within: int | None = None) -> int:
        self._fds.append(os.open(name, how | _OPEN, 0o600, dir_fd=within))
        return self._fds[-1]

    def _close(self) -> None:
        while self._fds:
            with contextlib.suppress(OSError):
                os.close(self._fds.pop())


_locks: weakref.WeakKeyDictionary[OwnFile, int] = weakref.WeakKeyDictionary()
"""The descriptors of this process that hold a lock."""


def _let_go_in_child() -> None:
    for fd in list(_locks.values()):
        with contextlib.suppress(OSError):
            os.close(fd)
    _locks.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


class WorkerFile:
    """The file of a worker, as another process of the same user and machine reads it; safe from any thread.

    Args:
        path: As the worker has told it.

    Attributes:
        path: The same.

    Raises:
        OSError: If it is not there, or not the user's alone: its worker is elsewhere.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _OPEN)
        self._closing = weakref.finalize(self, os.close, self._fd)
        try:
            _refuse_shared(path, os.fstat(self._fd), stat.S_ISREG)
        except BaseException:
            self._closing()
            raise

    @property
    def alive(self) -> bool:
        """Whether its worker lives: it has the lock."""
        return not _free(self._fd)

    def read(self, *, rows: bool) -> Snapshot:
        """What it says now.

        Raises:
            UnreadableError: If it is being written each time that one looks, or was damaged.
            OSError: If it cannot be read.
        """
        for _ in range(_TRIES - 1):
            with contextlib.suppress(UnreadableError):
                return self._read(rows=rows)
        return self._read(rows=rows)

    def _read(self, *, rows: bool) -> Snapshot:
        # Not mapped: who reads beyond the end of a mapped file that was cut is ended.
        return read_snapshot(lambda nbytes, at: os.pread(self._fd, nbytes, at), rows=rows)


def _clean(top: str, top_fd: int) -> None:
    """Remove the files of workers that are gone; what resists stays."""
    for name in filter(_NAME.fullmatch, os.listdir(top_fd)):
        with contextlib.suppress(OSError):
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=top_fd)
            try:
                if _free(fd, keep=True):
                    os.unlink(name, dir_fd=top_fd)
                    LOGGER.debug("removed the figures that a dead worker left in %s/%s", top, name)
            finally:
                os.close(fd)


def _free(fd: int, *, keep: bool = False) -> bool:
    """Whether nobody has the lock; with ``keep`` it is this process's then."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if keep else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if not keep:
        fcntl.flock(fd, fcntl.LOCK_UN)
    return True


def _refuse_shared(path: str, status: os.stat_result, kind: Callable[[int], bool]) -> None:
    """Refuse what is another user's, what others can reach, and what is of another kind."""
    if not kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{path} is of user {status.st_uid}, with mode {status.st_mode:06o}: it must be this user's alone"
        )

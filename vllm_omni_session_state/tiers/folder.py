"""A worker's own folder below the deployment's: locked for life, and what dead workers left is cleaned.

Under the deployment's lock, which is held for the start alone, a worker cleans, makes its folder and locks
it; so no other sees a folder that is not yet locked. The lock goes with the process, however that ends.

``System`` is the one place through which the disk tier reaches the file system.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator

from vllm_omni_session_state.errors import TierFaultError
from vllm_omni_session_state.events import LOGGER

LOCK_WAIT_S = 30.0
"""How long a starting worker waits for others that start at the same time."""

KEPT = "kept-"
"""How the folder of a worker that was told to keep its sessions begins."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_WORKER = re.compile(r"worker-[0-9a-f]{32}", re.ASCII)

_REMEDIES = {
    errno.ENOSPC: "free space on its file system, or lower disk.budget",
    errno.EDQUOT: "raise the user's quota, or lower disk.budget",
    errno.ENOENT: "somebody removed it while it was in use: leave it alone, and start the server anew",
    errno.ELOOP: "a link stands in its place: remove the link, and find out who made it",
    errno.EACCES: "let the server's user read and write there",
    errno.EPERM: "let the server's user read and write there",
    errno.EROFS: "mount its file system for writing, or choose another disk.path",
    errno.EAGAIN: "another worker that starts holds its lock: look for one that hangs",
}


def _names(fd: int) -> list[str]:
    return os.listdir(fd)


class System:
    """The system calls of the tier."""

    makedirs = staticmethod(os.makedirs)
    mkdir = staticmethod(os.mkdir)
    open = staticmethod(os.open)
    close = staticmethod(os.close)
    fstat = staticmethod(os.fstat)
    flock = staticmethod(fcntl.flock)
    listdir = staticmethod(_names)
    write = staticmethod(os.write)
    readv = staticmethod(os.readv)
    fsync = staticmethod(os.fsync)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    rmdir = staticmethod(os.rmdir)


@contextlib.contextmanager
def trying(purpose: str, file: str) -> Iterator[None]:
    """Turn an ``OSError`` into a ``TierFaultError`` that says what was tried, on what, and what to do."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "look after the disk, or choose another disk.path")
        why = f"{errno.errorcode.get(error.errno or 0, 'error')}, {error.strerror or error}"
        raise TierFaultError(purpose, file=file, why=why, remedy=remedy) from error


class Folder:
    """This process's folder.

    Args:
        path: The deployment's folder; made where it is missing.

    Attributes:
        path: The worker's folder.
        fd: Its descriptor, to which names are relative.

    Raises:
        TierFaultError: If it cannot be made or locked, or if other users could change what is in it.
    """

    def __init__(self, path: str) -> None:
        self.top = os.path.realpath(path)
        name = f"worker-{secrets.token_hex(16)}"
        self.path = f"{self.top}/{name}"
        self._name = name
        self._owner = os.getpid()
        with contextlib.ExitStack() as undo, trying("open the disk tier", self.top):
            System.makedirs(self.top, mode=0o700, exist_ok=True)
            self._top_fd = System.open(self.top, _FOLDER)
            undo.callback(close_quietly, self._top_fd)
            _refuse_shared(self.top, System.fstat(self._top_fd))
            _lock_within(self._top_fd, LOCK_WAIT_S)
            _clean(self.top, self._top_fd)
            System.mkdir(name, 0o700, dir_fd=self._top_fd)
            undo.callback(self._rmdir_quietly)
            self.fd = System.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self._top_fd)
            undo.callback(close_quietly, self.fd)
            _locked(self.fd, last=True)
            System.flock(self._top_fd, fcntl.LOCK_UN)
            undo.pop_all()

    @property
    def ours(self) -> bool:
        """Whether this is the process that made it, not one that was forked from it."""
        return os.getpid() == self._owner

    def remove(self) -> None:
        """Remove the folder with all that is in it, and let go of the lock.

        Raises:
            TierFaultError: If something stays; the lock is let go of, and the next worker cleans.
        """
        try:
            if self.ours:
                with trying("close the disk tier", self.path), contextlib.suppress(FileNotFoundError):
                    _empty(self.fd)
                    System.rmdir(self._name, dir_fd=self._top_fd)
        finally:
            close_quietly(self.fd)
            close_quietly(self._top_fd)

    def keep(self) -> str:
        """Leave the folder with all that is in it, under a name that nobody cleans; let go of the lock.

        Returns:
            Its path.

        Raises:
            TierFaultError: If it cannot be renamed; the next worker cleans it.
        """
        name = self._name.replace("worker-", KEPT)
        try:
            with trying("keep the sessions on the disk", self.path):
                System.rename(self._name, name, src_dir_fd=self._top_fd, dst_dir_fd=self._top_fd)
                System.fsync(self._top_fd)
        finally:
            close_quietly(self.fd)
            close_quietly(self._top_fd)
        return f"{self.top}/{name}"

    def _rmdir_quietly(self) -> None:
        with contextlib.suppress(OSError):
            System.rmdir(self._name, dir_fd=self._top_fd)


def close_quietly(fd: int) -> None:
    """Close a descriptor of which nothing more is expected."""
    with contextlib.suppress(OSError):
        System.close(fd)


def _refuse_shared(path: str, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise TierFaultError(
            "open the disk tier",
            file=path,
            why=f"user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}: others can write there",
            remedy="name one in disk.path that is not there yet; the server makes it for its user alone",
        )


def _lock_within(fd: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not _locked(fd, last=time.monotonic() > end):
        time.sleep(0.01)


def _locked(fd: int, *, last: bool = False) -> bool:
    """Whether the lock could be had; ``last``: raise where it could not."""
    try:
        System.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if last:
            raise
        return False
    return True


def _clean(top: str, top_fd: int) -> None:
    """Remove the folders of workers that are gone; what resists is said and left. The top is locked."""
    for name in System.listdir(top_fd):
        if not _WORKER.fullmatch(name):
            continue
        try:
            _clean_one(name, top, top_fd)
        except OSError as error:
            LOGGER.warning("what a dead worker left in %s/%s cannot be removed: %s", top, name, error)


def _clean_one(name: str, top: str, top_fd: int) -> None:
    fd = System.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=top_fd)
    try:
        if not _locked(fd):
            return  # its worker lives
        files = _empty(fd)
        System.rmdir(name, dir_fd=top_fd)
        LOGGER.info("removed %d files that a dead worker left in %s/%s", files, top, name)
    finally:
        close_quietly(fd)


def _empty(fd: int) -> int:
    names = System.listdir(fd)
    for name in names:
        System.unlink(name, dir_fd=fd)
    return len(names)

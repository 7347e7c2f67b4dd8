"""The one place through which the disk tier reaches the file system, and what its faults say.

A folder that is opened here is closed in a child that this process forks: a lock goes with the last
descriptor of the open file, and a helper that outlives its worker would hold it. ``O_CLOEXEC`` is for who
executes another program, and does not help there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

from vllm_omni_session_state.base.errors import TierFaultError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""How a file system says that it has no room."""

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
    stat = staticmethod(os.stat)
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


def close_quietly(fd: int) -> None:
    """Close a descriptor of which nothing more is expected."""
    with contextlib.suppress(OSError):
        System.close(fd)


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_folders: set[int] = set()  # descriptors of this process that may hold a lock


def open_folder(name: str, *, within: int | None = None) -> int:
    """Open a folder to lock it, or to reach what is in it; ``close_folder()`` ends that.

    Args:
        name: Its path, or its name in another one, where it is no link.
        within: The descriptor of the other one.

    Raises:
        OSError: If it cannot be opened.
    """
    fd = System.open(name, _FOLDER | (0 if within is None else os.O_NOFOLLOW), dir_fd=within)
    _folders.add(fd)
    return fd


def close_folder(fd: int) -> None:
    """Close it, and let go of its lock. One that was closed is left alone, as in a forked child."""
    if fd in _folders:
        _folders.discard(fd)
        close_quietly(fd)


def _close_in_child() -> None:
    while _folders:
        with contextlib.suppress(OSError):
            os.close(_folders.pop())


os.register_at_fork(after_in_child=_close_in_child)

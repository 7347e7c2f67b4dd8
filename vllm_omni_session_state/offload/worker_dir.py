"""A worker's own folder below the deployment's: locked for life, and what dead workers left is cleaned.

Under the deployment's lock, which is held for the start alone, a worker cleans, makes its folder and locks
it; so no other sees a folder with files that is not yet locked. The lock goes with the process, however that
ends.

Workers that share the deployment's folder are numbered: one that starts takes the lowest number that no
living worker has. What an earlier worker of that number kept counts towards its budget. A folder that is to
be kept has the name for it from its start on: a process that is killed at any instant leaves what it parked.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import secrets
import stat
import time

from vllm_omni_session_state.base.errors import TierFaultError
from vllm_omni_session_state.base.log import LOGGER
from vllm_omni_session_state.offload.file_format import PART
from vllm_omni_session_state.offload.file_system import System, close_folder, open_folder, trying
from vllm_omni_session_state.offload.kept_folders import KEPT, KeptFolders, empty, lives

LOCK_WAIT_S = 30.0
"""How long a starting worker waits for others that start at the same time."""

_WORKER = "worker-"
_NAME = re.compile(rf"(?:{_WORKER}|{KEPT})(?:([0-9]{{1,9}})-)?[0-9a-f]{{32}}")


class WorkerDir:
    """This process's folder.

    Args:
        path: The deployment's folder; made where it is missing.
        keep: Whether what is in it stays when its worker is gone.

    Attributes:
        path: The worker's folder.
        fd: Its descriptor, to which names are relative.
        kept: What earlier workers of its number kept.

    Raises:
        TierFaultError: If it cannot be made or locked, or if other users could change what is in it.
    """

    def __init__(self, path: str, *, keep: bool) -> None:
        self.top = os.path.realpath(path)
        self._owner = os.getpid()
        with contextlib.ExitStack() as undo, trying("open the disk tier", self.top):
            System.makedirs(self.top, mode=0o700, exist_ok=True)
            self._top_fd = open_folder(self.top)
            undo.callback(close_folder, self._top_fd)
            _refuse_shared(self.top, System.fstat(self._top_fd))
            _lock_within(self._top_fd, LOCK_WAIT_S)
            living = _clean(self.top, self._top_fd)
            number = next(each for each in itertools.count() if each not in living)
            self._name = f"{KEPT if keep else _WORKER}{number}-{secrets.token_hex(16)}"
            self.path = f"{self.top}/{self._name}"
            self.kept = KeptFolders(self.top, self._top_fd, number=number)
            self.kept.yielding(lambda: System.mkdir(self._name, 0o700, dir_fd=self._top_fd))
            undo.callback(self._rmdir_quietly)
            self.fd = open_folder(self._name, within=self._top_fd)
            undo.callback(close_folder, self.fd)
            _locked(self.fd, last=True)
            if keep:
                System.fsync(self._top_fd)
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
                    empty(self.fd)
                    System.rmdir(self._name, dir_fd=self._top_fd)
        finally:
            self.leave()

    def leave(self) -> None:
        """Let go of the lock. What is in the folder stays; the next worker cleans it, unless it is kept."""
        if self.ours:
            close_folder(self.fd)
            close_folder(self._top_fd)

    def _rmdir_quietly(self) -> None:
        with contextlib.suppress(OSError):
            System.rmdir(self._name, dir_fd=self._top_fd)


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


def _clean(top: str, top_fd: int) -> set[int]:
    """Remove what dead workers left and did not keep; what resists is said and left. The top is locked.

    Returns:
        The numbers of those that live.
    """
    living = set()
    for name in System.listdir(top_fd):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        try:
            if not _clean_one(name, top, top_fd) and match[1]:
                living.add(int(match[1]))
        except OSError as error:
            LOGGER.warning("what a dead worker left in %s/%s cannot be removed: %s", top, name, error)
    return living


def _clean_one(name: str, top: str, top_fd: int) -> bool:
    """Clean one folder; whether its worker is dead. Of one that is kept only files without an end go."""
    fd = open_folder(name, within=top_fd)
    try:
        if lives(fd):
            return False
        files = empty(fd, ending=PART if name.startswith(KEPT) else "")
        if not System.listdir(fd):
            System.rmdir(name, dir_fd=top_fd)
        if files:
            LOGGER.info("removed %d files that a dead worker left in %s/%s", files, top, name)
        return True
    finally:
        close_folder(fd)

"""A worker's own folder below the deployment's, locked for life, and what dead workers left beside it.

Under the deployment's lock, which is held for the start alone, a worker cleans, makes its folder and locks
it; so no other sees a folder with files that is not yet locked. The lock goes with the process, however that
ends. Workers are numbered: one that starts takes the lowest number that no living worker has.

A folder that is to be kept has the name for it from its start on: a process that is killed at any instant
leaves what it parked. Nobody takes kept sessions up yet, so they yield to whatever lives. A kept folder
counts towards the budget of the worker that has its number, and is removed before the files of that one need
the room, the oldest first. Where the file system itself is full the oldest of all goes. So a kept folder
never refuses a session: one that resists is said, and stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from vllm_omni_session_state.base.errors import TierFaultError
from vllm_omni_session_state.base.log import LOGGER, log_once
from vllm_omni_session_state.offload.file_format import PART
from vllm_omni_session_state.offload.file_system import FULL, System, close_folder, open_folder, trying

LOCK_WAIT_S = 30.0
"""How long a starting worker waits for others that start at the same time."""

_KEPT = "kept-"
_NAME = re.compile(rf"(worker-|{_KEPT})(?:([0-9]{{1,9}})-)?[0-9a-f]{{32}}")
"""Of a folder; one of an earlier version has no number and counts as 0."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept:
    """One folder.

    Attributes:
        name: In the deployment's folder.
        nbytes: Of its files.
        written: When the newest of them was, in nanoseconds; the file system's clock.
    """

    name: str
    nbytes: int
    written: int


class KeptFolders:
    """Those that count towards one worker's budget.

    Args:
        top: The deployment's folder.
        top_fd: Its descriptor.
        number: The worker's.
    """

    def __init__(self, top: str, top_fd: int, *, number: int) -> None:
        self._top = top
        self._top_fd = top_fd
        self._lock = threading.Lock()
        self._held = self._found(number)  # oldest first

    @property
    def nbytes(self) -> int:
        """Bytes of their files."""
        return sum(each.nbytes for each in list(self._held))

    def shrink(self, most: int) -> None:
        """Remove the oldest until the others have at most so many bytes. Never raises."""
        with self._lock:
            for each in list(self._held):
                if self.nbytes <= most:
                    return
                self._remove(each)

    def yielding(self, act: Callable[[], T]) -> T:
        """Do what may find the file system full; while it does, the oldest folder of all goes.

        Raises:
            OSError: As ``act()`` did, when nothing kept is left.
            TierFaultError: As well.
        """
        while True:
            try:
                return act()
            except (OSError, TierFaultError) as error:  # noqa: PERF203 - it is done again after each of them
                if not (_says_full(error) and self._remove_oldest()):
                    raise

    def check(self) -> None:
        """Assert that no folder has more bytes than are counted. An expensive no-op."""
        for each in self._held:
            there = 0
            with contextlib.suppress(FileNotFoundError), os.scandir(f"{self._top}/{each.name}") as entries:
                there = sum(entry.stat().st_size for entry in entries)
            assert there <= each.nbytes, "kept bytes that are not counted"

    def _remove_oldest(self) -> bool:
        with self._lock:
            try:
                return any(map(self._remove, self._found(None)))
            except OSError:
                return False

    def _found(self, number: int | None) -> list[Kept]:
        """Folders of workers that are gone, oldest first: with that number, or all of them."""
        found = []
        for name in System.listdir(self._top_fd):
            match = _NAME.fullmatch(name)
            if match is None or match[1] != _KEPT or number not in (None, int(match[2] or 0)):
                continue
            try:
                each = _look(name, self._top_fd)
            except OSError as error:
                self._say("look at", name, error)
                continue
            if each is not None:
                found.append(each)
        return sorted(found, key=lambda each: (each.written, each.name))

    def _remove(self, each: Kept) -> bool:
        """Whether a folder is gone; never raises."""
        try:
            if _clear(each.name, self._top_fd) is None:
                return False
        except FileNotFoundError:  # gone is gone
            pass
        except OSError as error:
            self._say("remove", each.name, error)
            return False
        LOGGER.info("removed %s/%s, which a dead worker kept: its room is wanted", self._top, each.name)
        self._held = [other for other in self._held if other.name != each.name]
        return True

    def _say(self, purpose: str, name: str, error: OSError) -> None:
        log_once(
            logging.WARNING,
            ("kept", purpose, str(error.errno)),
            "cannot %s %s/%s, which a dead worker kept: %s. It refuses nobody, and disk.budget is exceeded",
            purpose,
            self._top,
            name,
            error.strerror,
        )


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
            self._name = f"{_KEPT if keep else 'worker-'}{number}-{secrets.token_hex(16)}"
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
                    _empty(self.fd)
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
            files = _clear(name, top_fd, ending=PART if match[1] == _KEPT else "")
            if files is None and match[2]:
                living.add(int(match[2]))
            if files:
                LOGGER.info("removed %d files that a dead worker left in %s/%s", files, top, name)
        except OSError as error:
            LOGGER.warning("what a dead worker left in %s/%s cannot be removed: %s", top, name, error)
    return living


def _clear(name: str, top_fd: int, *, ending: str = "") -> int | None:
    """Remove a dead worker's files whose names end like that, and its folder once nothing is in it.

    Returns:
        How many files these were; ``None`` if its worker lives, and nothing was removed.
    """
    fd = open_folder(name, within=top_fd)
    try:
        if _lives(fd):
            return None
        files = _empty(fd, ending=ending)
        if not ending or not System.listdir(fd):
            System.rmdir(name, dir_fd=top_fd)
        return files
    finally:
        close_folder(fd)


def _says_full(error: OSError | TierFaultError) -> bool:
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in FULL


def _lives(fd: int) -> bool:
    """Whether the worker of that folder is alive: it alone holds the lock for itself."""
    try:
        System.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _empty(fd: int, *, ending: str = "") -> int:
    """Remove a folder's files whose names end like that; how many these were."""
    names = [name for name in System.listdir(fd) if name.endswith(ending)]
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # another worker is at it too
            System.unlink(name, dir_fd=fd)
    return len(names)


def _look(name: str, top_fd: int) -> Kept | None:
    """A dead worker's folder; ``None`` if its worker lives, or nothing is in it."""
    fd = open_folder(name, within=top_fd)
    try:
        files = []
        for file in System.listdir(fd):
            with contextlib.suppress(FileNotFoundError):
                files.append(System.stat(file, dir_fd=fd, follow_symlinks=False))
        if not files or _lives(fd):  # in this order: one that is being made is empty, and is not locked here
            return None
        return Kept(name, sum(file.st_size for file in files), max(file.st_mtime_ns for file in files))
    finally:
        close_folder(fd)

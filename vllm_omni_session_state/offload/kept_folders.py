"""Folders that dead workers kept: nobody takes their sessions up yet, so they yield to whatever lives.

A folder counts towards the budget of the worker that has its number, beside that worker's own files. Before
these need its room it is removed, the oldest first. Where the file system itself is full the oldest of all
goes, whatever its number. So a kept folder never refuses a session: one that resists is said, and stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from vllm_omni_session_state.base.errors import TierFaultError
from vllm_omni_session_state.base.log import LOGGER, log_once
from vllm_omni_session_state.offload.file_system import FULL, System, close_folder, open_folder

KEPT = "kept-"
"""How the folder of a worker that is told to keep its sessions begins, from its start on."""

_NAME = re.compile(KEPT + r"(?:([0-9]{1,9})-)?[0-9a-f]{32}")

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
        number: The worker's. A folder of an earlier version has none and counts as 0.
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
            if match is None or number not in (None, int(match[1] or 0)):
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
            fd = open_folder(each.name, within=self._top_fd)
            try:
                if lives(fd):
                    return False
                empty(fd)
                System.rmdir(each.name, dir_fd=self._top_fd)
            finally:
                close_folder(fd)
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


def _says_full(error: OSError | TierFaultError) -> bool:
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in FULL


def lives(fd: int) -> bool:
    """Whether the worker of that folder is alive: it alone holds the lock for itself."""
    try:
        System.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def empty(fd: int, *, ending: str = "") -> int:
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
        if not files or lives(fd):  # in this order: one that is being made is empty, and is not locked here
            return None
        return Kept(name, sum(file.st_size for file in files), max(file.st_mtime_ns for file in files))
    finally:
        close_folder(fd)

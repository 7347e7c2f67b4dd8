"""The disk tier: parked sessions as files in a folder of the worker's own, bounded by a budget.

A file has its final name only when all of it is on the disk. What comes back is verified, byte for byte,
before anybody sees it. Names are random and hold no id. A fault changes nothing: what the tier held it
holds, and what it could not write is not there.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from vllm_omni_session_state.base.errors import BadFileError, TierFaultError, TierFullError
from vllm_omni_session_state.base.log import LOGGER, log_once
from vllm_omni_session_state.offload import file_format
from vllm_omni_session_state.offload.file_format import PART, SUFFIX, Contents
from vllm_omni_session_state.offload.file_system import System
from vllm_omni_session_state.offload.memory import Memory, views_of
from vllm_omni_session_state.offload.read_ahead import ReadAhead
from vllm_omni_session_state.offload.schema import Tree
from vllm_omni_session_state.offload.worker_dir import WorkerDir

FIGURES = ("disk_nbytes", "kept_nbytes", "ahead_nbytes", "restores_ahead")
"""Bytes of files, of what earlier workers kept and of what was read ahead; restores that were read ahead."""


@dataclass(frozen=True, slots=True, eq=False)
class FileAllocation:
    """One parked session's file.

    Attributes:
        name: Of the file, in the worker's folder.
        session: The session's hashed identity.
        nbytes: Of the file.
        checksum: Of its header.
    """

    name: str
    session: str
    nbytes: int
    checksum: str


class DiskTier:
    """Files in a folder that is this process's alone.

    Args:
        path: The deployment's folder, which its workers share; made where it is missing.
        budget: Bytes of files of this worker, and of what earlier ones of its number kept.
        keep: Whether what is there stays when this is closed, or its process killed.

    Attributes:
        nbytes: Bytes of the files that are there.
        ahead: What was read, or is being read, before it is asked for.
        closed: Whether nothing can be done with it any more.

    Raises:
        TierFaultError: If the folder cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], *, budget: int, keep: bool = False) -> None:
        self.budget = budget
        self.keep = keep
        self.nbytes = 0
        self._folder = WorkerDir(os.fspath(path), keep=keep)
        self._folder.kept.shrink(budget)
        self._lock = threading.Lock()
        self._tickets: dict[str, FileAllocation] = {}
        self._strays: dict[str, int] = {}  # charges of files that are nobody's and could not be removed yet
        self.ahead = ReadAhead(self._read_back, attrgetter("nbytes"))
        self.closed = False

    @property
    def folder(self) -> str:
        """The worker's folder."""
        return self._folder.path

    @property
    def room(self) -> int:
        """Bytes that are left; what earlier workers kept goes before it is wanted."""
        return self.budget - self.nbytes

    @staticmethod
    def charge(nbytes: int) -> int:
        """What a session of so many declared bytes is charged where ranks must agree."""
        return nbytes

    def figures(self) -> dict[str, int]:
        """See ``FIGURES``."""
        figures = (self.nbytes, self._folder.kept.nbytes, self.ahead.nbytes, self.ahead.taken)
        return dict(zip(FIGURES, figures, strict=True))

    def put(
        self,
        tree: Tree,
        pieces: Sequence[Memory | torch.Tensor],
        *,
        session: str,
        overdraft: int = 0,
    ) -> FileAllocation:
        """Write a session's file; when this returns it survives a crash of the machine.

        Args:
            tree: The session's values.
            pieces: The memory that it names, in host memory; a tensor is contiguous uint8, ``(nbytes,)``.
            session: The session's hashed identity; a file of another one is refused later.
            overdraft: Bytes of a file that goes right after: by so much the budget may be exceeded meanwhile.

        Raises:
            TierFullError: If the budget has no room.
            TierFaultError: If it cannot be written. After either, nothing has changed.
        """
        self._refuse_strangers("write a parked session")
        views = views_of(pieces)
        head, checksum = file_format.compose(tree, views, session=session)
        wanted = len(head) + sum([view.nbytes for view in views])
        with self._lock:
            if wanted > self.room + overdraft:
                raise TierFullError("disk", wanted=wanted, room=max(0, self.room), setting="disk.budget")
            self.nbytes += wanted
        try:
            self._folder.kept.shrink(self.budget - self.nbytes)
            name = self._folder.kept.yielding(lambda: self._write([memoryview(head), *views]))
        except BaseException:
            with self._lock:
                self.nbytes -= wanted
            raise
        ticket = FileAllocation(name, session, wanted, checksum)
        with self._lock:
            self._tickets[name] = ticket
        return ticket

    def get(self, ticket: FileAllocation) -> Contents:
        """Read a session's file back; it stays until ``drop()``.

        Raises:
            BadFileError: If a bit of it is not as it was written, or it is another file.
            TierFaultError: If it cannot be read.
            MemoryError: If the machine has no room. After any, nothing has changed.
            KeyError: If it is not of this tier or was dropped already.
        """
        self._refuse_strangers("read a parked session")
        self._known(ticket)
        contents = self.ahead.take(ticket)
        return self._read_back(ticket) if contents is None else contents

    def begin(self, ticket: FileAllocation) -> bool:
        """Read a session's file in the background, for a ``get()`` that comes soon.

        Returns:
            Whether it is being read; not of a ticket that is good no more.
        """
        with self._lock:
            if self.closed or not self._folder.ours or self._tickets.get(ticket.name) is not ticket:
                return False
            self.ahead.begin(ticket)
        return True

    def drop(self, ticket: FileAllocation) -> None:
        """Let go of a session's file. One that cannot be removed counts until it is: said once, tried again.

        A tier that is closed, or of the process that this one was forked from, is left alone.

        Raises:
            KeyError: If it is not of this tier or was dropped already.
        """
        if self.closed or not self._folder.ours:
            return
        self._known(ticket)
        with self._lock:
            del self._tickets[ticket.name]
            self._strays[ticket.name] = ticket.nbytes
        self.ahead.drop(ticket)
        self._remove_strays()

    def check(self) -> None:
        """Assert that the charge equals the files', and that they and no others are there."""
        held = sum(ticket.nbytes for ticket in self._tickets.values())
        assert self.nbytes == held + sum(self._strays.values()), "disk tier charge"
        there = {entry.name: entry.stat().st_size for entry in os.scandir(self.folder)}
        claimed = {ticket.name: ticket.nbytes for ticket in self._tickets.values()}
        assert {name: size for name, size in there.items() if name not in self._strays} == claimed, (
            "disk tier files"
        )
        self._folder.kept.check()

    def close(self) -> None:
        """Remove all files and the folder, or leave those that ``keep`` says. A second call does nothing.

        What interrupts it interrupts a wait only: the lock is let go of, and what is kept stays.

        Raises:
            TierFaultError: If something could not be removed; the next worker that starts here does it.
        """
        if self.closed:
            return
        self.closed = True
        kept = self.keep and bool(self._tickets)
        try:
            self.ahead.close()
            if kept and self._folder.ours:
                self._remove_strays()
                LOGGER.info("parked sessions are kept in %s", self.folder)
        finally:
            if self._folder.ours:
                self._tickets.clear()
                self.nbytes = 0
            if kept:
                self._folder.leave()
            else:
                self._folder.remove()

    def _read_back(self, ticket: FileAllocation) -> Contents:
        file = f"{self.folder}/{ticket.name}"
        contents = file_format.read(ticket.name, folder=self._folder.fd, file=file)
        if contents.manifest.session != ticket.session:
            raise BadFileError("it is of another session", file=file)
        if contents.checksum != ticket.checksum:
            raise BadFileError("it is another file than was written there", file=file)
        return contents

    def _known(self, ticket: FileAllocation) -> None:
        if self._tickets.get(ticket.name) is not ticket:
            raise KeyError(ticket.name)

    def _refuse_strangers(self, purpose: str) -> None:
        if self.closed or not self._folder.ours:
            why = (
                "the tier is closed" if self.closed else "it is of the process that this one was forked from"
            )
            remedy = "open a tier of this process's own"
            raise TierFaultError(purpose, file=self.folder, why=why, remedy=remedy)

    def _write(self, pieces: Sequence[memoryview]) -> str:
        name = secrets.token_hex(16) + SUFFIX
        self._remove_strays()
        try:
            file_format.write(name, pieces, folder=self._folder.fd, file=f"{self.folder}/{name}")
        except BaseException:
            with self._lock:
                self._strays.update({name + PART: 0, name: 0})
            self._remove_strays()
            raise
        return name

    def _remove_strays(self) -> None:
        """Remove what is nobody's. Never raises; what resists is tried again at the next write or drop."""
        with self._lock:
            for name in list(self._strays):
                try:
                    System.unlink(name, dir_fd=self._folder.fd)
                except FileNotFoundError:  # gone is gone
                    pass
                except OSError as error:
                    why = f"cannot remove {self.folder}/{name}, which nobody needs: {error.strerror}"
                    log_once(
                        logging.WARNING, ("stray", str(error.errno)), "%s. It counts until that works", why
                    )
                    continue
                self.nbytes -= self._strays.pop(name)

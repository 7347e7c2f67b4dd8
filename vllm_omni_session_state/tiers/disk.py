"""The disk tier: parked sessions as files in a folder of the worker's own, bounded by a budget.

A file has its final name only when all of it is on the disk. What comes back is verified, byte for byte,
before anybody sees it. Names are random and hold no id. A fault changes nothing: what the tier held it
holds, and what it could not write is not there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_omni_session_state.errors import BadFileError, TierFaultError, TierFullError
from vllm_omni_session_state.events import LOGGER, say_once
from vllm_omni_session_state.tiers import session_file
from vllm_omni_session_state.tiers.ahead import ReadAhead
from vllm_omni_session_state.tiers.folder import Folder, System, close_quietly, trying
from vllm_omni_session_state.transfer import host_memory

SUFFIX = ".safetensors"
PART = ".part"

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
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
    checksum: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file holds, verified.

    Attributes:
        document: The skeleton's document.
        storages: New ones, in host memory.
    """

    document: Any
    storages: list[torch.UntypedStorage]


class DiskTier:
    """Files in a folder that is this process's alone.

    Args:
        path: The deployment's folder, which its workers share; made where it is missing.
        budget: Bytes of files of this worker.
        keep: Whether what is there stays when this is closed.

    Attributes:
        nbytes: Bytes of the files that are there.
        ahead: What was read, or is being read, before it is asked for.

    Raises:
        TierFaultError: If the folder cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], *, budget: int, keep: bool = False) -> None:
        self.budget = budget
        self.keep = keep
        self.nbytes = 0
        self._folder = Folder(os.fspath(path))
        self._lock = threading.Lock()
        self._tickets: dict[str, Ticket] = {}
        self._strays: dict[str, int] = {}  # charges of files that are nobody's and could not be removed yet
        self.ahead = ReadAhead(self._read_back)
        self._closed = False

    @property
    def folder(self) -> str:
        """The worker's folder."""
        return self._folder.path

    @property
    def room(self) -> int:
        """Bytes that are left."""
        return self.budget - self.nbytes

    def put(
        self,
        document: Any,
        storages: Sequence[torch.UntypedStorage | torch.Tensor],
        *,
        session: str,
        lent: int = 0,
    ) -> Ticket:
        """Write a session's file; when this returns it survives a crash of the machine.

        Args:
            document: The skeleton's document, plain JSON.
            storages: In host memory: storages, or contiguous uint8 tensors, ``(nbytes,)`` each.
            session: The session's hashed identity; a file of another one is refused later.
            lent: Bytes of a file that goes right after: by so much the budget may be exceeded meanwhile.

        Raises:
            TierFullError: If the budget has no room.
            TierFaultError: If it cannot be written. After either, nothing has changed.
        """
        self._refuse_strangers("write a parked session")
        views = [_view(storage) for storage in storages]
        head = session_file.compose(document, views, session=session)
        wanted = len(head) + sum(view.nbytes for view in views)
        with self._lock:
            if wanted > self.room + lent:
                raise TierFullError("disk", wanted=wanted, room=max(0, self.room), setting="disk.budget")
            self.nbytes += wanted
        try:
            name = self._write([memoryview(head), *views])
        except BaseException:
            with self._lock:
                self.nbytes -= wanted
            raise
        checksum = session_file.parse(head, wanted, file=name).checksum
        ticket = Ticket(name, session, wanted, checksum)
        with self._lock:
            self._tickets[name] = ticket
        return ticket

    def get(self, ticket: Ticket) -> Contents:
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

    def begin(self, ticket: Ticket) -> bool:
        """Read a session's file in the background, for a ``get()`` that comes soon.

        Returns:
            Whether it is being read; not of a ticket that is good no more.
        """
        with self._lock:
            if self._closed or not self._folder.ours or self._tickets.get(ticket.name) is not ticket:
                return False
            self.ahead.begin(ticket)
        return True

    def drop(self, ticket: Ticket) -> None:
        """Let go of a session's file. One that cannot be removed counts until it is: said once, tried again.

        A tier that is closed, or of the process that this one was forked from, is left alone.

        Raises:
            KeyError: If it is not of this tier or was dropped already.
        """
        if self._closed or not self._folder.ours:
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

    def close(self) -> None:
        """Remove all files and the folder, or leave those that ``keep`` says. A second call does nothing.

        Raises:
            TierFaultError: If something could not be removed; the next worker that starts here does it.
        """
        if not self._closed:
            self._closed = True
            self.ahead.close()
            kept = self.keep and self._folder.ours and bool(self._tickets)
            if self._folder.ours:
                self._tickets.clear()
                self.nbytes = 0
            if not kept:
                self._folder.remove()
                return
            self._remove_strays()
            LOGGER.info("parked sessions are kept in %s", self._folder.keep())

    def _read_back(self, ticket: Ticket) -> Contents:
        file = f"{self.folder}/{ticket.name}"
        with _opened(ticket.name, file=file, folder=self._folder.fd) as fd:
            header, contents = _read(fd, file=file)
        if header.session != ticket.session:
            raise BadFileError("it is of another session", file=file)
        if header.checksum != ticket.checksum:
            raise BadFileError("it is another file than was written there", file=file)
        return contents

    def _known(self, ticket: Ticket) -> None:
        if self._tickets.get(ticket.name) is not ticket:
            raise KeyError(ticket.name)

    def _refuse_strangers(self, purpose: str) -> None:
        if self._closed or not self._folder.ours:
            why = (
                "the tier is closed" if self._closed else "it is of the process that this one was forked from"
            )
            remedy = "open a tier of this process's own"
            raise TierFaultError(purpose, file=self.folder, why=why, remedy=remedy)

    def _write(self, pieces: Sequence[memoryview]) -> str:
        name = secrets.token_hex(16) + SUFFIX
        part = name + PART
        self._remove_strays()
        with trying("write a parked session", f"{self.folder}/{name}"):
            try:
                fd = System.open(part, _NEW, 0o600, dir_fd=self._folder.fd)
                try:
                    for piece in pieces:
                        _write_all(fd, piece, file=f"{self.folder}/{part}")
                    System.fsync(fd)
                except BaseException:
                    close_quietly(fd)
                    raise
                System.close(fd)  # some file systems tell only here that there is no room
                System.rename(part, name, src_dir_fd=self._folder.fd, dst_dir_fd=self._folder.fd)
                System.fsync(self._folder.fd)
            except BaseException:
                with self._lock:
                    self._strays.update({part: 0, name: 0})
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
                    say_once(
                        logging.WARNING, ("stray", str(error.errno)), "%s. It counts until that works", why
                    )
                    continue
                self.nbytes -= self._strays.pop(name)


def read_file(path: str | os.PathLike[str]) -> Contents:
    """What a session's file holds, for somebody without a ticket.

    Raises:
        BadFileError: If it is damaged or not a session's.
        TierFaultError: If it cannot be read.
        MemoryError: If the machine has no room.
    """
    file = os.fspath(path)
    with _opened(file, file=file, folder=None) as fd:
        return _read(fd, file=file)[1]


@contextlib.contextmanager
def _opened(name: str, *, file: str, folder: int | None) -> Iterator[int]:
    with trying("read a parked session", file):
        fd = System.open(name, _OLD, dir_fd=folder)
        try:
            yield fd
        finally:
            close_quietly(fd)


def _read(fd: int, *, file: str) -> tuple[session_file.Header, Contents]:
    status = System.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size < session_file.PREFIX:
        raise BadFileError(f"it has {status.st_size} bytes and is no session's file", file=file)
    head = bytearray(session_file.PREFIX)
    _read_all(fd, memoryview(head), file=file)
    rest = bytearray(session_file.header_nbytes(bytes(head), status.st_size, file=file))
    _read_all(fd, memoryview(rest), file=file)
    header = session_file.parse(bytes(head + rest), status.st_size, file=file)
    try:
        tensors = [host_memory(size) for size in header.sizes]
    except (RuntimeError, OSError) as error:
        raise MemoryError(f"no host memory for the {sum(header.sizes)} bytes of {file}: {error}") from error
    for number, (tensor, checksum) in enumerate(zip(tensors, header.checksums, strict=True)):
        view = _view(tensor)
        _read_all(fd, view, file=file)
        session_file.check_data(view, checksum, number, file=file)
    return header, Contents(header.document, [tensor.untyped_storage() for tensor in tensors])


def _view(storage: torch.UntypedStorage | torch.Tensor) -> memoryview:
    with torch.inference_mode(False):
        tensor = storage
        if isinstance(storage, torch.UntypedStorage):
            tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
        return memoryview(tensor.numpy())  # type: ignore[union-attr, arg-type]


def _write_all(fd: int, view: memoryview, *, file: str) -> None:
    while view.nbytes:
        written = System.write(fd, view)
        if not written:
            raise TierFaultError(
                "write a parked session",
                file=file,
                why=f"a write makes no progress and {view.nbytes} bytes are left",
                remedy="look after the disk, or choose another disk.path",
            )
        view = view[written:]


def _read_all(fd: int, view: memoryview, *, file: str) -> None:
    while view.nbytes:
        count = System.readv(fd, [view])
        if not count:
            raise BadFileError(f"it ends {view.nbytes} bytes early", file=file)
        view = view[count:]

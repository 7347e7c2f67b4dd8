"""A session's file on the disk: how its bytes get there and come back. What they mean is not known here."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_omni_session_state.base.errors import BadFileError, TierFaultError
from vllm_omni_session_state.offload import file_format
from vllm_omni_session_state.offload.arrays import bytes_of, memory_of
from vllm_omni_session_state.offload.copy import host_memory
from vllm_omni_session_state.offload.file_system import System, close_quietly, trying

SUFFIX = ".safetensors"
PART = ".part"
"""What the name of a file ends with until all of it is on the disk."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file holds, verified.

    Attributes:
        document: The skeleton's document.
        storages: New ones, in host memory.
    """

    document: Any
    storages: list[torch.UntypedStorage]


def write(name: str, pieces: Sequence[memoryview], *, folder: int, file: str) -> None:
    """Write a file; when this returns it survives a crash of the machine.

    Args:
        name: In the folder. Until all of it is on the disk the file has another one, with ``PART`` behind it.
        pieces: Its bytes.
        folder: A descriptor.
        file: How to name it.

    Raises:
        TierFaultError: If it cannot be written; what there is of it, under either name, is the caller's.
    """
    part = name + PART
    with trying("write a parked session", file):
        fd = System.open(part, _NEW, 0o600, dir_fd=folder)
        try:
            for piece in pieces:
                _write_all(fd, piece, file=file + PART)
            System.fsync(fd)
        except BaseException:
            close_quietly(fd)
            raise
        System.close(fd)  # some file systems tell only here that there is no room
        System.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        System.fsync(folder)


def read(name: str, *, folder: int | None, file: str) -> tuple[file_format.Header, Contents]:
    """What a file holds, every bit of it checked.

    Args:
        name: In the folder, or a path.
        folder: A descriptor.
        file: How to name it.

    Raises:
        BadFileError: If it is damaged or not a session's.
        TierFaultError: If it cannot be read.
        MemoryError: If the machine has no room.
    """
    with trying("read a parked session", file):
        fd = System.open(name, _OLD, dir_fd=folder)
        try:
            return _read(fd, file=file)
        finally:
            close_quietly(fd)


def read_file(path: str | os.PathLike[str]) -> Contents:
    """What a session's file holds, for somebody without a ticket; raises as ``read()`` does."""
    file = os.fspath(path)
    return read(file, folder=None, file=file)[1]


def _read(fd: int, *, file: str) -> tuple[file_format.Header, Contents]:
    status = System.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size < file_format.PREFIX:
        raise BadFileError(f"it has {status.st_size} bytes and is no session's file", file=file)
    head = bytearray(file_format.PREFIX)
    _read_all(fd, memoryview(head), file=file)
    rest = bytearray(file_format.header_nbytes(bytes(head), status.st_size, file=file))
    _read_all(fd, memoryview(rest), file=file)
    header = file_format.parse(bytes(head + rest), status.st_size, file=file)
    try:
        tensors = [host_memory(size) for size in header.sizes]
    except RuntimeError as error:
        raise MemoryError(f"no host memory for the {sum(header.sizes)} bytes of {file}: {error}") from error
    for number, (tensor, checksum) in enumerate(zip(tensors, header.checksums, strict=True)):
        data = view(tensor)
        _read_all(fd, data, file=file)
        file_format.check_data(data, checksum, number, file=file)
    return header, Contents(header.document, [tensor.untyped_storage() for tensor in tensors])


def view(storage: torch.UntypedStorage | torch.Tensor) -> memoryview:
    """The bytes of a storage in host memory, or of a contiguous uint8 tensor; by reference."""
    whole = isinstance(storage, torch.UntypedStorage)
    return memoryview(memory_of(storage) if whole else bytes_of(storage))  # type: ignore[arg-type]


def _write_all(fd: int, data: memoryview, *, file: str) -> None:
    while data.nbytes:
        written = System.write(fd, data)
        if not written:
            raise TierFaultError(
                "write a parked session",
                file=file,
                why=f"a write makes no progress and {data.nbytes} bytes are left",
                remedy="look after the disk, or choose another disk.path",
            )
        data = data[written:]


def _read_all(fd: int, data: memoryview, *, file: str) -> None:
    while data.nbytes:
        count = System.readv(fd, [data])
        if not count:
            raise BadFileError(f"it ends {data.nbytes} bytes early", file=file)
        data = data[count:]

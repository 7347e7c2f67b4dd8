"""A session's file: safetensors, with the session's values and checksums in its header.

===============  ===============================================================================
8 bytes          length of the header, little-endian
header           JSON, padded with spaces to a multiple of 8: ``__metadata__`` and one entry a storage
data             the storages as ``U8`` tensors ``storage.0``, ``storage.1``, ... without gaps
===============  ===============================================================================

The header begins with its own checksum, taken over the length and the header with eight zeros in its place.
All of it follows from the manifest in it: a header that is not to the byte what would be written is refused.
Checksums are CRC-32: of what the standard library has it is by far the fastest, and sees every burst.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta, Struct, field

from vllm_omni_session_state.base.errors import BadFileError, TierFaultError
from vllm_omni_session_state.offload.copy import host_storages
from vllm_omni_session_state.offload.file_system import System, close_quietly, trying
from vllm_omni_session_state.offload.memory import views_of
from vllm_omni_session_state.offload.schema import Count, Tree

SUFFIX = ".safetensors"
PART = ".part"
"""What the name of a file ends with until all of it is on the disk."""

FORMAT = "vllm-omni-session-state"
VERSION = "2"
LONGEST_HEADER = 100_000_000
"""What readers of safetensors accept."""

_PREFIX = 8
_BEGIN = b'{"__metadata__":{"checksum":"'
_ZEROS = b"00000000"
_AT = _PREFIX + len(_BEGIN)

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Manifest(Struct, forbid_unknown_fields=True):
    """What a file holds.

    Attributes:
        session: The hashed identity of the session that it belongs to.
        sizes: Bytes of each storage.
        checksums: Of each storage.
        tree: The session's values.
    """

    session: str
    sizes: list[Count]
    checksums: list[Annotated[int, Meta(ge=0, le=2**32 - 1)]]
    tree: Tree


class _Metadata(Struct):
    checksum: str
    format: str
    version: str
    manifest: str


class _Header(Struct):
    metadata: _Metadata = field(name="__metadata__")


_HEADER = msgspec.json.Decoder(_Header)
_MANIFEST = msgspec.json.Decoder(Manifest)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file holds, verified.

    Attributes:
        manifest: What it says of itself.
        checksum: Of its header: no two files of a tier have the same but by chance.
        storages: New ones, in host memory.
    """

    manifest: Manifest
    checksum: str
    storages: list[torch.UntypedStorage]

    @property
    def tree(self) -> Tree:
        """The session's values."""
        return self.manifest.tree


def compose(tree: Tree, views: Sequence[memoryview], *, session: str) -> tuple[bytes, str]:
    """The length and the header of a file, and the header's checksum.

    Raises:
        TierFaultError: If the tree says more than the format allows.
    """
    sizes, sums = [view.nbytes for view in views], [zlib.crc32(view) for view in views]
    manifest = msgspec.json.encode(Manifest(session, sizes, sums, tree)).decode()
    head = _blank(_Metadata(_ZEROS.decode(), FORMAT, VERSION, manifest), sizes)
    if len(head) > LONGEST_HEADER:
        raise TierFaultError(
            "write a parked session",
            file="its header",
            why=f"it has {len(head)} bytes, and a file of this format takes {LONGEST_HEADER}",
            remedy="keep large values in tensors or arrays",
        )
    checksum = b"%08x" % zlib.crc32(head)
    return _with_checksum(head, checksum), checksum.decode()


def _blank(metadata: _Metadata, sizes: Sequence[int]) -> bytes:
    """Length and header with the checksum that ``metadata`` has."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for number, size in enumerate(sizes):
        start, end = end, end + size
        entries[f"storage.{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [start, end]}
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header


def _with_checksum(head: bytes, checksum: bytes) -> bytes:
    return head[:_AT] + checksum + head[_AT + len(_ZEROS) :]


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
            _write_all(fd, pieces, file=file + PART)
            System.fsync(fd)
        except BaseException:
            close_quietly(fd)
            raise
        System.close(fd)  # some file systems tell only here that there is no room
        System.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        System.fsync(folder)


def read(name: str, *, folder: int | None, file: str) -> Contents:
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
    """What a session's file holds, for somebody who has nothing but the file; raises as ``read()`` does."""
    file = os.fspath(path)
    return read(file, folder=None, file=file)


def _read(fd: int, *, file: str) -> Contents:
    status = System.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size < _PREFIX:
        raise BadFileError(f"it has {status.st_size} bytes and is no session's file", file=file)
    head = bytearray(_PREFIX)
    _read_all(fd, [memoryview(head)], file=file)
    length: int = struct.unpack("<Q", head)[0]
    if not len(_BEGIN) + len(_ZEROS) <= length <= min(LONGEST_HEADER, status.st_size - _PREFIX):
        raise BadFileError(f"its header cannot have {length} bytes", file=file)
    head += bytes(length)
    _read_all(fd, [memoryview(head)[_PREFIX:]], file=file)
    checksum = bytes(head[_AT : _AT + len(_ZEROS)]).decode("latin-1")
    manifest = _parse(bytes(head), status.st_size, checksum, file=file)
    storages = host_storages(manifest.sizes)
    _read_all(fd, views_of(storages), file=file, checksums=manifest.checksums)
    return Contents(manifest, checksum, storages)


def _parse(head: bytes, file_nbytes: int, checksum: str, *, file: str) -> Manifest:
    """A file's manifest, checked against the header's checksum and the length of the file."""
    if head[_PREFIX:_AT] != _BEGIN:
        raise BadFileError("it is not a session's file", file=file)
    if checksum != f"{zlib.crc32(_with_checksum(head, _ZEROS)):08x}":
        raise BadFileError("its header is damaged", file=file)
    try:
        metadata = _HEADER.decode(head[_PREFIX:]).metadata
        manifest = _MANIFEST.decode(metadata.manifest)
    except (ValueError, RecursionError) as error:  # those of msgspec are ValueErrors
        raise BadFileError(f"its header is of another kind: {error!r:.200}", file=file) from error
    why = ""
    if (metadata.format, metadata.version) != (FORMAT, VERSION):
        why = f"{metadata.format!a:.60}, version {metadata.version!a:.60}"
    elif len(manifest.sizes) != len(manifest.checksums) or _blank(metadata, manifest.sizes) != head:
        why = "its entries do not go with its manifest"
    elif len(head) + sum(manifest.sizes) != file_nbytes:
        why = f"{file_nbytes} bytes where {len(head) + sum(manifest.sizes)} should be"
    if why:
        raise BadFileError(f"its header is of another kind: {why}", file=file)
    return manifest


def _write_all(fd: int, pieces: Sequence[memoryview], *, file: str) -> None:
    for piece in pieces:
        data = piece
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


def _read_all(fd: int, views: Sequence[memoryview], *, file: str, checksums: Sequence[int] = ()) -> None:
    for number, each in enumerate(views):
        data = each
        while data.nbytes:
            count = System.readv(fd, [data])
            if not count:
                raise BadFileError(f"it ends {data.nbytes} bytes early", file=file)
            data = data[count:]
        if checksums and zlib.crc32(each) != checksums[number]:
            raise BadFileError(f"storage.{number} is damaged", file=file)

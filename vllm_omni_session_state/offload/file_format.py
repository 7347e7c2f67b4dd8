"""The bytes of a session's file: safetensors, with skeleton and checksums in its header. Touches no file.

===============  ===============================================================================
8 bytes          length of the header, little-endian
header           JSON, padded with spaces to a multiple of 8: ``__metadata__`` and one entry a storage
data             the storages as ``U8`` tensors ``storage.0``, ``storage.1``, ... without gaps
===============  ===============================================================================

The header begins with its own checksum, taken over the length and the header with eight zeros in its place.
Checksums are CRC-32: of what the standard library has it is by far the fastest, and sees every burst.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_omni_session_state.base.errors import BadFileError, TierFaultError

FORMAT = "vllm-omni-session-state"
VERSION = "1"
PREFIX = 8
LONGEST_HEADER = 100_000_000
"""What readers of safetensors accept."""

_BEGIN = b'{"__metadata__":{"checksum":"'
_ZEROS = b"00000000"
_AT = PREFIX + len(_BEGIN)


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself.

    Attributes:
        session: The hashed identity of the session that it belongs to.
        document: The skeleton's document.
        sizes: Bytes of each storage.
        checksums: Of each storage.
        checksum: Of the header: no two files of a tier have the same but by chance.
    """

    session: str
    document: Any
    sizes: tuple[int, ...]
    checksums: tuple[int, ...]
    checksum: int


def compose(document: Any, views: Sequence[memoryview], *, session: str) -> bytes:
    """The length and the header of a file.

    Raises:
        TierFaultError: If the document is longer than the format allows.
    """
    entries: dict[str, Any] = {
        "__metadata__": {
            "checksum": _ZEROS.decode(),
            "format": FORMAT,
            "version": VERSION,
            "session": session,
            "checksums": " ".join(f"{zlib.crc32(view):08x}" for view in views),
            "skeleton": json.dumps(document, allow_nan=False, separators=(",", ":")),
        }
    }
    end = 0
    for number, view in enumerate(views):
        start, end = end, end + view.nbytes
        entries[_name(number)] = {"dtype": "U8", "shape": [view.nbytes], "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode("ascii")
    header += b" " * (-len(header) % 8)
    if len(header) > LONGEST_HEADER:
        raise TierFaultError(
            "write a parked session",
            file="its header",
            why=f"it has {len(header)} bytes, and a file of this format takes {LONGEST_HEADER}",
            remedy="keep large values in tensors or arrays",
        )
    head = struct.pack("<Q", len(header)) + header
    return head[:_AT] + b"%08x" % zlib.crc32(head) + head[_AT + len(_ZEROS) :]


def header_nbytes(prefix: bytes, file_nbytes: int, *, file: str) -> int:
    """The length of the header that a file's first 8 bytes tell.

    Raises:
        BadFileError: If the file is too short for it.
    """
    length: int = struct.unpack("<Q", prefix)[0]
    if not len(_BEGIN) + len(_ZEROS) <= length <= min(LONGEST_HEADER, file_nbytes - PREFIX):
        raise BadFileError(f"its header cannot have {length} bytes", file=file)
    return length


def parse(head: bytes, file_nbytes: int, *, file: str) -> Header:
    """A file's header, checked against its checksum and the length of the file.

    Args:
        head: The first 8 bytes and the header.
        file_nbytes: Of the whole file.
        file: How to name it.

    Raises:
        BadFileError: If it is damaged or not of this format.
    """
    if head[PREFIX:_AT] != _BEGIN:
        raise BadFileError("it is not a session's file", file=file)
    told = head[_AT : _AT + len(_ZEROS)]
    blank = head[:_AT] + _ZEROS + head[_AT + len(_ZEROS) :]
    if told != b"%08x" % zlib.crc32(blank):
        raise BadFileError("its header is damaged", file=file)
    try:
        return _header(json.loads(head[PREFIX:]), file_nbytes - len(head), int(told, 16))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BadFileError(f"its header is of another kind: {error!r:.200}", file=file) from error


def check_data(view: memoryview, checksum: int, number: int, *, file: str) -> None:
    """Compare a storage that was read with its checksum.

    Raises:
        BadFileError: If it is damaged.
    """
    if zlib.crc32(view) != checksum:
        raise BadFileError(f"{_name(number)} is damaged", file=file)


def _header(entries: dict[str, Any], data_nbytes: int, checksum: int) -> Header:
    told = entries.pop("__metadata__")
    if (told["format"], told["version"]) != (FORMAT, VERSION):
        raise ValueError(f"{told['format']!a:.60}, version {told['version']!a:.60}")
    sizes: list[int] = []
    end = 0
    for number in range(len(entries)):
        entry = entries[_name(number)]
        start, stop = entry["data_offsets"]
        if type(stop) is not int or entry != {
            "dtype": "U8",
            "shape": [stop - end],
            "data_offsets": [end, stop],
        }:
            raise ValueError(f"{_name(number)} is {entry!a:.80}")
        if start != end or stop < end:
            raise ValueError(f"{_name(number)} does not follow the one before")
        sizes.append(stop - end)
        end = stop
    if end != data_nbytes:
        raise ValueError(f"it has {data_nbytes} bytes of data where {end} should be")
    checksums = tuple(int(word, 16) for word in told["checksums"].split())
    if len(checksums) != len(sizes) or not isinstance(told["session"], str):
        raise ValueError("checksums or identity are missing")
    return Header(told["session"], json.loads(told["skeleton"]), tuple(sizes), checksums, checksum)


def _name(number: int) -> str:
    return f"storage.{number}"

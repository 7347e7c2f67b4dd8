"""The file in which a worker keeps its figures and the rows of its listing, for the API server to read.

One process writes it and any number read it, without a lock: each part has a checksum, and the header, which
is written last, has one over all. Who reads while it is written finds that they do not fit, and reads again.
What is in it is bytes alone; whatever stands there, reading it takes bounded memory and raises one error.

All numbers are little-endian. A file is::

    0       header, 256 bytes: see ``_HEADER``, then a CRC-32 of what is before it
    256     figures: a JSON object, at most 16,128 bytes
    16,384  moves: a JSON object, at most 16,384 bytes
    32,768  rows, 320 bytes each: CRC-32 of the rest; 2 bytes, length of the array; 16 bytes, digest of the
            id; a JSON array of what a row has beside that. Of an empty one CRC and length are 0

The header says how long the objects are and what their CRC-32 is, how many rows are in use and what the sum
of their CRC-32 is, and for the last steps a digest of that in which all ranks of a model must agree. The file
grows by rows. It never becomes shorter, so a reader's descriptor stays good.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from vllm_omni_session_state.base.ids import redacted_id
from vllm_omni_session_state.manager.rows import Row, in_order

MAGIC = b"omnisst1"
ROW = 320
ROWS_AT = 32_768
FIRST_ROWS = 1024
MOST_ROWS = 65_536
"""Rows of a file at most, 20 MiB; sessions beyond them are counted, and not listed."""

_HEADER_NBYTES = 256
_FIGURES_AT, _MOVES_AT = _HEADER_NBYTES, 16_384
_FIGURES_MOST, _MOVES_MOST = _MOVES_AT - _FIGURES_AT, ROWS_AT - _MOVES_AT
_STEPS = 6  # for how many of the last steps it is known what all ranks must agree in
_HEADER = struct.Struct(f"<8sQdQ7I4x{2 * _STEPS}Q")
"""Magic; number of this writing; wall time of it; sum of the rows' CRC-32; length and CRC-32 of the figures,
the same of the moves; rows that there is room for; rows in use; whether it is written no more; and of each of
the last steps its number and its digest."""
_CRC = struct.Struct("<I")
_ROW = struct.Struct("<IH16s")
_SUM = (1 << 64) - 1


_encode = json.JSONEncoder(separators=(",", ":")).encode


class UnreadableError(Exception):
    """What stands in a file is no whole state of it: it is being written, or was damaged."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole state of a file.

    Attributes:
        written: When, by the machine's clock, in seconds.
        figures: As ``session_state_figures`` has them of one rank, without the rows.
        rows: Of the sessions, in the order of a listing; ``None`` if they were not asked for.
        steps: By the number of a step a digest of that in which all ranks must agree after it.
        stopped: Whether it is written no more, although its worker lives.
    """

    written: float
    figures: dict[str, Any]
    rows: list[Row] | None
    steps: dict[int, int]
    stopped: bool


class StatsWriter:
    """Writes a file.

    Args:
        grow: Gives the file's bytes, at least so many; what was written stays.
    """

    def __init__(self, grow: Callable[[int], mmap.mmap]) -> None:
        self._grow = grow
        self._capacity = FIRST_ROWS
        self._space = grow(ROWS_AT + ROW * FIRST_ROWS)
        # By session its slot, its CRC-32, and a digest of that in which ranks must agree.
        self._rows: dict[str, tuple[int | None, int, int]] = {}
        self._free: list[int] = []
        self._used = 0
        self._moves: dict[str, str] = {}
        self._total = self._mark = self._number = self._step = 0
        self._sections = {_FIGURES_AT: (0, 0), _MOVES_AT: (0, 0)}
        self._steps = [0] * (2 * _STEPS)
        self._stopped = False

    @property
    def unlisted(self) -> int:
        """Sessions for which there is no row."""
        return len(self._rows) - (self._used - len(self._free))

    def write(
        self,
        figures: Mapping[str, object],
        rows: Mapping[str, Row | None],
        moves: Mapping[str, object],
        *,
        agreed: object = None,
    ) -> None:
        """Write all figures, and of rows and moves those that changed.

        Args:
            figures: All of them.
            rows: By key; ``None`` for a session that is gone.
            moves: By name.
            agreed: After a step that in which all ranks must agree beside the rows, as plain data.

        Raises:
            OSError: If the file cannot grow.
            ValueError: For figures that are too long.
        """
        for key, row in rows.items():
            self._put_row(key, row)
        self._put(_FIGURES_AT, _encode({**figures, "unlisted": self.unlisted}), _FIGURES_MOST)
        if moves:
            self._moves.update((name, f"{_encode(name)}:{_encode(held)}") for name, held in moves.items())
            self._put(_MOVES_AT, f"{{{','.join(self._moves.values())}}}", _MOVES_MOST)
        if agreed is not None:
            self._step += 1
            at = 2 * (self._step % _STEPS)
            self._steps[at : at + 2] = self._step, _digest(f"{agreed} {self._mark}")
        self._put_header()

    def stop(self) -> None:
        """Say that it is written no more."""
        self._stopped = True
        self._put_header()

    def _put_header(self) -> None:
        self._number += 1
        sections = (number for section in self._sections.values() for number in section)
        room = self._capacity, self._used, self._stopped
        header = _HEADER.pack(
            MAGIC, self._number, time.time(), self._total, *sections, *room, *self._steps
        ).ljust(_HEADER_NBYTES - _CRC.size, b"\0")
        self._space[0:_HEADER_NBYTES] = header + _CRC.pack(zlib.crc32(header))

    def _put(self, at: int, text: str, most: int) -> None:
        data = text.encode()
        if len(data) > most:
            raise ValueError(f"{len(data)} bytes of figures are too many for a file that has {most} for them")
        self._space[at : at + len(data)] = data
        self._sections[at] = len(data), zlib.crc32(data)

    def _put_row(self, key: str, row: Row | None) -> None:
        slot, old_crc, old_mark = self._rows.get(key, (None, 0, 0))
        crc = mark = 0
        data = _ROW.pack(0, 0, b"")
        if row is not None:
            mark = _digest(f"{row.digest} {row.place} {row.turn}")
            if slot is None:
                slot = self._new_slot()
            if slot is not None:
                data = _row_bytes(row, key)
                crc = zlib.crc32(data)
                data = _CRC.pack(crc) + data
            self._rows[key] = slot, crc, mark
        elif self._rows.pop(key, None) is not None and slot is not None:
            self._free.append(slot)
        self._mark = (self._mark + mark - old_mark) & _SUM
        if slot is not None:
            at = ROWS_AT + ROW * slot
            self._space[at : at + len(data)] = data
            self._total = (self._total + crc - old_crc) & _SUM

    def _new_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if self._used == MOST_ROWS:
            return None
        if self._used == self._capacity:
            self._space = self._grow(ROWS_AT + ROW * 2 * self._capacity)
            self._capacity *= 2
        self._used += 1
        return self._used - 1


def _row_bytes(row: Row, key: str) -> bytes:
    """A row, without its CRC; of an id in the clear for which it has no room the hash is shown."""
    content = _content(row)
    if len(content) > ROW - _ROW.size:
        content = _content(row._replace(session=redacted_id(key)))
    if len(content) > ROW - _ROW.size:
        raise ValueError(f"a row of {len(content)} bytes is too long")
    return _ROW.pack(0, len(content), bytes.fromhex(row.digest))[_CRC.size :] + content


def _content(row: Row) -> bytes:
    return _encode((row.session, row.place, row.used, row.turn, row.nbytes)).encode()


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def read_snapshot(read: Callable[[int, int], bytes], *, rows: bool) -> Snapshot:
    """Read a file once.

    Args:
        read: Gives bytes of it: how many, from where. What is beyond its end is not in them.
        rows: Whether the rows are wanted.

    Raises:
        UnreadableError: If it is being written, or was damaged.
        OSError: As ``read`` does.
    """
    head = read(ROWS_AT, 0)
    header, crc = head[: _HEADER_NBYTES - _CRC.size], head[_HEADER_NBYTES - _CRC.size : _HEADER_NBYTES]
    if crc != _CRC.pack(zlib.crc32(header)) or not header.startswith(MAGIC):
        _refuse("header")
    _, _, written, total, *rest = _HEADER.unpack_from(header)
    figures_nbytes, figures_crc, moves_nbytes, moves_crc, capacity, used, stopped, *steps = rest
    if not used <= capacity <= MOST_ROWS:
        _refuse("number of rows")
    figures = _object(head[_FIGURES_AT:_MOVES_AT], figures_nbytes, figures_crc, "figures")
    moves = _object(head[_MOVES_AT:], moves_nbytes, moves_crc, "moves")
    found = _rows(read(ROW * used, ROWS_AT), used, total) if rows else None
    known = {steps[at]: steps[at + 1] for at in range(0, 2 * _STEPS, 2) if steps[at]}
    return Snapshot(written, {**figures, "moves": moves}, found, known, bool(stopped))


def _refuse(what: str) -> NoReturn:
    raise UnreadableError(f"its {what} does not fit")


def _object(held: bytes, nbytes: int, crc: int, what: str) -> dict[str, Any]:
    data = held[:nbytes]
    if len(data) != nbytes or zlib.crc32(data) != crc:
        _refuse(what)
    found = _parsed(data, what)
    if not isinstance(found, dict):
        _refuse(what)
    return found


def _parsed(data: bytes, what: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        _refuse(what)


def _rows(held: bytes, used: int, total: int) -> list[Row]:
    if len(held) != ROW * used:
        _refuse("length")
    found, digests, added = [], [], 0
    for at in range(0, len(held), ROW):
        crc, nbytes, digest = _ROW.unpack_from(held, at)
        added += crc
        if nbytes:
            end = at + _ROW.size + nbytes
            if nbytes > ROW - _ROW.size or zlib.crc32(held[at + _CRC.size : end]) != crc:
                _refuse("rows")
            found.append(held[at + _ROW.size : end])
            digests.append(digest.hex())
        elif crc:
            _refuse("rows")
    if added & _SUM != total:
        _refuse("rows")
    rows = _parsed(b"[" + b",".join(found) + b"]", "rows")
    if len(rows) != len(found) or not all(map(_is_row, rows)):
        _refuse("rows")
    return in_order(Row(row[0], digest, *row[1:]) for digest, row in zip(digests, rows, strict=True))


def _is_row(row: object) -> bool:
    if not isinstance(row, list) or tuple(map(type, row)) != (str, str, bool, int, dict):
        return False
    return all(type(count) is int for count in row[4].values())

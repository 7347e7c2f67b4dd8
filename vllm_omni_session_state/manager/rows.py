"""A row of a listing: one session as all that is kept about it tells, without a look at what it holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Row(NamedTuple):
    """One session.

    Attributes:
        session: As it is shown.
        digest: What tells it apart for a program, 32 hexadecimal digits; it is shown to nobody.
        place: ``"device"``, or the tier in which it is parked.
        used: Whether somebody uses it, or it is on its way.
        turn: The number of its last use, of all uses of all sessions.
        nbytes: Bytes by device, and ``disk`` for its file, as of its last settlement.
    """

    session: str
    digest: str
    place: str
    used: bool
    turn: int
    nbytes: dict[str, int]


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Parked ones, then idle ones, then those in use, each of them least recently used first."""
    return sorted(rows, key=lambda row: (row.place == "device", row.used, row.turn))

"""How long moves between tiers take and how much they move: a histogram of each, by what moves where.

Bounds are fixed, so that the counts of ranks, replicas and hours can be added up.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum


class Move(Enum):
    """What moves where. A park to host memory includes what went on to the disk to make room for it."""

    PARK_HOST = "park:host"
    PARK_DISK = "park:disk"
    SINK = "sink:disk"
    RESTORE_HOST = "restore:host"
    RESTORE_DISK = "restore:disk"


SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds, inclusive; what takes longer is counted beyond the last."""

NBYTES = tuple(1 << power for power in range(20, 38, 2))
"""Upper bounds, inclusive: 1 MiB to 64 GiB by fours."""


@dataclass(slots=True)
class Histogram:
    """Counts by upper bound.

    Attributes:
        bounds: Upper bounds, inclusive, ascending.
        counts: Of what is at most each bound and above the one before; the last one: above all.
        total: Sum of what was counted.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class MoveStats:
    """The moves of one manager; safe from any thread."""

    def __init__(self) -> None:
        self._changed = set(Move)
        self._lock = threading.Lock()
        self._held = {move: (Histogram(SECONDS), Histogram(NBYTES)) for move in Move}
        self._failed = dict.fromkeys(Move, 0)

    def note(self, move: Move, *, seconds: float, nbytes: int) -> None:
        """A move is done."""
        with self._lock:
            held = self._held[move]
            self._changed.add(move)
            held[0].add(seconds)
            held[1].add(nbytes)

    def note_failed(self, move: Move) -> None:
        """A move was refused or failed; the session is where it was."""
        with self._lock:
            self._failed[move] += 1
            self._changed.add(move)

    def figures(self) -> dict[str, dict[str, object]]:
        """By ``Move``, as plain data: how many ``failed``, and ``seconds`` and ``nbytes`` of the others."""
        with self._lock:
            return {move.value: self._figures(move) for move in Move}

    def changed_figures(self) -> dict[str, dict[str, object]]:
        """The same, of those of which one was noted since this was last asked."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return {move.value: self._figures(move) for move in changed}

    def _figures(self, move: Move) -> dict[str, object]:
        seconds, nbytes = self._held[move]
        return {
            "failed": self._failed[move],
            "seconds": {"total": seconds.total, "counts": list(seconds.counts)},
            "nbytes": {"total": nbytes.total, "counts": list(nbytes.counts)},
        }

"""How far a run of several processes is and how long it still takes, from what each phase should take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of it.

    Attributes:
        name: What is going on, for a reader.
        seconds: What it takes on a small machine.
    """

    name: str
    seconds: float


class Estimate:
    """The phases one after the other; all times in seconds of one monotonic clock.

    Args:
        phases: In order.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = tuple(phases)
        self.total = sum(phase.seconds for phase in phases)
        self._number = -1
        self._began = self._first = 0.0
        self._behind = 0.0  # expected seconds of the phases that are over
        self._share = 0.0  # of the current phase, as reported
        self._shown = 0.0

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self.phases[self._number]

    def begin(self, now: float) -> Phase:
        """Begin the next phase; the one before it is over."""
        if self._number < 0:
            self._first = now
        else:
            self._behind += self.phase.seconds
        self._number += 1
        self._began, self._share = now, 0.0
        return self.phase

    def reached(self, share: float) -> None:
        """Say how much of the current phase is done, 0 to 1, where that is known."""
        self._share = share

    def seconds_done(self, now: float) -> float:
        """Expected seconds of what is done; it never decreases and does not pass the current phase's end."""
        share = self._share or min(0.95, (now - self._began) / self.phase.seconds / self._pace())
        self._shown = max(self._shown, self._behind + share * self.phase.seconds)
        return self._shown

    def seconds_left(self, now: float) -> float:
        """Estimate what is left, at the pace of the phases that are over."""
        return (self.total - self.seconds_done(now)) * self._pace()

    def _pace(self) -> float:
        return max(0.2, (self._began - self._first) / self._behind) if self._behind else 1.0

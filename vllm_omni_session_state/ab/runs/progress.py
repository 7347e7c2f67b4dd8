"""How far a run is, to look at: one bar over everything, plain lines without a terminal. It needs rich."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LONG_S = 30 * 86_400.0
"""What is left follows from all that has been, and not from the last half minute."""


class LastingConsole(Console):
    """Goes on without a word when nobody reads any more (``| head``): what is to be written is written."""

    def on_broken_pipe(self) -> None:
        """Say nothing more."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # else Python itself complains when it flushes at its end
        os.close(nowhere)


class ProgressView:
    """Shows the phases of a run, one after the other, each given with the seconds that it should take.

    It counts these. Those of the current phase pass at the pace so far, unless it is reported how much of it
    is done. It never goes back.
    """

    def __init__(self, console: Console, phases: Mapping[str, float]) -> None:
        self._console = console
        self._phases = iter(phases.items())
        self._width = max(map(len, phases))
        self._seconds = self._behind = self._ticked = 0.0  # of the current phase, of those before, elapsed
        self._reported = False
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("gone,"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=LONG_S,
        )
        self._progress.add_task("", total=sum(phases.values()))
        self.task = self._progress.tasks[0]

    @contextmanager
    def shown(self) -> Iterator[ProgressView]:
        """Show it for as long as the context lasts."""
        with self._progress:
            yield self

    def begin(self) -> None:
        """The next phase begins."""
        self._behind += self._seconds
        name, self._seconds = next(self._phases)
        self._reported, self._ticked = False, self.task.elapsed or 0.0
        self._passed(0.0, name)
        left = self.task.time_remaining
        left = self.task.remaining if left is None else left
        self._line(f"{name} (about {_clock(left)} left)")

    def reached(self, share: float) -> None:
        """So much of the phase is done, 0 to 1."""
        self._reported = True
        self._passed(share * self._seconds)

    def tick(self) -> None:
        """Time has passed."""
        before, self._ticked = self._ticked, self.task.elapsed or 0.0
        if not self._reported:
            more = (self._ticked - before) * (self.task.speed or 1.0)
            self._passed(min(0.95 * self._seconds, self.task.completed - self._behind + more))

    def finish(self) -> None:
        """Everything has been run."""
        self._passed(self._seconds, "done")
        self._line("done")

    def _passed(self, seconds: float, name: str | None = None) -> None:
        description = None if name is None else name.ljust(self._width)
        completed = max(self.task.completed, self._behind + seconds)
        self._progress.update(self.task.id, completed=completed, description=description)

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"  {_clock(self.task.elapsed)}  {text}")


def _clock(seconds: float | None) -> str:
    """Hours, minutes and seconds, as rich writes them."""
    return str(timedelta(seconds=int(seconds or 0)))

"""How far a run is, to look at: one bar over everything, plain lines without a terminal. It needs rich."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from vllm_omni_session_state.ab.runs.estimate import Estimate


class LastingConsole(Console):
    """Goes on without a word when nobody reads any more (``| head``): what is to be written is written."""

    def on_broken_pipe(self) -> None:
        """Say nothing more."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # else Python itself complains when it flushes at its end
        os.close(nowhere)


def clock(seconds: float) -> str:
    """Minutes and seconds, as ``1:05``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class ProgressView:
    """Shows a course while it is run.

    Args:
        console: Where.
        course: What.
    """

    def __init__(self, console: Console, course: Estimate) -> None:
        self._console = console
        self._course = course
        self._began = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TextColumn("{task.fields[times]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._width = max(len(phase.name) for phase in course.phases)
        self._task = self._progress.add_task("", total=course.total, times="")

    @contextlib.contextmanager
    def shown(self) -> Iterator[ProgressView]:
        """Show it for as long as the context lasts."""
        with self._progress:
            yield self

    def begin(self) -> None:
        """The next phase begins."""
        now = time.monotonic()
        phase = self._course.begin(now)
        if not self._console.is_terminal:
            left = clock(self._course.seconds_left(now))
            self._console.print(f"  {clock(now - self._began)}  {phase.name} (about {left} left)")
        self.tick()

    def reached(self, share: float) -> None:
        """So much of the phase is done, 0 to 1."""
        self._course.reached(share)

    def tick(self) -> None:
        """Time has passed."""
        now = time.monotonic()
        self._progress.update(
            self._task,
            completed=self._course.seconds_done(now),
            description=self._course.phase.name.ljust(self._width),
            times=f"{clock(now - self._began)} gone, {clock(self._course.seconds_left(now))} left",
        )

    def finish(self) -> None:
        """Everything has been run."""
        took = clock(time.monotonic() - self._began)
        self._progress.update(
            self._task,
            completed=self._course.total,
            description="done".ljust(self._width),
            times=f"{took} gone",
        )
        if not self._console.is_terminal:
            self._console.print(f"  {took}  done")

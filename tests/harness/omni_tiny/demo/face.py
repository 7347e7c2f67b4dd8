"""What the demo shows: one bar over everything, or plain lines where there is no terminal; then tables."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omni_tiny.demo.course import Course
    from omni_tiny.demo.scenarios import Scenario
    from omni_tiny.demo.verdict import Served


def clock(seconds: float) -> str:
    """Minutes and seconds, as ``1:05``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Watch:
    """Shows a course while it is run.

    Args:
        console: Where.
        course: What.
    """

    def __init__(self, console: Console, course: Course) -> None:
        self._console = console
        self._course = course
        self._began = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[times]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._width = max(len(phase.name) for phase in course.phases)
        self._task = self._progress.add_task("", total=course.total, times="")

    @contextlib.contextmanager
    def shown(self) -> Iterator[Watch]:
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


def say_equality(console: Console, scenario: Scenario, *, total: int, different: Sequence[str]) -> None:
    """Say whether every output is bit-identical."""
    console.print()
    if not different:
        console.print(
            f"[bold green]IDENTICAL[/]: all {total} outputs are equal to the last bit, flag off and on"
        )
        console.print(f"({scenario.outputs}).")
        return
    console.print(
        f"[bold red]DIFFERENT[/]: {len(different)} of {total} outputs are not the same, flag off and on:"
    )
    for name in different[:10]:
        console.print(f"  {name}", markup=False)
    if len(different) > 10:
        console.print(f"  and {len(different) - 10} more")


def show_bytes(console: Console, off: Served, on: Served) -> None:
    """Show what the flagged run's worker says of its sessions, and what the other run's worker could say."""
    before, after = on.looks[0]["sessions"], on.looks[-1]["sessions"]
    console.print("\n[bold]Bytes of session state[/], as the worker process of the flagged run lists them")
    console.print(bytes_table([session for session in before if session["nbytes"]]))
    console.print(f"Counted by {on.looks[0]['manager']}.")
    if idle := [session["session"] for session in before if not session["nbytes"]]:
        console.print(f"Without a byte: {', '.join(idle)} (the host makes that session when it starts).")
    left = {session["session"] for session in after}
    for session in before:
        if session["session"] not in left:
            freed = sum(session["nbytes"].values())
            console.print(f"After the close of {session['session']} its {freed:,} bytes are listed no more.")
    names = ", ".join(session["session"] for session in off.looks[0]["sessions"])
    console.print(
        f"\nWith the flag off the worker could only name its sessions ({names}): "
        "the model's own table counts no bytes."
    )


def bytes_table(sessions: Sequence[dict[str, Any]]) -> Table:
    """Make the table of bytes: a row per value and device, a column per session, a sum per device.

    Values may share memory, and the sum counts each region once. Plain numbers hold no memory region:
    values without a byte in any session share one row.
    """
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("value", "kept as", "device"):
        table.add_column(heading, no_wrap=heading != "value")
    for session in sessions:
        table.add_column(session["session"], justify="right", no_wrap=True)
    rows: dict[tuple[str, str, str], dict[str, int]] = {}
    without: dict[str, None] = {}
    for session in sessions:
        for value in session["values"]:
            without.setdefault(value["name"])
            for device, count in value["nbytes"].items():
                rows.setdefault((value["name"], value["bucket"], device), {})[session["session"]] = count
    for (name, bucket, device), row in rows.items():
        without.pop(name, None)
        table.add_row(name, bucket, device, *(f"{row.get(session['session'], 0):,}" for session in sessions))
    if without:
        table.add_row("plain numbers: " + ", ".join(without), "attrs", "-", *("0" for _ in sessions))
    table.add_section()
    for device in sorted({device for session in sessions for device in session["nbytes"]}):
        sums = (f"{session['nbytes'].get(device, 0):,}" for session in sessions)
        table.add_row("sum, each byte once", "", device, *sums, style="bold")
    return table

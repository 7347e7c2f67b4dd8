"""Measuring, whatever is measured: a clock, turns and their order, medians, the machine, table, last line.

Not covered: what is run and what the figures mean; each benchmark says that itself.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import operator
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

T = TypeVar("T")

Wanted = dict[str, tuple[str, float]]
"""By a figure's name how its median should compare with what: ``(">=", 100.0)``."""

_HOLDS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "<": operator.lt,
}


def positive(text: str) -> int:
    """A whole number of the command line, at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} measures nothing; give 1 or more")
    return number


def options(name: str, doc: str | None, *, quick: str = "") -> argparse.ArgumentParser:
    """A benchmark's command line: its name, its first line, and ``--quick``, if it is said what that runs."""
    about = (doc or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    if quick:
        help_ = f"{quick}: does it run? Its figures mean nothing"
        parser.add_argument("--quick", action="store_true", help=help_)
    return parser


def consoles() -> tuple[Console, Console]:
    """Where results go, and where people look meanwhile."""
    return Console(width=None if sys.stdout.isatty() else 100), Console(stderr=True)


class LapClock:
    """Adds up what each kind of operation takes: every moment since ``start()`` belongs to the next lap.

    A moment is CPU time of this thread, in which others' work on the same cores does not show. For work that
    neither waits nor uses a second thread that is the time it takes on an idle machine.

    Attributes:
        ns: Nanoseconds so far, by the lap's name.
    """

    __slots__ = ("_last", "ns")

    def __init__(self, names: Iterable[str]) -> None:
        self.ns: dict[str, int] = dict.fromkeys(names, 0)
        self._last = 0

    def start(self) -> None:
        """What has passed since the last lap is nobody's."""
        self._last = time.thread_time_ns()

    def lap(self, name: str) -> None:
        """What has passed since ``start()`` or the last lap was spent on ``name``."""
        now = time.thread_time_ns()
        self.ns[name] += now - self._last
        self._last = time.thread_time_ns()

    def total(self, names: Iterable[str] | None = None) -> int:
        """Nanoseconds spent on ``names``, by default on everything."""
        return sum(self.ns.values()) if names is None else sum(self.ns[name] for name in names)


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of several measurements and how far they lie apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Median and quartiles of ``values``, of which there is at least one."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the figures were measured."""

    cpu: str
    cores: int
    threads: int
    system: str
    python: str
    torch: str
    vllm_omni: str


def machine() -> Machine:
    """This machine, with the threads that torch uses now."""
    import torch

    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        vllm_omni=metadata.version("vllm-omni"),
    )


def one_thread() -> None:
    """Pin this process to one thread of computation; before torch is imported it holds for all of torch."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    import torch

    torch.set_num_threads(1)


@contextmanager
def no_collector() -> Iterator[None]:
    """Python's own garbage collection runs before, and not meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def orders(contenders: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Every order of ``contenders``, over and over: each runs equally often first, and after each other."""
    return itertools.cycle(itertools.permutations(contenders))


def turns(count: int, *, what: str, aside: Console) -> Iterator[int]:
    """Number the turns from 0, and show how far they are: a bar on a terminal, elsewhere a line for each.

    Args:
        count: How many.
        what: What one of them is, as in "pair".
        aside: Where people look meanwhile.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=aside,
        disable=not aside.is_terminal,
    )
    with progress:
        task = progress.add_task("", total=count)
        began = time.monotonic()
        for turn in range(count):
            name = f"{what} {turn + 1} of {count}"
            progress.update(task, description=name)
            yield turn
            progress.update(task, completed=turn + 1)
            if not aside.is_terminal:
                left = (time.monotonic() - began) / (turn + 1) * (count - turn - 1)
                aside.print(f"{name}, about {left:.0f} s left")


def add_figures(table: Table, figures: dict[str, Spread], wanted: Wanted) -> None:
    """Put figures into an empty table: median, quartiles, and of some whether they are as wanted."""
    for column in ("figure", "median", "quartiles", "wanted"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, spread in figures.items():
        verdict = ""
        if name in wanted:
            comparison, bound = wanted[name]
            holds = _HOLDS[comparison](spread.median, bound)
            verdict = f"{comparison} {bound:g}: {'yes' if holds else 'NO'}"
        table.add_row(name, f"{spread.median:.4g}", f"{spread.low:.4g} to {spread.high:.4g}", verdict)


def last_line(figures: dict[str, Spread], **more: Any) -> str:
    """One JSON object: the median of each figure, the quartiles of all, and what else is to be known.

    Args:
        figures: By name.
        **more: Further keys; a record among them is written as an object.
    """
    written = {
        **{name: round(spread.median, 4) for name, spread in figures.items()},
        "quartiles": {
            name: [round(spread.low, 4), round(spread.high, 4)] for name, spread in figures.items()
        },
        **{
            name: asdict(value) if hasattr(value, "__dataclass_fields__") else value
            for name, value in more.items()
        },
    }
    return json.dumps(written)


def _cpu() -> str:
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [
        line.partition(":")[2].strip() for line in described.splitlines() if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()

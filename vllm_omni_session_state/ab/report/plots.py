"""Line plots, worked out: the texts of the axes, and where each point goes. The template draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

COLOURS = 8
"""Classes ``c0`` to ``c7`` of the style sheet."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot, with its name in the legend; dashed to be told apart without colours."""

    name: str
    points: Sequence[tuple[int, float]]  # x, from 1, and y, in order of x
    colour: int
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot over steps, with at least one point in all. The label is that of the y axis, with its unit."""

    LEFT: ClassVar[int] = 76  # the axes' ends, in the picture of 420 by 260
    RIGHT: ClassVar[int] = 410
    TOP: ClassVar[int] = 10
    BOTTOM: ClassVar[int] = 218

    caption: str
    label: str
    lines: Sequence[Line]
    marks: Sequence[tuple[float, str]]  # of the y axis, from the lowest on: values, and their texts
    logarithmic: bool = False

    @property
    def last(self) -> int:
        """The last step."""
        return max([x for line in self.lines for x, _ in line.points] + [2])

    @property
    def steps(self) -> list[int]:
        """Marks of the x axis."""
        apart = max(1, int(_nice(self.last / 6)))
        return [1, *(x for x in range(apart, self.last + 1, apart) if x > 1)]

    def across(self, x: float) -> float:
        """Where a step is, from the left."""
        return self.LEFT + (x - 1) / (self.last - 1) * (self.RIGHT - self.LEFT)

    def down(self, y: float) -> float:
        """Where a value is, from above."""
        least, value, most = map(self._scaled, (self.marks[0][0], y, self.marks[-1][0]))
        return self.BOTTOM - (value - least) / (most - least) * (self.BOTTOM - self.TOP)

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-6)) if self.logarithmic else value


def bytes_text(count: float) -> str:
    """A count of bytes with a unit, as ``1.50 MiB``."""
    power = _power(count)
    return f"{count:,.0f} B" if power == 0 else f"{count / 1024**power:,.2f} {_UNITS[power]}"


def seconds_text(seconds: float) -> str:
    """Seconds with a unit, as ``12.3 ms``."""
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def bytes_plot(caption: str, lines: Sequence[Line], *, label: str, from_zero: bool = True) -> Plot:
    """A plot of bytes over steps. The y axis, labelled without its unit, begins at 0, or at what is least."""
    values = [y for line in lines for _, y in line.points]
    power = _power(max(values))
    unit = 1024**power
    most, least = max(values) / unit, 0.0 if from_zero else min(values) / unit
    step = _nice((most - least) / 4 or most / 20 or 1.0)
    begin = math.floor(least / step) * step
    count = max(1, math.ceil(most / step - begin / step - 1e-9))
    digits = max(0, -math.floor(math.log10(step)))
    ticks = [begin + number * step for number in range(count + 1)]
    marks = [(tick * unit, f"{tick:,.{digits}f}") for tick in ticks]
    return Plot(caption, f"{label}, {_UNITS[power]}", lines, marks)


def seconds_plot(caption: str, lines: Sequence[Line], *, label: str) -> Plot:
    """A plot of durations over steps, on a logarithmic axis."""
    values = [max(y, 1e-6) for line in lines for _, y in line.points]
    begin, end = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    ticks = [10.0**power for power in range(begin, max(end, begin + 1) + 1)]
    marks = [(tick, seconds_text(tick)) for tick in ticks]
    return Plot(caption, f"{label}, logarithmic", lines, marks, logarithmic=True)


def _power(count: float) -> int:
    """Of 1024, for a unit."""
    return min(len(_UNITS) - 1, int(math.log2(count) // 10)) if count >= 1 else 0


def _nice(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))

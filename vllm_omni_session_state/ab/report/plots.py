"""Line plots as inline SVG: axes with units, nothing fetched, colours left to the page's style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

COLOURS = 8
"""Classes ``c0`` to ``c7`` of the style sheet."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 420, 260, 76, 10, 10, 42
_DOTS = 80
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot.

    Attributes:
        name: In the legend.
        points: Pairs of x, a whole number, and y, in order of x.
        colour: One of `COLOURS`.
        dashed: To be told apart without colours.
    """

    name: str
    points: tuple[tuple[int, float], ...]
    colour: int
    dashed: bool = False


def bytes_text(count: float) -> str:
    """A count of bytes with a unit, as ``1.50 MiB``."""
    power = min(len(_UNITS) - 1, int(math.log2(count) // 10)) if count >= 1 else 0
    value = count / 1024**power
    return f"{value:,.0f} B" if power == 0 else f"{value:,.2f} {_UNITS[power]}"


def seconds_text(seconds: float) -> str:
    """Seconds with a unit, as ``12.3 ms``."""
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def bytes_plot(lines: Sequence[Line], *, label: str, x_label: str, from_zero: bool = True) -> str:
    """A plot of bytes over steps.

    Args:
        lines: With at least one point in all.
        label: Of the y axis, without its unit.
        x_label: Of the x axis.
        from_zero: Whether the y axis begins at 0; else at what is least.
    """
    values = [y for line in lines for _, y in line.points]
    most, least = max(values), 0.0 if from_zero else min(values)
    power = min(len(_UNITS) - 1, int(math.log2(most) // 10)) if most >= 1 else 0
    unit = 1024**power
    step = _nice((most - least) / unit / 4 or most / unit / 20 or 1.0)
    begin = math.floor(least / unit / step) * step
    count = max(1, math.ceil(most / unit / step - begin / step - 1e-9))
    digits = max(0, -math.floor(math.log10(step)))
    ticks = [(begin + n * step, f"{begin + n * step:,.{digits}f}") for n in range(count + 1)]
    placed = [(value * unit, text) for value, text in ticks]
    return _svg(lines, placed, f"{label}, {_UNITS[power]}", x_label)


def seconds_plot(lines: Sequence[Line], *, label: str, x_label: str) -> str:
    """A plot of durations over steps, on a logarithmic axis. See `bytes_plot`."""
    values = [max(y, 1e-6) for line in lines for _, y in line.points]
    begin, end = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    powers = range(begin, max(end, begin + 1) + 1)
    ticks = [(10.0**power, seconds_text(10.0**power)) for power in powers]
    return _svg(lines, ticks, f"{label}, logarithmic", x_label, logarithmic=True)


def legend(lines: Sequence[Line]) -> str:
    """The names of the lines, each with its colour."""
    items = "".join(
        f'<li><svg class="key c{line.colour}" viewBox="0 0 24 8" aria-hidden="true">'
        f'<line x1="0" y1="4" x2="24" y2="4"{_DASH if line.dashed else ""}/></svg>'
        f"{html.escape(line.name)}</li>"
        for line in lines
    )
    return f'<ul class="legend">{items}</ul>'


_DASH = ' stroke-dasharray="5 4"'


def _nice(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def _svg(
    lines: Sequence[Line],
    ticks: Sequence[tuple[float, str]],
    y_label: str,
    x_label: str,
    *,
    logarithmic: bool = False,
) -> str:
    last = max([x for line in lines for x, _ in line.points] + [2])
    least, most = (_scaled(ticks[end][0], logarithmic=logarithmic) for end in (0, -1))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def across(x: float) -> float:
        return _LEFT + (x - 1) / (last - 1) * (right - _LEFT)

    def up(y: float) -> float:
        share = (_scaled(y, logarithmic=logarithmic) - least) / (most - least)
        return bottom - share * (bottom - _TOP)

    parts = []
    for value, text in ticks:
        y = up(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{html.escape(text)}</text>')
    parts += [
        f'<text x="{across(x):.1f}" y="{bottom + 16}" text-anchor="middle">{x}</text>'
        for x in _whole_ticks(last)
    ]
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text class="axis" x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">'
        f"{html.escape(y_label)}</text>"
        f'<text class="axis" x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">'
        f"{html.escape(x_label)}</text>"
    )
    for line in lines:
        places = [(across(x), up(y)) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<g class="c{line.colour}"><polyline points="{path}"{_DASH if line.dashed else ""}/>')
        if len(places) <= _DOTS:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in places]
        parts.append("</g>")
    title = html.escape(f"{y_label} over {x_label}")
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg class="plot" {box} role="img" aria-label="{title}">{"".join(parts)}</svg>'


def _scaled(value: float, *, logarithmic: bool) -> float:
    return math.log10(max(value, 1e-6)) if logarithmic else value


def _whole_ticks(last: int) -> list[int]:
    step = max(1, int(_nice(last / 6)))
    return [1, *(x for x in range(step, last + 1, step) if x > 1)]

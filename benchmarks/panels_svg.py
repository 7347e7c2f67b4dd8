"""Panels of a dashboard as one SVG: lines over time and big numbers, at their places in Grafana's grid.

The picture holds all that it shows: no font, script or style is fetched. It is drawn for a white page, and
for a dark one where the reader's browser asks for that. Where the values come from is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

COLUMN, ROW, GAP, MARGIN = 41, 27, 8, 14
"""Of the grid: width and height of a cell, space between panels, space around all of them."""

SMALL, PLAIN, BIG = 13.5, 15.5, 36
"""Sizes of the writing: axes and legends, titles, the number of a stat panel."""

LETTER = SMALL * 0.6
"""Width of a letter of a wide font: which one the reader has is not known."""

LIGHT = ("#0b6fb8", "#d1550a", "#0a8a68", "#a4449b", "#b08400", "#c22f42", "#4a5fc1", "#5f6b6d")
DARK = ("#5cb3f0", "#ff9a57", "#4fd0ab", "#e28bd8", "#e8c14a", "#ff7a8a", "#98a8ff", "#a9b6b8")
"""Colours of the series, in their order."""

Point = tuple[float, float]
"""Seconds since the run began, and a value."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line.

    Attributes:
        name: In the legend.
        points: In the order of time; where none is for more than a few seconds, the line has a gap.
    """

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        title: Above it.
        unit: As Grafana names it: ``short``, ``bytes``, ``binBps``, ``s``, ``ops`` or ``percentunit``.
        number: Whether it shows its last value and not a course.
        stacked: Whether its series lie on each other.
        decimals: Of its values; ``None`` for as many as they need.
        x: Of the grid's 24 columns.
        y: Row of the grid.
        w: Columns.
        h: Rows.
        series: What it shows.
    """

    title: str
    unit: str
    number: bool
    stacked: bool
    decimals: int | None
    x: int
    y: int
    w: int
    h: int
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A part of the picture."""

    left: float
    top: float
    right: float
    bottom: float


def drawing(panels: Sequence[Panel], *, seconds: float, caption: Sequence[str]) -> str:
    """Draw them.

    Args:
        panels: Which.
        seconds: How long the time axes are.
        caption: Lines below.
    """
    width = 24 * COLUMN + 2 * MARGIN
    rows = max(panel.y + panel.h for panel in panels) * ROW + MARGIN
    height = rows + len(caption) * 20 + 22
    fonts = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
    size = f'viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{fonts}">',
        f"<title>{escape(', '.join(panel.title for panel in panels))}</title>",
        f"<desc>{escape(' '.join(caption))}</desc>",
        f"<style>{_style()}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
    ]
    for panel in panels:
        left, top = MARGIN + panel.x * COLUMN, MARGIN + panel.y * ROW
        box = Box(
            left + GAP / 2, top + GAP / 2, left + panel.w * COLUMN - GAP / 2, top + panel.h * ROW - GAP / 2
        )
        parts += _framed(panel, box)
        parts += _number(panel, box, seconds) if panel.number else _course(panel, box, seconds)
    parts += [_text(MARGIN + GAP, rows + 24 + line * 20, words, "note") for line, words in enumerate(caption)]
    return "\n".join([*parts, "</svg>", ""])


def said(value: float, unit: str, decimals: int | None = None) -> str:
    """A value with its unit, as it is read."""
    if unit == "percentunit":
        return f"{_short(value * 100, decimals)} %"
    if unit in ("bytes", "binBps"):
        power = _power(value, 1024)
        name = ("B", "KiB", "MiB", "GiB", "TiB")[power]
        return f"{_short(value / 1024**power, decimals)} {name}{'/s' if unit == 'binBps' else ''}"
    if unit == "s" and 0 < abs(value) < 1:
        return (
            f"{_short(value * 1000, decimals)} ms"
            if value >= 0.001
            else f"{_short(value * 1e6, decimals)} µs"
        )
    return _short(value, decimals) + {"s": " s", "ops": " ops/s"}.get(unit, "")


def ticks(top: float, unit: str, decimals: int | None = None) -> list[float]:
    """Two to six round values for an axis: from 0 to at least ``top``, or to 1 where that is nothing."""
    top = top if top > 1e-6 else 1.0
    scale = 1024.0 ** _power(top, 1024) if unit in ("bytes", "binBps") else 1.0
    wanted = top / scale / 4
    ten = 10.0 ** math.floor(math.log10(wanted))
    step = next(ten * each for each in (1, 2, 2.5, 5, 10) if ten * each >= wanted - 1e-12)
    if decimals == 0:
        step = max(1.0, math.ceil(step))
    count = max(1, math.ceil(top / scale / step - 1e-9))
    return [step * number * scale for number in range(count + 1)]


def _power(value: float, base: int) -> int:
    return min(4, int(math.log(value, base) + 1e-9)) if value >= 1 else 0


def _short(value: float, decimals: int | None) -> str:
    if decimals is not None:
        return f"{value:.{decimals}f}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _style() -> str:
    def colours(named: Sequence[str]) -> str:
        return "".join(f".s{n}{{stroke:{colour}}}.f{n}{{fill:{colour}}}" for n, colour in enumerate(named))

    plain = (
        ".page{fill:#f4f6f6}.panel{fill:#fff;stroke:#cfd8d8}.grid{stroke:#e1e7e7;stroke-width:1}"
        f".title{{fill:#1f2d2d;font-size:{PLAIN}px;font-weight:600}}"
        f".note{{fill:#46585a;font-size:{SMALL}px}}.mid{{text-anchor:middle}}.end{{text-anchor:end}}"
        f".big{{font-size:{BIG}px;font-weight:600;text-anchor:middle}}"
        "path{fill:none;stroke-width:1.7;stroke-linejoin:round}.area{stroke:none;fill-opacity:.22}"
    )
    dark = (
        ".page{fill:#161b1e}.panel{fill:#20272b;stroke:#3b474c}.grid{stroke:#343f44}"
        ".title{fill:#eef5f5}.note{fill:#b8c6c8}"
    )
    return f"{plain}{colours(LIGHT)}@media (prefers-color-scheme:dark){{{dark}{colours(DARK)}}}"


def _framed(panel: Panel, box: Box) -> list[str]:
    size = f'width="{box.right - box.left:g}" height="{box.bottom - box.top:g}"'
    return [
        f'<rect class="panel" x="{box.left:g}" y="{box.top:g}" {size} rx="4"/>',
        _text(box.left + 11, box.top + 22, panel.title, "title"),
    ]


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def _number(panel: Panel, box: Box, seconds: float) -> list[str]:
    (series,) = panel.series
    inner = Box(box.left + 2, box.top + 72, box.right - 2, box.bottom - 2)
    top = max(value for _, value in series.points) or 1.0
    line = [_at(point, inner, seconds, top * 1.1) for point in series.points]
    middle = (box.left + box.right) / 2
    words = said(series.points[-1][1], panel.unit, panel.decimals)
    return [
        *_area(0, line, [(line[0][0], inner.bottom), (line[-1][0], inner.bottom)]),
        _text(middle, box.top + 64, words, "big f0"),
    ]


def _course(panel: Panel, box: Box, seconds: float) -> list[str]:
    legend, rows = _legend(panel, box)
    levels = _levels(panel)
    marks = ticks(max((value for line in levels for _, value in line), default=0), panel.unit, panel.decimals)
    names = [said(mark, panel.unit, panel.decimals) for mark in marks]
    room = max(len(name) for name in names) * LETTER + 16
    inner = Box(box.left + room, box.top + 38, box.right - 26, box.bottom - 30 - rows * 18)
    parts = []
    for mark, name in zip(marks, names, strict=True):
        y = _at((0, mark), inner, seconds, marks[-1])[1]
        parts.append(f'<path class="grid" d="M{inner.left:.1f} {y:.1f}H{inner.right:.1f}"/>')
        parts.append(_text(inner.left - 6, y + 4.5, name, "note end"))
    for second in range(0, int(seconds) + 1, 30):
        x = _at((second, 0), inner, seconds, 1)[0]
        parts.append(_text(x, inner.bottom + 18, f"{second} s", "note mid"))
    below: Sequence[Point] = ()
    for n, level in enumerate(levels):
        for piece in _pieces(level):
            line = [_at(point, inner, seconds, marks[-1]) for point in piece]
            if panel.stacked:
                under = dict(below)
                base = [_at((at, under.get(at, 0)), inner, seconds, marks[-1]) for at, _ in piece]
                parts += _area(n, line, base)
            parts += [
                f'<path class="s{n % len(LIGHT)}" d="{_path(part)}"/>'
                for part in (_thick(line, base) if panel.stacked else [line])
            ]
        below = level
    return parts + legend


def _levels(panel: Panel) -> list[tuple[Point, ...]]:
    """The lines as they are drawn: of stacked series each on top of those before it."""
    if not panel.stacked:
        return [series.points for series in panel.series]
    sums: dict[float, float] = {}
    levels = []
    for series in panel.series:
        for at, value in series.points:
            sums[at] = sums.get(at, 0) + value
        levels.append(tuple((at, sums[at]) for at, _ in series.points))
    return levels


def _pieces(points: Sequence[Point], gap_s: float = 4) -> list[list[Point]]:
    pieces = [list(points[:1])]
    for before, point in pairwise(points):
        if point[0] - before[0] > gap_s:
            pieces.append([])
        pieces[-1].append(point)
    return [piece for piece in pieces if piece]


def _thick(line: Sequence[Point], base: Sequence[Point]) -> list[list[Point]]:
    """The parts of a stacked series' line where it is not nothing: there it would hide the one below."""
    parts: list[list[Point]] = [[]]
    for n, point in enumerate(line):
        if any(line[near] != base[near] for near in (n - 1, n, n + 1) if 0 <= near < len(line)):
            parts[-1].append(point)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def _at(point: Point, box: Box, seconds: float, top: float) -> Point:
    x = box.left + point[0] / seconds * (box.right - box.left)
    return x, box.bottom - point[1] / top * (box.bottom - box.top)


def _path(points: Sequence[Point]) -> str:
    """Through all points, without those between two of the same height."""
    kept = [
        point
        for n, point in enumerate(points)
        if n in (0, len(points) - 1) or not points[n - 1][1] == point[1] == points[n + 1][1]
    ]
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in kept)


def _area(n: int, line: Sequence[Point], base: Sequence[Point]) -> list[str]:
    back = _path(list(reversed(base))).replace("M", "L", 1)
    return [f'<path class="area f{n % len(LIGHT)}" d="{_path(line)}{back}Z"/>']


def _legend(panel: Panel, box: Box) -> tuple[list[str], int]:
    """The names of the series at the bottom, in as many rows as they need."""
    rows: list[list[tuple[float, int, str]]] = [[]]
    x = box.left + 12
    for n, series in enumerate(panel.series):
        if not series.points:
            continue
        width = len(series.name) * LETTER + 27
        if rows[-1] and x + width > box.right:
            rows.append([])
            x = box.left + 12
        rows[-1].append((x, n, series.name))
        x += width
    parts = []
    for line, row in enumerate(rows):
        y = box.bottom - 10 - (len(rows) - 1 - line) * 18
        for left, n, name in row:
            at = f'x="{left:.1f}" y="{y - 8:.1f}"'
            parts.append(f'<rect class="f{n % len(LIGHT)}" {at} width="13" height="5" rx="2"/>')
            parts.append(_text(left + 18, y, name, "note"))
    return parts, len(rows)

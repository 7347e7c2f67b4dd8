"""The parts of the page: each makes HTML of what came of two runs, ``""`` where it has nothing to say."""

from __future__ import annotations

import html
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from vllm_omni_session_state.ab.compare.comparison import Difference
from vllm_omni_session_state.ab.report.plots import (
    COLOURS,
    Line,
    bytes_plot,
    bytes_text,
    legend,
    seconds_plot,
    seconds_text,
)
from vllm_omni_session_state.ab.report.result import COULD_NOT_RUN, EQUAL, Result, Run, Step
from vllm_omni_session_state.ab.report.text import some
from vllm_omni_session_state.ab.workload.requests import Request

SHOWN = 50
"""Rows of differences on the page; all are counted."""

STEPS = "steps of all sessions, in order"
_CALLS = ("reset", "close")


def verdict(result: Result) -> str:
    """What came of it, in a few sentences."""
    found, status = result.comparison, result.status
    if status == EQUAL:
        word, text = "Equal", f"All {result.counted} are equal to the last bit."
    elif status == COULD_NOT_RUN:
        word = "Could not run:"
        text = f"{result.why or 'nothing was answered by both'}."
        if found is not None:
            count = len(found.differences)
            text += (
                f" Of the {result.counted} that both answered, {f'{count:,}' if count else 'none'} differ."
            )
    else:
        word, text = "Different", f"{result.unequal} are not the same."
    remarks = "".join(f"<p>{html.escape(line)}</p>" for line in result.remarks())
    return f'<div class="verdict s{status}"><b>{word}</b> {html.escape(text)}{remarks}</div>'


def differences(result: Result) -> str:
    """Where they differ, the first difference in words."""
    if result.comparison is None or not result.comparison.differences:
        return ""
    found, shown = result.comparison.differences, result.comparison.shown(SHOWN)
    rest = len(found) - len(shown)
    more = f"<p>And {rest:,} more.</p>" if rest else ""
    heads = ("session", "step", "tensor", "elements", "by at most", "first at", "does")
    table = _table(heads, map(_difference_row, shown), numbers={0, 1, 3, 4, 5})
    return (
        f"<h2>Where they differ</h2><p>First: {html.escape(str(found[0]))}.</p>{table}{more}"
        "<p>A difference is carried on by the steps of its session that come after it: begin with the first. "
        "Does the run with the flag off repeat itself? If not, nothing can be said: pin more.</p>"
    )


def _difference_row(difference: Difference) -> Sequence[str]:
    ask, numbers = difference.ask, difference.numbers
    place = (str(ask.session), str(ask.step), difference.tensor)
    if numbers is None:
        return (*place, f"off: {difference.off}; on: {difference.on}", "", "", ask.label)
    greatest = "not finite" if numbers.max_difference is None else f"{numbers.max_difference:.6g}"
    counted = f"{numbers.differing:,} of {numbers.elements:,}"
    return (*place, counted, greatest, str(list(numbers.first)), ask.label)


def session_bytes(result: Result) -> str:
    """What each session's state takes in both runs, plots for each device."""
    held = {run.word: _by_device(run) for run in (result.off, result.on)}
    if all(step.sessions is None for run in (result.off, result.on) for step in run.steps):
        return ""
    text = (
        "Bytes of the model's state after each step, counted alike in both runs: each allocation once, "
        "without weights, and without attention KV, which is the engine's in both. What is parked counts as "
        "it lies there: one block, attention KV and all."
    )
    head = f"<h2>Session state</h2><p>{text}</p>"
    devices = sorted({device for totals in held.values() for device in totals})
    if not devices:
        return (
            head + "<p>No session was there after any step, and 0 bytes are left: each had ended with its "
            "step, as Cosmos3's always do.</p>"
        )
    figures = []
    for device in devices:
        together = [
            _line_of(run, _summed(held[run.word].get(device, {}).values())) for run in (result.off, result.on)
        ]
        where = device if device.startswith("parked") else f"on {device}"
        figures.append(_bytes_figure(f"All sessions {where}", together))
        for word, totals in held.items():
            if device in totals:
                figures.append(_bytes_figure(f"Each session {where}, {word}", _each(totals[device])))
    return head + _figures(figures)


Points = Sequence[tuple[int, float]]


def _by_device(run: Run) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Bytes over steps by device and session."""
    totals: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for number, step in enumerate(run.steps, 1):
        for name, held in (step.sessions or {}).items():
            for device, nbytes in held.items():
                totals.setdefault(device, {}).setdefault(name, []).append((number, nbytes))
    return totals


def _summed(lines: Iterable[Points]) -> tuple[tuple[int, float], ...]:
    summed: Counter[int] = Counter()
    for points in lines:
        summed.update({number: int(nbytes) for number, nbytes in points})
    return tuple(sorted(summed.items()))


def _each(sessions: Mapping[str, Points]) -> list[Line]:
    names = sorted(sessions, key=lambda name: (len(name), name))
    lines = [Line(name, tuple(sessions[name]), number) for number, name in enumerate(names[: COLOURS - 1])]
    if rest := names[COLOURS - 1 :]:
        points = _summed(sessions[name] for name in rest)
        lines.append(Line(f"{len(rest)} more together", points, COLOURS - 1))
    return lines


def _bytes_figure(caption: str, lines: list[Line]) -> str:
    there = [line for line in lines if line.points]
    return _figure(caption, bytes_plot(there, label="session state", x_label=STEPS), there)


def memory(result: Result) -> str:
    """The most that the worker had at once during each step, both runs."""
    lines = _both(result, lambda step: float(step.peak_bytes))
    if not lines:
        return ""
    text = (
        "The most memory that the worker had at once in each step, as vLLM-Omni measures it: reserved on "
        "the device, with weights and buffers. It moves with what the allocator keeps; it counts no sessions."
    )
    plot = bytes_plot(lines, label="memory", x_label=STEPS, from_zero=False)
    figure = _figure("Memory of the worker at its peak (the axis need not begin at 0)", plot, lines)
    return f"<h2>Memory</h2><p>{text}</p>{_figures([figure])}"


def times(result: Result) -> str:
    """How long steps took."""
    lines = _both(result, lambda step: step.seconds)
    if not lines:
        return ""
    rows = []
    for run in (result.off, result.on):
        seconds = [step.seconds for ask, step in _steps(result, run)]
        if seconds:
            middle, most = statistics.median(seconds), max(seconds)
            row = (middle, most, sum(seconds), run.seconds)
            rows.append((run.word, *(seconds_text(value) for value in row)))
    heads = ("run", "median", "longest", "all", "with loading")
    table = _table(heads, rows, numbers=set(range(1, 5)))
    plot = seconds_plot(lines, label="step time", x_label=STEPS)
    note = (
        "From the client's side, one run after the other: a first step may compile, and what else runs on "
        "the machine shows."
    )
    return f"<h2>Step times</h2>{table}<p>{note}</p>{_figures([_figure('Time of each step', plot, lines)])}"


def about(result: Result) -> str:
    """What was run, on what, and where all of it is."""
    rows = []
    for name, value in result.about.items():
        if isinstance(value, dict):
            words = ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)
        else:
            words = "" if value is None else str(value)
        if words:
            rows.append((name.replace("_", " "), words))
    for run in (result.off, result.on):
        rows.append((f"{run.word}: answered", f"{len(run.steps):,} of {len(result.asks):,}"))
        if run.failure:
            rows.append((f"{run.word}: failed", run.failure))
        rows += [(f"{run.word}: log", run.log), (f"{run.word}: outputs", run.outputs)]
    return f'<h2>What was run</h2><div class="about">{_table((), rows)}</div>'


def every_step(result: Result) -> str:
    """All steps, folded."""
    rows = []
    for ask in result.asks:
        steps = [
            run.steps[ask.number] if ask.number < len(run.steps) else None for run in (result.off, result.on)
        ]
        took = ("" if step is None else seconds_text(step.seconds) for step in steps)
        held = (
            "" if step is None or step.sessions is None else bytes_text(_held(step, ask)) for step in steps
        )
        rows.append((str(ask.number + 1), str(ask.session), str(ask.step), ask.label, *took, *held))
    heads = ("", "session", "step", "does", "off took", "on took", "off: its session", "on: its session")
    table = _table(heads, rows, numbers={0, 1, 2, *range(4, 8)})
    return (
        f"<h2>Every step</h2><details><summary>{some(len(rows), 'step')}</summary>{table}</details>"
        if rows
        else ""
    )


def _held(step: Step, ask: Request) -> int:
    return sum(((step.sessions or {}).get(f"session {ask.session}") or {}).values())


def _steps(result: Result, run: Run) -> list[tuple[Request, Step]]:
    """Steps without calls, which are over at once."""
    return [pair for pair in zip(result.asks, run.steps, strict=False) if pair[0].do not in _CALLS]


def _both(result: Result, value: Callable[[Step], float]) -> list[Line]:
    lines = [
        _line_of(run, ((ask.number + 1, value(step)) for ask, step in _steps(result, run) if value(step)))
        for run in (result.off, result.on)
    ]
    return [line for line in lines if line.points]


def _line_of(run: Run, points: Iterable[tuple[int, float]]) -> Line:
    return Line(run.word, tuple(points), 0 if run.flag else 1, dashed=not run.flag)


def _figure(caption: str, plot: str, lines: Sequence[Line]) -> str:
    return f"<figure><figcaption>{html.escape(caption)}</figcaption>{plot}{legend(lines)}</figure>"


def _figures(figures: Iterable[str]) -> str:
    return f'<div class="plots">{"".join(figures)}</div>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: set[int] | None = None) -> str:
    """A table; columns in ``numbers`` stand at the right."""

    def cell(kind: str, column: int, text: str) -> str:
        right = ' class="n"' if numbers and column in numbers else ""
        return f"<{kind}{right}>{html.escape(text)}</{kind}>"

    head = "".join(cell("th", column, text) for column, text in enumerate(heads))
    body = "".join(
        f"<tr>{''.join(cell('td', column, text) for column, text in enumerate(row))}</tr>" for row in rows
    )
    return f'<div class="wide"><table>{f"<tr>{head}</tr>" if head else ""}{body}</table></div>'

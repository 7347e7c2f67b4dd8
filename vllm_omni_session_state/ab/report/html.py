"""What came of two runs as one HTML file: no script, and nothing is fetched, from anywhere.

It is read on a telephone as on a desk, in light and in dark. Here is what each part shows, ``None`` or empty
where it has nothing to say; all words and marks are the template's. It needs jinja2.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from vllm_omni_session_state.ab.report import plots
from vllm_omni_session_state.ab.report.plots import COLOURS, Line, Plot, bytes_text, seconds_text
from vllm_omni_session_state.ab.report.result import WORDS, Result, Run, Step, some
from vllm_omni_session_state.ab.workload.requests import CALLS, Request
from vllm_omni_session_state.base.printable import printable

SHOWN = 50
"""Rows of differences on the page; all are counted."""

Points = Sequence[tuple[int, float]]
Row = Sequence[str]

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def page(result: Result) -> str:
    """The whole file."""
    text = TEMPLATES.get_template("report.html.j2").render(
        result=result,
        word=WORDS[result.status],
        differences=[] if result.comparison is None else result.comparison.shown(SHOWN),
        state=_session_plots(result),
        memory=_memory_plot(result),
        times=_times_plot(result),
        took=list(_took(result)),
        about=list(_about(result)),
        steps=[_step(result, ask) for ask in result.asks],
        some=some,
        colours=COLOURS,
    )
    return printable(text, keep="\n")


def _session_plots(result: Result) -> list[Plot] | None:
    """What each session's state takes, plots for each device; ``None`` where nobody could look."""
    if all(step.sessions is None for run in result.runs for step in run.steps):
        return None
    held = [(run, _by_device(run)) for run in result.runs]
    found = []
    for device in sorted({device for _, totals in held for device in totals}):
        where = device if device.startswith("parked") else f"on {device}"
        together = [_line_of(run, _summed(totals.get(device, {}).values())) for run, totals in held]
        found.append(_state_plot(f"All sessions {where}", together))
        for run, totals in held:
            if device in totals:
                found.append(_state_plot(f"Each session {where}, {run.word}", _each(totals[device])))
    return found


def _state_plot(caption: str, lines: Iterable[Line]) -> Plot:
    return plots.bytes_plot(caption, [line for line in lines if line.points], label="session state")


def _by_device(run: Run) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Bytes over steps by device and session."""
    totals: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for number, step in enumerate(run.steps, 1):
        for name, held in (step.sessions or {}).items():
            for device, nbytes in held.items():
                totals.setdefault(device, {}).setdefault(name, []).append((number, nbytes))
    return totals


def _summed(lines: Iterable[Points]) -> Points:
    summed: Counter[int] = Counter()
    for points in lines:
        summed.update({number: int(nbytes) for number, nbytes in points})
    return sorted(summed.items())


def _each(sessions: Mapping[str, Points]) -> Iterator[Line]:
    names = sorted(sessions, key=lambda name: (len(name), name))
    for number, name in enumerate(names[: COLOURS - 1]):
        yield Line(name, sessions[name], number)
    if rest := names[COLOURS - 1 :]:
        points = _summed(sessions[name] for name in rest)
        yield Line(f"{len(rest)} more together", points, COLOURS - 1)


def _memory_plot(result: Result) -> Plot | None:
    """The most that the worker had at once during each step, both runs."""
    lines = _both(result, lambda step: float(step.peak_bytes))
    caption = "Memory of the worker at its peak (the axis need not begin at 0)"
    return plots.bytes_plot(caption, lines, label="memory", from_zero=False) if lines else None


def _times_plot(result: Result) -> Plot | None:
    """How long steps took."""
    lines = _both(result, lambda step: step.seconds)
    return plots.seconds_plot("Time of each step", lines, label="step time") if lines else None


def _took(result: Result) -> Iterator[Row]:
    """The same in figures, a row for each run."""
    for run in result.runs:
        if seconds := [step.seconds for _, step in _steps(result, run)]:
            figures = (statistics.median(seconds), max(seconds), sum(seconds), run.seconds)
            yield run.word, *map(seconds_text, figures)


def _about(result: Result) -> Iterator[Row]:
    """What was run, on what, and where all of it is."""
    for name, value in result.about.items():
        if isinstance(value, dict):
            words = ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)
        else:
            words = "" if value is None else str(value)
        if words:
            yield name.replace("_", " "), words
    for run in result.runs:
        yield f"{run.word}: answered", f"{len(run.steps):,} of {len(result.asks):,}"
        if run.failure:
            yield f"{run.word}: failed", run.failure
        yield f"{run.word}: log", run.log
        yield f"{run.word}: outputs", run.outputs


def _step(result: Result, ask: Request) -> Row:
    """An ask with what it took, and what its session had afterwards, in both runs."""
    steps = [run.steps[ask.number] if ask.number < len(run.steps) else None for run in result.runs]
    took = ("" if step is None else seconds_text(step.seconds) for step in steps)
    held = ("" if step is None or step.sessions is None else bytes_text(_held(step, ask)) for step in steps)
    return str(ask.number + 1), str(ask.session), str(ask.step), ask.label, *took, *held


def _held(step: Step, ask: Request) -> int:
    return sum(((step.sessions or {}).get(f"session {ask.session}") or {}).values())


def _steps(result: Result, run: Run) -> list[tuple[Request, Step]]:
    """Steps without calls, which are over at once."""
    return [pair for pair in zip(result.asks, run.steps, strict=False) if pair[0].do not in CALLS]


def _both(result: Result, value: Callable[[Step], float]) -> list[Line]:
    lines = [
        _line_of(run, [(ask.number + 1, value(step)) for ask, step in _steps(result, run) if value(step)])
        for run in result.runs
    ]
    return [line for line in lines if line.points]


def _line_of(run: Run, points: Points) -> Line:
    return Line(run.word, points, 0 if run.flag else 1, dashed=not run.flag)

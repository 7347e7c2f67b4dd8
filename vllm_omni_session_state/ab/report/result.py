"""What came of two runs, as plain values: all that the page shows and more, for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from vllm_omni_session_state.ab.compare.comparison import Comparison, Difference, Numbers
from vllm_omni_session_state.ab.workload.requests import Request

FORMAT = 1
EQUAL, DIFFERENT, COULD_NOT_RUN = 0, 1, 2
WORDS = {EQUAL: "equal", DIFFERENT: "different", COULD_NOT_RUN: "could not run"}

MAX_DIFFERENCES = 10_000
"""So many are written out; all are counted."""


def some(count: int, noun: str) -> str:
    """A count with its noun, as ``1 step``, ``1,200 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class Step:
    """One answered ask."""

    seconds: float
    peak_bytes: int  # of the worker's device, as vLLM-Omni measured it; 0 where it did not, as for a call
    sessions: dict[str, dict[str, int]] | None  # bytes by device of each; None where nobody can look


@dataclass(slots=True)
class Run:
    """One process, with the flag on or off: as far as it came, and why it ended early, in one line."""

    flag: bool
    log: str
    outputs: str
    steps: list[Step] = field(default_factory=list)
    said: list[tuple[int, str]] = field(default_factory=list)
    """What the plugin said at WARNING, each with the number of the ask with which it was heard."""
    failure: str | None = None
    seconds: float = 0.0

    @property
    def word(self) -> str:
        """Which one, for a reader."""
        return "flag on" if self.flag else "flag off"


@dataclass(slots=True)
class Result:
    """What came of both. ``why`` says in one line why there is no verdict, if there is none."""

    off: Run
    on: Run
    about: dict[str, Any] = field(default_factory=dict)
    asks: tuple[Request, ...] = ()
    comparison: Comparison | None = None  # of what both have answered, if that is anything
    why: str | None = None

    @property
    def runs(self) -> tuple[Run, Run]:
        """Both, in order."""
        return self.off, self.on

    @property
    def status(self) -> int:
        """The exit status."""
        if self.why is not None or self.comparison is None:
            return COULD_NOT_RUN
        return DIFFERENT if self.comparison.differences else EQUAL

    @property
    def both(self) -> int:
        """Asks that both have answered."""
        return min(len(self.off.steps), len(self.on.steps))

    def amount(self, *, different: bool = False) -> str:
        """How much was compared, or how much of it differs, in words."""
        found = self.comparison or Comparison()
        outputs, values = some(found.outputs, "output"), some(found.values, "value")
        if different:
            outputs = f"{found.outputs_different:,} of {outputs}"
            values = f"{found.values_different:,} of {values}"
        state = f" and {values} of session state" if found.values else ""
        return f"{outputs} of {some(self.both, 'step')}{state}"

    @property
    def left(self) -> tuple[Request, ...]:
        """Asks that ended a session of which the workers counted something afterwards, with the flag on."""
        return tuple(
            ask
            for ask, step in zip(self.asks, self.on.steps, strict=False)
            if ask.ends and step.sessions
            if ask.do == "generate" or f"session {ask.session}" in step.sessions
        )

    def remarks(self) -> Iterator[str]:
        """What is to be known beside the verdict, a line each."""
        if self.left:
            times = f"{len(self.left):,} of {some(len(self.asks), 'step')}"
            where = f"after {times}, first {self.left[0].place}"
            yield f"LEFT BEHIND: with the flag on, an ended session was still there {where}."
        for run in self.runs:
            if run.said:
                number, text = run.said[0]
                more = f", the first of {len(run.said):,}" if len(run.said) > 1 else ""
                place = self.asks[number].place
                yield f"WARNING of the plugin with the {run.word}{more}, heard with {place}: {text}"
        if self.comparison is not None and self.comparison.unread:
            first, why = self.comparison.unread[0]
            times = some(len(self.comparison.unread), "step")
            yield f"Session state was not compared after {times}, first {first.place}: {why}."

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        found = self.comparison or Comparison()
        differences = [_difference(difference) for difference in found.differences[:MAX_DIFFERENCES]]
        return {
            "format": FORMAT,
            "status": self.status,
            "verdict": WORDS[self.status],
            "why": self.why,
            "about": self.about,
            "asked": len(self.asks),
            "compared": self.both,
            "outputs": found.outputs,
            "outputs_bytes": found.nbytes,
            "outputs_different": found.outputs_different,
            "state_values": found.values,
            "state_values_different": found.values_different,
            "state_unread": [{**ask.as_json(), "why": why} for ask, why in found.unread],
            "first_difference": differences[0] if differences else None,
            "differences": differences,
            "left": [ask.as_json() for ask in self.left],
            "runs": {"off": self._run(self.off), "on": self._run(self.on)},
        }

    def _run(self, run: Run) -> dict[str, Any]:
        steps = zip(self.asks, run.steps, strict=False)
        return {
            "log": run.log,
            "outputs": run.outputs,
            "failure": run.failure,
            "seconds": run.seconds,
            "warnings": [{**self.asks[number].as_json(), "text": text} for number, text in run.said],
            "steps": [{**ask.as_json(), **asdict(step)} for ask, step in steps],
        }


def _difference(difference: Difference) -> dict[str, Any]:
    names = {"tensor": difference.tensor, "off": difference.off, "on": difference.on}
    unknown = dict.fromkeys(each.name for each in fields(Numbers))
    numbers = unknown if difference.numbers is None else asdict(difference.numbers)
    return {**difference.ask.as_json(), **names, **numbers}

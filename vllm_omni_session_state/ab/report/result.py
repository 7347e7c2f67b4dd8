"""What came of two runs, as plain values: all that the page shows and more, for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_session_state.ab.compare.comparison import Comparison, Difference
from vllm_omni_session_state.ab.report.text import some
from vllm_omni_session_state.ab.workload.requests import Request

FORMAT = 1
EQUAL, DIFFERENT, COULD_NOT_RUN = 0, 1, 2
WORDS = {EQUAL: "equal", DIFFERENT: "different", COULD_NOT_RUN: "could not run"}

MAX_DIFFERENCES = 10_000
"""So many are written out; all are counted."""


@dataclass(frozen=True, slots=True)
class Step:
    """One answered ask.

    Attributes:
        seconds: From sending it to its answer.
        peak_bytes: The most that the worker had of its device at once meanwhile, as vLLM-Omni measured it; 0
            where it did not, as for a call.
        sessions: Bytes by device of each session after it; ``None`` where nobody can look.
    """

    seconds: float
    peak_bytes: int
    sessions: dict[str, dict[str, int]] | None


@dataclass(slots=True)
class Run:
    """One process.

    Attributes:
        flag: Whether the flag was on.
        log: Its log.
        outputs: Folder with its outputs.
        steps: As far as it came.
        said: What the plugin said at WARNING, and the number of the ask with which it was heard.
        failure: Why it ended early, in one line.
        seconds: How long it took in all.
    """

    flag: bool
    log: str
    outputs: str
    steps: list[Step] = field(default_factory=list)
    said: list[tuple[int, str]] = field(default_factory=list)
    failure: str | None = None
    seconds: float = 0.0

    @property
    def word(self) -> str:
        """Which one, for a reader."""
        return "flag on" if self.flag else "flag off"


@dataclass(slots=True)
class Result:
    """What came of both.

    Attributes:
        off: The run with the flag off.
        on: The other.
        about: What was run and on what, in words.
        asks: What was sent to both.
        comparison: Of what both have answered; ``None`` where that is nothing.
        why: There is no verdict, and why, in one line.
    """

    off: Run
    on: Run
    about: dict[str, Any] = field(default_factory=dict)
    asks: tuple[Request, ...] = ()
    comparison: Comparison | None = None
    why: str | None = None

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

    @property
    def counted(self) -> str:
        """How much was compared, in words."""
        found = self.comparison
        if found is None:
            return "nothing"
        state = f" and {some(found.values, 'value')} of session state" if found.values else ""
        return f"{some(found.outputs, 'output')} of {some(self.both, 'step')}{state}"

    @property
    def unequal(self) -> str:
        """How much of it differs, in words."""
        found = self.comparison
        if found is None:
            return "nothing"
        state = f" and {found.values_different:,} of {some(found.values, 'value')} of session state"
        outputs = f"{found.outputs_different:,} of {some(found.outputs, 'output')}"
        outputs += f" of {some(self.both, 'step')}"
        return outputs + (state if found.values else "")

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
        for run in (self.off, self.on):
            if run.said:
                number, text = run.said[0]
                more = f", the first of {len(run.said):,}" if len(run.said) > 1 else ""
                place = self.asks[number].place
                yield f"WARNING of the plugin with the {run.word}{more}, heard with {place}: {text}"
        unread = () if self.comparison is None else self.comparison.unread
        if unread:
            first, why = unread[0]
            times = some(len(unread), "step")
            yield f"Session state was not compared after {times}, first {first.place}: {why}."

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        found = self.comparison
        differences = () if found is None else found.differences
        return {
            "format": FORMAT,
            "status": self.status,
            "verdict": WORDS[self.status],
            "why": self.why,
            "about": self.about,
            "asked": len(self.asks),
            "compared": self.both,
            "outputs": 0 if found is None else found.outputs,
            "outputs_bytes": 0 if found is None else found.nbytes,
            "outputs_different": 0 if found is None else found.outputs_different,
            "state_values": 0 if found is None else found.values,
            "state_values_different": 0 if found is None else found.values_different,
            "state_unread": [{**ask.as_json(), "why": why} for ask, why in found.unread] if found else [],
            "first_difference": _difference(differences[0]) if differences else None,
            "differences": [_difference(difference) for difference in differences[:MAX_DIFFERENCES]],
            "left": [ask.as_json() for ask in self.left],
            "runs": {"off": self._run(self.off), "on": self._run(self.on)},
        }

    def _run(self, run: Run) -> dict[str, Any]:
        return {
            "log": run.log,
            "outputs": run.outputs,
            "failure": run.failure,
            "seconds": run.seconds,
            "warnings": [{**self.asks[number].as_json(), "text": text} for number, text in run.said],
            "steps": [
                {
                    **ask.as_json(),
                    "seconds": step.seconds,
                    "peak_bytes": step.peak_bytes,
                    "sessions": step.sessions,
                }
                for ask, step in zip(self.asks, run.steps, strict=False)
            ],
        }


def _difference(difference: Difference) -> dict[str, Any]:
    numbers = difference.numbers
    return {
        **difference.ask.as_json(),
        "tensor": difference.tensor,
        "off": difference.off,
        "on": difference.on,
        "elements": None if numbers is None else numbers.elements,
        "differing": None if numbers is None else numbers.differing,
        "first": None if numbers is None else list(numbers.first),
        "max_difference": None if numbers is None else numbers.max_difference,
    }

"""What clients send to a model under test, as plain records; what goes with them as arrays comes apart.

Not here: which there are (`dreamzero`, `cosmos3`, `trace`), and how one reaches vLLM-Omni (`runs/child.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

DREAMZERO, COSMOS3 = "DreamZero", "Cosmos3"

CHECKPOINTS = {DREAMZERO: "GEAR-Dreams/DreamZero-DROID", COSMOS3: "nvidia/Cosmos3-Nano"}
"""Model -> the checkpoint that is served if none is named."""

CALLS = ("reset", "close")
"""What is asked for by a call, and is no step."""

DOES = {DREAMZERO: ("step", *CALLS), COSMOS3: ("generate",)}
"""Model -> what its clients can ask for."""

MAX_SESSIONS, MAX_STEPS = 64, 1000
DEFAULTS = {DREAMZERO: (3, 12), COSMOS3: (2, 6)}
"""Model -> sessions, and steps of each."""


@dataclass(frozen=True, slots=True)
class Request:
    """One thing that a client asks for."""

    number: int  # among all asks, from 0
    session: int  # from 1
    step: int  # among this session's asks, from 1
    do: str  # one of the model's `DOES`
    words: Mapping[str, Any]  # what is asked for, as JSON has it

    @property
    def session_id(self) -> str:
        """The id under which vLLM-Omni gets it: a position, and nobody's secret."""
        return f"ab-{self.session}"

    @property
    def ends(self) -> bool:
        """Whether nothing of its session may be there afterwards."""
        return self.do in ("close", "generate") or bool(self.words.get("close"))

    @property
    def place(self) -> str:
        """Where it stands, for a reader."""
        return f"session {self.session}, step {self.step} ({self.label})"

    def as_json(self) -> dict[str, Any]:
        """The same for scripts."""
        return {"session": self.session, "step": self.step, "does": self.label}

    @property
    def label(self) -> str:
        """What it is, for a reader."""
        if self.do == "generate":
            return f"{str(self.words['kind']).upper()}{' with CFG' if self.words['guidance'] > 1 else ''}"
        if self.do == "step":
            marks = [mark for mark in ("reset", "close") if self.words.get(mark)]
            return " ".join([str(self.words["prompt"]), *(f"({mark})" for mark in marks)])
        return self.do


class Observations(Protocol):
    """All that is sent in a run to one of the models: the same each time that it is asked for."""

    model: str
    asks: tuple[Request, ...]

    def arrays(self, ask: Request) -> dict[str, Any]:
        """What goes with an ask: NumPy arrays by name."""


def numbered(asks: Sequence[tuple[int, str, Mapping[str, Any]]]) -> tuple[Request, ...]:
    """Make asks of sessions, what they do and their words, in order."""
    steps: dict[int, int] = {}
    done = []
    for number, (session, do, words) in enumerate(asks):
        steps[session] = steps.get(session, 0) + 1
        done.append(Request(number, session, steps[session], do, words))
    return tuple(done)

"""Many robots on one tiny DreamZero: who comes when, what each sees and is told, and each one alone.

What a step is given depends on the session and on its own count of steps, not on who else is there, so
outputs of any order of the sessions can be compared. Not here: where the model runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from omni_tiny.inproc import TinyDreamZero

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from omni_tiny.inproc import Step

Key = tuple[int, int]
"""A session's number, and its step, from 0."""

Outputs = dict[Key, "Step"]


class Steps(Protocol):
    """Whoever runs a step: `TinyDreamZero`, `OmniDreamZero`."""

    def step(self, session: str, *, rng: Any, prompt: str = ..., frames: int = ...) -> Step:
        """Run one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """So many sessions of so many steps; every third one is told something else in its last two.

    Attributes:
        sessions: How many.
        steps: Of each; an attention window begins anew at the fifth, and every fourth from there.
        seed: Of the order in which they come.
    """

    sessions: int
    steps: int
    seed: int = 0

    @property
    def names(self) -> list[str]:
        """Their ids."""
        return [self.name(number) for number in range(self.sessions)]

    def name(self, number: int) -> str:
        """The id of one."""
        return f"robot-{number}"

    def prompt(self, number: int, step: int) -> str:
        """What it is told."""
        changed = number % 3 == 0 and step >= self.steps - 2
        return "another task" if changed else f"task {number}"

    def order(self) -> Iterator[Key]:
        """All steps of all sessions, shuffled; each session's own in their order."""
        rng, done = np.random.default_rng(self.seed), [0] * self.sessions
        for number in rng.permutation(np.repeat(np.arange(self.sessions), self.steps)).tolist():
            yield number, done[number]
            done[number] += 1

    def run(self, model: Steps, key: Key) -> Step:
        """Run one step."""
        number, step = key
        return model.step(
            self.name(number),
            rng=np.random.default_rng([number, step]),
            prompt=self.prompt(number, step),
            frames=4 if step else 1,
        )

    def alone(self, checkpoint: str | Path) -> Outputs:
        """Every output of every session when it is the only one, on the model's own path."""
        outputs: Outputs = {}
        with TinyDreamZero(checkpoint, flag=False, capacity=1) as model:
            for number in range(self.sessions):
                for step in range(self.steps):
                    outputs[number, step] = self.run(model, (number, step))
                model.close(self.name(number))
        return outputs


def differing(alone: Outputs, outputs: Outputs) -> list[Key]:
    """The steps whose outputs are not equal to the bit, of all that ``outputs`` has."""
    return [key for key, output in outputs.items() if not alone[key].equals(output)]

"""What a model's clients do in the demo: one `Scenario` per model, as a list of operations.

A scenario drives any model of the harness that has ``step``, ``reset`` and ``close``, in this process or
through `Omni`. Importing this file costs neither torch nor the host.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that a client does.

    Attributes:
        label: What it is, for a reader.
        run: Does it to a model and returns the outputs by name: arrays, tensors or plain values.
        look: It changes nothing and only asks the worker what its sessions hold.
    """

    label: str
    run: Callable[[Any], Mapping[str, Any]]
    look: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """One model's demo.

    Attributes:
        model: The model's name.
        story: What happens, as the start of a sentence.
        outputs: What is compared, in words.
        write: Writes a checkpoint and a deploy YAML into a folder.
        open: Serves what stands in that folder; its context is the model that operations get.
        operations: In order.
    """

    model: str
    story: str
    outputs: str
    write: Callable[[Path], None]
    open: Callable[[Path], AbstractContextManager[Any]]
    operations: tuple[Operation, ...]


ROBOTS = ("robot-1", "robot-2", "robot-3")
"""The sessions of DreamZero's scenario."""


def dreamzero() -> Scenario:
    """Three robots on one DreamZero."""
    return Scenario(
        model="tiny DreamZero",
        story="Three interleaved sessions, a prompt change, window resets, an explicit reset, a close",
        outputs="actions and video of every step, and the answers to reset and close",
        write=_write_dreamzero,
        open=_open_dreamzero,
        operations=tuple(_robots()),
    )


SCENARIOS = {"dreamzero": dreamzero}
"""Name on the command line -> maker."""


def _write_dreamzero(folder: Path) -> None:
    from omni_tiny.checkpoint.dreamzero import write_dreamzero
    from omni_tiny.omni_runs import write_deploy

    write_dreamzero(folder / "checkpoint")
    write_deploy(folder / "deploy.yaml", folder / "checkpoint")


def _open_dreamzero(folder: Path) -> AbstractContextManager[Any]:
    from omni_tiny.omni_runs import OmniDreamZero

    return OmniDreamZero(folder / "checkpoint", folder / "deploy.yaml")


def _robots() -> list[Operation]:
    first, second, third = ROBOTS
    prompts = {first: "pick up the cup", second: "open the drawer", third: "wave"}
    done: list[Operation] = []

    def step(robot: str, **how: Any) -> None:
        run = functools.partial(_step, session=robot, prompt=prompts[robot], draw=len(done), **how)
        done.append(Operation(f"{robot}: {prompts[robot]}", run))

    for turn in range(3):  # a session's first step shows one picture, a later one a chunk
        for robot in ROBOTS:
            step(robot, frames=1 if turn == 0 else 4)
    prompts[second] = "close the drawer"
    for turn in range(8):  # the attention window is full after five steps of the same prompt
        for robot in ROBOTS:
            step(robot, reset=robot == third and turn == 2)
    done.append(Operation(f"{first}: reset", functools.partial(_call, name="reset", session=first)))
    for _ in range(2):
        for robot in ROBOTS:
            step(robot)
    done.append(Operation("look at all three", _listing, look=True))
    done.append(Operation(f"{second}: close", functools.partial(_call, name="close", session=second)))
    done.append(Operation("look at the rest", _listing, look=True))
    step(third)
    step(first, close=True)
    return done


def _step(model: Any, *, session: str, draw: int, **how: Any) -> Mapping[str, Any]:
    import numpy as np

    step = model.step(session, rng=np.random.default_rng(draw), **how)
    return {"actions": step.actions, "video": step.video}


def _call(model: Any, *, name: str, session: str) -> Mapping[str, Any]:
    return {"answer": getattr(model, name)(session)}


def _listing(model: Any) -> Mapping[str, Any]:
    return model.call("tiny_listing", (*ROBOTS, "default"))

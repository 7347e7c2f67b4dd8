"""What a model's clients do in the demo: one `Scenario` per model, as a list of operations.

DreamZero's drives any model of the harness that has ``step``, ``reset`` and ``close``, in this process or
through `Omni`; Cosmos3's drives the one through `Omni`. Importing this costs neither torch nor vLLM-Omni.
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
        model: The model's name, without the "tiny".
        story: What happens, as the start of a sentence.
        outputs: What is compared, in words.
        write: Writes a checkpoint and a deploy YAML into a folder.
        open: Serves what stands in that folder; its context is the model that operations get.
        operations: In order.
        seconds: What these take on a small machine.
    """

    model: str
    story: str
    outputs: str
    write: Callable[[Path], None]
    open: Callable[[Path], AbstractContextManager[Any]]
    operations: tuple[Operation, ...]
    seconds: float


ROBOTS = ("robot-1", "robot-2", "robot-3")
"""The sessions of DreamZero's scenario."""


def dreamzero() -> Scenario:
    """Three robots on one DreamZero."""
    return Scenario(
        model="DreamZero",
        story="Three interleaved sessions, a prompt change, window resets, an explicit reset, a close",
        outputs="actions and video of every step, and the answers to reset and close",
        write=_write_dreamzero,
        open=_open_dreamzero,
        operations=tuple(_robots()),
        seconds=5.0,
    )


REQUESTS: dict[str, dict[str, Any]] = {
    "T2V with CFG": {"kind": "t2v", "prompt": "a red cube on a table", "guidance": 4.0},
    "T2V": {"kind": "t2v", "prompt": "a cat that jumps", "guidance": 1.0},
    "T2I with CFG": {"kind": "t2i", "prompt": "a lighthouse in the fog", "negative": "dark", "guidance": 4.0},
    "T2I": {"kind": "t2i", "prompt": "snow", "guidance": 1.0},
    "I2V with CFG": {"kind": "i2v", "prompt": "it turns around", "guidance": 4.0},
    "I2V": {"kind": "i2v", "prompt": "it falls over and stays there", "guidance": 1.0},
}
"""The requests of Cosmos3's scenario; at a guidance of 1.0 the branch of the negative prompt does not run."""


def cosmos3() -> Scenario:
    """Six requests to one Cosmos3."""
    return Scenario(
        model="Cosmos3",
        story="Text to video, text to image and image to video, each with CFG and without",
        outputs="each clip and picture, and what each forward of the transformer returned",
        write=_write_cosmos3,
        open=_open_cosmos3,
        operations=tuple(_requests()),
        seconds=2.0,
    )


SCENARIOS = {"dreamzero": dreamzero, "cosmos3": cosmos3}
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


def _write_cosmos3(folder: Path) -> None:
    from omni_tiny.checkpoint.cosmos3 import write_cosmos3
    from omni_tiny.omni_cosmos3 import write_cosmos3_deploy

    write_cosmos3(folder / "checkpoint", variant="regular")
    write_cosmos3_deploy(folder / "deploy.yaml")


def _open_cosmos3(folder: Path) -> AbstractContextManager[Any]:
    from omni_tiny.omni_cosmos3 import OmniCosmos3

    return OmniCosmos3(folder / "checkpoint", folder / "deploy.yaml")


def _requests() -> list[Operation]:
    done: list[Operation] = []
    for seed, (label, words) in enumerate(REQUESTS.items()):
        done.append(Operation(label, functools.partial(_generate, words={**words, "seed": seed})))
        done.append(Operation(label, lambda model: model.held(), look=True))
    return done


def _generate(model: Any, *, words: dict[str, Any]) -> Mapping[str, Any]:
    seen = "picture" if words["kind"] == "t2i" else "clip"
    forwards = {seen: model.generate(**words)}
    return forwards | {f"forward {number}": said for number, said in enumerate(model.forwards(), start=1)}

"""Two ranks whose pools have places for 3 and for 2 sessions: are the outputs right, and what does it cost?

``python -m benchmarks.two_ranks``. The tiny DreamZero, its branches of guidance on two ranks of a gloo
group. Four sessions take steps at random, so that the one that is wanted is often parked. Each output is
compared, bit for bit, with that of the same step on the host's own path, with room for all.

``wrong``
    Outputs that differ, on either rank: 0 is wanted, and else the exit status is 1.
``message_over_step``
    What the ranks tell each other before a step, over the step: both measured in turn, in one process. The
    model is tiny; of a real step the message is less.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from benchmarks.measure import (
    Spread,
    add_figures,
    consoles,
    last_line,
    machine,
    one_thread,
    options,
    positive,
)

PLACES = (3, 2)
SESSIONS = ("robot-0", "robot-1", "robot-2", "robot-3")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, compare and print; returns the exit status."""
    asked = _parser().parse_args(arguments)
    console, aside = consoles()
    aside.print("Importing vLLM-Omni in two processes (up to a minute) ...")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    one_thread()
    from omni_tiny.checkpoint.dreamzero import write_dreamzero
    from omni_tiny.ranks import run_in_ranks

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(write_dreamzero(folder))
        answers = run_in_ranks(serve, checkpoint, asked.steps, limit_s=asked.limit)
    wrong = sum(len(answer["wrong"]) for answer in answers)
    figures = {
        "step_ms": Spread.of([each * 1000 for answer in answers for each in answer["step_s"]]),
        "message_ms": Spread.of([each * 1000 for answer in answers for each in answer["message_s"]]),
        "message_over_step": Spread.of([share for answer in answers for share in shares(answer)]),
    }
    title = f"{asked.steps} steps of {len(SESSIONS)} sessions, places for {PLACES}: {wrong} outputs differ"
    figured = Table(title=title, box=box.SIMPLE_HEAD)
    add_figures(figured, figures, {"message_over_step": ("<=", 0.02)})
    console.print(figured)
    counts = {
        "steps": asked.steps,
        "places": [answer["places"] for answer in answers],
        "restores": [answer["stats"]["restores"] for answer in answers],
        "wrong": wrong,
    }
    sys.stdout.write(last_line(figures, **counts, machine=machine()) + "\n")
    sys.stdout.flush()
    return int(wrong > 0)


def shares(answer: dict[str, Any]) -> list[float]:
    """A message over the step before it, for each step of a rank."""
    return [message / step for message, step in zip(answer["message_s"], answer["step_s"], strict=True)]


def serve(_rank: int, checkpoint: str, steps: int) -> dict[str, Any]:
    """One rank: the same random steps on the host's own path and with the plugin; see ``run_in_ranks``.

    Args:
        _rank: Each takes the same requests.
        checkpoint: From ``write_dreamzero``.
        steps: How many, over all sessions.

    Returns:
        ``wrong`` steps, ``places`` of the pool, ``stats`` of the manager; and for each step its seconds, and
        those of one more message between ranks that have just met.
    """
    from omni_tiny.inproc import TinyDreamZero

    unequal_pools(*PLACES)
    others = np.random.default_rng(0).choice(SESSIONS, max(0, steps - len(SESSIONS)))
    turns = [*SESSIONS, *map(str, others)][:steps]
    with TinyDreamZero(checkpoint, flag=False, capacity=2 * len(SESSIONS), exact=False) as model:
        expected = [step for step, _ in _steps(model, turns)]
    options = {"session_state": {"host_budget": "1GiB"}}
    wrong, step_s, message_s = [], [], []
    with TinyDreamZero(checkpoint, flag=True, capacity=PLACES[0], exact=False, model_config=options) as model:
        manager = model.pipeline._memory_manager
        for number, (step, took) in enumerate(_steps(model, turns)):
            if not step.equals(expected[number]):
                wrong.append(number)
            step_s.append(took)
            message_s.append(_message(manager))
        return {
            "wrong": wrong,
            "places": model.capacity,
            "stats": manager.stats(),
            "step_s": step_s,
            "message_s": message_s,
        }


def unequal_pools(*places: int) -> None:
    """Have the ranks find memory for so many sessions, where the first of them is a model's ``capacity``."""
    from omni_tiny.capacity import LESS_BYTES_VARIABLE, free_bytes

    for rank, fewer in enumerate(places):
        os.environ[f"{LESS_BYTES_VARIABLE}{rank}"] = str(free_bytes(places[0]) - free_bytes(fewer))


def _steps(model: Any, turns: Sequence[str]) -> Any:
    """Each turn's output and its seconds: what a session sees depends on itself and its own step alone."""
    done = dict.fromkeys(SESSIONS, 0)
    for name in turns:
        rng = np.random.default_rng([SESSIONS.index(name), done[name]])
        began = time.perf_counter()
        step = model.step(name, rng=rng, frames=4 if done[name] else 1)
        yield step, time.perf_counter() - began
        done[name] += 1


def _message(manager: Any) -> float:
    """Seconds of one message between ranks that have just met; the least of a few."""
    took = []
    for _ in range(4):
        began = time.perf_counter()
        manager.offloader.ranks.meet("nobody", "not there")
        took.append(time.perf_counter() - began)
    return min(took[1:])


def _parser() -> argparse.ArgumentParser:
    parser = options("two_ranks", __doc__)
    parser.add_argument("--steps", type=positive, default=200, help="over all sessions (default: 200)")
    parser.add_argument(
        "--limit",
        type=positive,
        default=1800,
        help="seconds until ranks that hang are killed (default: 1800)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

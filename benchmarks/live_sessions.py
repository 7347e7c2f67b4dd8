"""More live sessions than the engine's pool has room for, on the real engine: are the outputs right?

``python -m benchmarks.live_sessions``. The tiny DreamZero with room for 3 sessions serves 24, each step of a
random one, past the end of attention windows and with a change of the prompt in every third session. Each
output is compared, bit for bit, with that of the session run alone on the host's own path.

``wrong``
    Outputs that differ with the plugin on and a host tier: 0 is wanted, and else the exit status is 1.
``wrong_without_plugin``
    The same steps in the same order with the plugin off: vLLM-Omni drops its oldest session, whose next step
    starts from nothing.
``parked_mib``
    Bytes in the host tier after each step, KV and the rest.
``step_ms``, ``step_without_plugin_ms``, ``step_alone_ms``
    A step on the wall: with the plugin, with vLLM-Omni dropping sessions, one session at a time. The model
    is tiny, so what moving a session takes of a step says nothing of a real one; a step that starts from
    nothing does more than one that goes on.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measure import (
    Machine,
    Spread,
    add_figures,
    consoles,
    last_line,
    machine,
    one_thread,
    options,
    positive,
    turns,
)

if TYPE_CHECKING:
    from omni_tiny.crowd import Crowd, Key, Outputs

HOST_BUDGET = "64GiB"  # a bound that is never met: what is parked takes what it takes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, compare and print; returns the exit status."""
    asked = _parser().parse_args(arguments)
    sessions = asked.sessions or (5 if asked.quick else 24)
    steps = asked.steps or (3 if asked.quick else 10)
    console, aside = consoles()
    aside.print("Importing vLLM-Omni (10 to 30 seconds) ...")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    one_thread()
    from omni_tiny.checkpoint.dreamzero import write_dreamzero
    from omni_tiny.crowd import Crowd, differing

    logging.getLogger("vllm_omni").setLevel(logging.ERROR)  # each session that vLLM-Omni drops is a line
    crowd, place = Crowd(sessions=sessions, steps=steps), machine()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(write_dreamzero(folder))
        alone = _alone(crowd, checkpoint, aside)
        ours = _together(crowd, checkpoint, aside, room=asked.room, plugin=True)
        theirs = _together(crowd, checkpoint, aside, room=asked.room, plugin=False)
    wrong, without = (len(differing(alone.outputs, run.outputs)) for run in (ours, theirs))
    figures = {
        "parked_mib": Spread.of(ours.parked_mib),
        "step_ms": Spread.of(ours.step_ms),
        "step_without_plugin_ms": Spread.of(theirs.step_ms),
        "step_alone_ms": Spread.of(alone.step_ms),
    }
    console.print(_outcome(crowd, place, room=asked.room, wrong=wrong, without=without))
    figured = Table(title="Median over the steps", box=box.SIMPLE_HEAD)
    add_figures(figured, figures, {})
    console.print(figured)
    counts = {
        "sessions": sessions,
        "room": asked.room,
        "steps": steps,
        "outputs": len(ours.outputs),
        "wrong": wrong,
        "wrong_without_plugin": without,
    }
    sys.stdout.write(last_line(figures, **counts, machine=place) + "\n")
    sys.stdout.flush()
    return int(wrong > 0)


@dataclass(slots=True)
class Run:
    """What came of some steps.

    Attributes:
        outputs: By session and step.
        step_ms: How long each took.
        parked_mib: What lay in the host tier after each.
    """

    outputs: Outputs = field(default_factory=dict)
    step_ms: list[float] = field(default_factory=list)
    parked_mib: list[float] = field(default_factory=list)

    def take(self, crowd: Crowd, model: Any, keys: Sequence[Key]) -> None:
        """Run the steps of ``keys``."""
        manager = model.pipeline._memory_manager
        tier = None if manager is None else manager.offloader.host
        for key in keys:
            began = time.perf_counter()
            self.outputs[key] = crowd.run(model, key)
            self.step_ms.append((time.perf_counter() - began) * 1000)
            if tier is not None:
                self.parked_mib.append(tier.nbytes / 2**20)


def _alone(crowd: Crowd, checkpoint: str, aside: Console) -> Run:
    """One session after the other, on the host's own path."""
    from omni_tiny.inproc import TinyDreamZero

    run = Run()
    with TinyDreamZero(checkpoint, flag=False, capacity=1) as model:
        for number in turns(crowd.sessions, what="alone: session", aside=aside):
            run.take(crowd, model, [(number, step) for step in range(crowd.steps)])
            model.close(crowd.name(number))
    return run


def _together(crowd: Crowd, checkpoint: str, aside: Console, *, room: int, plugin: bool) -> Run:
    """All of them in random order, with room for few."""
    from omni_tiny.inproc import TinyDreamZero

    keys, run = list(crowd.order()), Run()
    settings = {"session_state": {"host_budget": HOST_BUDGET}} if plugin else {}
    with TinyDreamZero(checkpoint, flag=plugin, capacity=room, model_config=settings) as model:
        what = f"plugin {'on' if plugin else 'off'}: round"
        for turn in turns(crowd.steps, what=what, aside=aside):
            run.take(crowd, model, keys[turn * crowd.sessions : (turn + 1) * crowd.sessions])
        for name in crowd.names:
            model.close(name)
        if plugin:
            _check_empty(model)
    return run


def _check_empty(model: Any) -> None:
    stats, pool = model.pipeline._memory_manager.stats(), model.runner.kv_cache.manager.block_pool
    left = stats["sessions"], stats["total_nbytes"], pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    if any(left):
        raise AssertionError(f"{left} sessions, bytes and blocks are left although every session was closed")


def _outcome(crowd: Crowd, place: Machine, *, room: int, wrong: int, without: int) -> Table:
    outputs = crowd.sessions * crowd.steps
    table = Table(
        title=f"{crowd.sessions} live sessions, room for {room}: {crowd.steps} steps each, in random order",
        caption=f"{place.cpu}, {place.cores} cores; {place.system}; Python {place.python}, "
        f"torch {place.torch}, vLLM-Omni {place.vllm_omni}; on the CPU, {place.threads} thread",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("with")
    table.add_column("outputs", justify="right")
    table.add_column("not those of the session alone", justify="right")
    table.add_row("the plugin, parking to host memory", str(outputs), str(wrong))
    table.add_row("vLLM-Omni alone", str(outputs), str(without))
    return table


def _parser() -> argparse.ArgumentParser:
    parser = options("live_sessions", __doc__, quick="5 sessions of 3 steps")
    parser.add_argument("--sessions", type=positive, help="live at once (default: 24)")
    parser.add_argument("--steps", type=positive, help="of each session (default: 10)")
    parser.add_argument(
        "--room", type=positive, default=3, help="sessions that the engine's pool has room for (default: 3)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

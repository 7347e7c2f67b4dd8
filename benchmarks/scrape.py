"""Does a server that is looked at serve less? Two replicas, scraped and listed, against two left alone.

``python -m benchmarks.scrape``. The tiny DreamZero behind vLLM-Omni's own engine, two worker processes, and
clients that send one step after the other. A step waits in its forward rather than compute, so two cores are
enough. Phases of so many steps come in pairs: in one of each the metrics are scraped and all sessions listed,
every second, by the very code of the server's routes; in the other nobody looks.

``throughput_scraped_over_quiet``
    Steps in a second in the first over those in the second, median over the pairs. At least 0.98 is wanted,
    and else the exit status is 1.
``quiet_steps_per_s``, ``scraped_steps_per_s``, ``look_ms``
    Both of them, and what one look takes, metrics and listing together.
``write_us_1000``
    Microseconds in which a worker with 1000 sessions writes its figures, and the row that changed, at the
    begin or the end of a lease; ``move_write_us_1000``: after a park or a restore. CPU time, median over 3000
    leases and 300 moves. At most 50 is wanted.

With ``--ask`` a look asks the workers instead of reading what they wrote: what it cost before they did.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measure import (
    Machine,
    Spread,
    Wanted,
    add_figures,
    consoles,
    last_line,
    machine,
    no_collector,
    one_thread,
    options,
    orders,
    positive,
    turns,
)

WANTED: Wanted = {
    "throughput_scraped_over_quiet": (">=", 0.98),
    "write_us_1000": ("<=", 50.0),
    "move_write_us_1000": ("<=", 50.0),
}
REPLICAS, CLIENTS = 2, 4
EVERY_S = 1.0

Look = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Course:
    """What is run.

    Attributes:
        pairs: Of phases.
        steps: Of each phase.
        lasts_s: Of each step, at least.
        ask: Whether a look asks the workers.
    """

    pairs: int
    steps: int
    lasts_s: float
    ask: bool


@dataclass(slots=True)
class Measured:
    """What came of it.

    Attributes:
        quiet: Steps in a second of each phase,
        scraped: and of those that were looked at.
        look_ms: How long each look took.
        listed: Sessions that the last look showed.
    """

    quiet: list[float] = field(default_factory=list)
    scraped: list[float] = field(default_factory=list)
    look_ms: list[float] = field(default_factory=list)
    listed: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    asked = _parser().parse_args(arguments)
    course = Course(
        pairs=asked.pairs or (1 if asked.quick else 5),
        steps=asked.steps or (8 if asked.quick else 200),
        lasts_s=asked.lasts,
        ask=asked.ask,
    )
    console, aside = consoles()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    one_thread()
    figures = {name: Spread.of(values) for name, values in _writing(asked.sessions).items()}
    aside.print("Starting vLLM-Omni and its two workers (a minute or two) ...")
    measured, place = _served(course, aside), machine()
    ratios = [ours / theirs for ours, theirs in zip(measured.scraped, measured.quiet, strict=True)]
    figures = {
        "throughput_scraped_over_quiet": Spread.of(ratios),
        "quiet_steps_per_s": Spread.of(measured.quiet),
        "scraped_steps_per_s": Spread.of(measured.scraped),
        "look_ms": Spread.of(measured.look_ms),
        **figures,
    }
    figured = Table(title=_title(course), caption=_caption(place), box=box.SIMPLE_HEAD)
    add_figures(figured, figures, WANTED)
    console.print(figured)
    more = {"pairs": course.pairs, "steps": course.steps, "lasts_s": course.lasts_s, "asked": course.ask}
    sys.stdout.write(last_line(figures, **more, listed=measured.listed, machine=place) + "\n")
    sys.stdout.flush()
    wanted = WANTED["throughput_scraped_over_quiet"][1]
    return int(not asked.quick and statistics.median(ratios) < wanted)


def _served(course: Course, aside: Console) -> Measured:
    """All phases on one engine."""
    from omni_tiny.arithmetic import VARIABLE as IN_FLOAT32
    from omni_tiny.capacity import FREE_BYTES_VARIABLE, free_bytes
    from omni_tiny.checkpoint.dreamzero import write_dreamzero
    from omni_tiny.inproc import ENGINE, environment
    from omni_tiny.omni_runs import write_stage
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_dreamzero(f"{folder}/checkpoint")
        stage = {
            "model_class_name": "DreamZeroPipeline",
            "engine_backend": ENGINE,
            "model_paths": {"tokenizer": f"{checkpoint}/tokenizer"},
            "model_config": {
                "num_inference_steps": 1,
                "ar_diffusion_kv_config": {"gpu_memory_fraction": 1.0},
            },
            "enable_session_state_manager": True,
            "num_replicas": REPLICAS,
            "devices": ",".join(map(str, range(REPLICAS))),
        }
        deploy = write_stage(f"{folder}/deploy.yaml", "dreamzero", stage)
        os.environ[IN_FLOAT32] = "1"  # a step is to wait, and not to compute
        with environment(FREE_BYTES_VARIABLE, str(free_bytes(2 * CLIENTS))):
            engine = AsyncOmni(model=str(checkpoint), deploy_config=str(deploy))
        logging.getLogger("vllm_omni").setLevel(logging.ERROR)
        try:
            return asyncio.run(_phases(engine, course, aside))
        finally:
            engine.shutdown()


async def _phases(engine: Any, course: Course, aside: Console) -> Measured:
    measured = Measured()
    clients = [Client(engine, number, course.lasts_s) for number in range(CLIENTS)]
    await asyncio.gather(*(client.step() for client in clients for _ in range(2)))
    look = await _looking(engine, measured, ask=course.ask)
    for _, order in zip(turns(course.pairs, what="pair", aside=aside), orders((False, True)), strict=False):
        for scraped in order:
            rates = measured.scraped if scraped else measured.quiet
            rates.append(await _phase(clients, course.steps, look if scraped else None, measured))
    return measured


async def _phase(clients: list[Client], steps: int, look: Look | None, measured: Measured) -> float:
    """Steps in a second."""
    left, over = iter(range(steps)), asyncio.Event()

    async def run(client: Client) -> None:
        for _ in left:
            await client.step()

    async def watch(look: Look) -> None:
        while not over.is_set():
            began = time.perf_counter()
            await look()
            measured.look_ms.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(EVERY_S)

    watching = None if look is None else asyncio.create_task(watch(look))
    began = time.perf_counter()
    await asyncio.gather(*map(run, clients))
    rate = steps / (time.perf_counter() - began)
    over.set()
    if watching is not None:
        await watching
    return rate


class Client:
    """One robot: its steps, one after the other.

    Args:
        engine: vLLM-Omni's ``AsyncOmni``.
        number: Of the robot.
        lasts_s: Of each step, at least.
    """

    def __init__(self, engine: Any, number: int, lasts_s: float) -> None:
        import numpy as np

        self._engine = engine
        self._name = f"robot-{number}"
        self._rng = np.random.default_rng(number)
        self._numbers = itertools.count()
        self._lasts_s = lasts_s
        self._turn = asyncio.Lock()

    async def step(self) -> None:
        """Send one and wait for what comes back."""
        from omni_tiny import robot
        from omni_tiny.inproc import PROMPT
        from omni_tiny.tiny import LASTS_S

        async with self._turn:
            seen = robot.observation(self._rng, session=self._name, prompt=PROMPT, frames=1)
            parameters = robot.sampling_params({**seen, LASTS_S: self._lasts_s})
            request = f"{self._name}-{next(self._numbers)}"
            async for _ in self._engine.generate(
                prompt=PROMPT, request_id=request, sampling_params_list=[parameters]
            ):
                pass


async def _looking(engine: Any, measured: Measured, *, ask: bool) -> Look:
    """One look at metrics and sessions, as the server's own routes take it."""
    from prometheus_client import CollectorRegistry, generate_latest

    from vllm_omni_session_state.omni.admin import metrics
    from vllm_omni_session_state.omni.admin.service import AdminService
    from vllm_omni_session_state.omni.admin.stats_poller import StatsPoller
    from vllm_omni_session_state.omni.server.worker_client import WorkerClient

    workers = WorkerClient(engine, [0])
    figures = StatsPoller(workers, asyncio.get_running_loop())
    desk, registry = AdminService(workers, figures), CollectorRegistry()
    metrics.register(figures, workers.lost, registry)
    await figures.ask()

    async def look() -> None:
        generate_latest(registry)
        measured.listed = len((await desk.sessions(timeout_s=60))["sessions"])

    async def look_by_asking() -> None:
        await workers.ask("session_state_stats")
        await workers.ask("session_state_list")

    return look_by_asking if ask else look


def _writing(sessions: int) -> dict[str, list[float]]:
    """Microseconds of each writing of a worker with so many sessions, of leases and of moves."""
    import torch

    from vllm_omni_session_state.manager.manager import SessionStateManager
    from vllm_omni_session_state.offload.host_tier import HostTier
    from vllm_omni_session_state.omni.worker.publisher import Publisher

    manager = SessionStateManager(max_sessions=sessions, tier=HostTier(budget=1 << 30))
    keys = [f"robot-{number}" for number in range(sessions)]
    for key in keys:
        with manager.lease(key) as session:
            session.attrs.update({f"tensor {number}": torch.zeros(64) for number in range(8)})
    parked = keys[: max(1, sessions // 3)]
    for key in parked:
        manager.park(key)
    runner = _Runner(pipeline=None)  # which the publisher does not keep
    publisher = Publisher(manager, runner, {"close": 0, "reset": 0, "absent": 0})
    if publisher.path is None:
        raise OSError("this machine has no place for a worker's file; see the WARNING")
    took: list[float] = []

    def write(ended: bool) -> None:  # noqa: FBT001 - as a manager's watcher is called
        began = time.thread_time_ns()
        publisher.write(ended)
        took.append((time.thread_time_ns() - began) / 1000)

    manager.watch.begin(write, publisher.close)
    write(ended=True)  # all rows: they are new to a watcher
    assert _rows(publisher.path) == sessions, "it has written nothing"
    with no_collector():
        found = {}
        idle = itertools.cycle(keys[len(parked) :] or keys)
        for name, count, act in (
            (f"write_us_{sessions}", 3000, lambda: _lease(manager, next(idle))),
            (
                f"move_write_us_{sessions}",
                300,
                lambda: manager.restore(parked[0]) and manager.park(parked[0]),
            ),
        ):
            took.clear()
            for _ in range(count):
                act()
            found[name] = list(took)
    publisher.close()
    return found


def _rows(path: str) -> int:
    from vllm_omni_session_state.omni.stats_file.place import WorkerFile

    return len(WorkerFile(path).read(rows=True).rows or ())


class _Runner(SimpleNamespace):
    """Stands where vLLM-Omni's runner does."""


def _lease(manager: Any, key: str) -> None:
    with manager.lease(key):
        pass


def _title(course: Course) -> str:
    looks = "asked of the workers" if course.ask else "scraped and listed"
    return (
        f"{course.pairs} pairs of {course.steps} steps of {course.lasts_s:g} s, {looks} every {EVERY_S:g} s"
    )


def _caption(place: Machine) -> str:
    return (
        f"{place.cpu}, {place.cores} cores; {place.system}; Python {place.python}, torch {place.torch}, "
        f"vLLM-Omni {place.vllm_omni}; {REPLICAS} replicas on the CPU, {CLIENTS} clients"
    )


def _parser() -> argparse.ArgumentParser:
    parser = options("scrape", __doc__, quick="one pair of 8 steps")
    parser.add_argument("--pairs", type=positive, help="of phases (default: 5)")
    parser.add_argument("--steps", type=positive, help="of each phase (default: 200)")
    parser.add_argument("--lasts", type=float, default=1.0, help="seconds of a step, at least (default: 1)")
    parser.add_argument("--sessions", type=positive, default=1000, help="of the worker that writes")
    parser.add_argument("--ask", action="store_true", help="a look asks the workers")
    return parser


if __name__ == "__main__":
    sys.exit(main())

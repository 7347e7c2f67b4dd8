"""What it costs to know who holds which bytes: ours against vLLM-Omni's in-tree manager, in one process.

``python -m benchmarks.accounting``. Both hold the same tensors, 30 values a session: 26 attributes and 4
buffers of one. Calls take turns, so that a busy machine troubles all alike. Each figure is the median over
the rounds of the round's own median:

``stats_speedup_64``
    ``stats()`` with 64 sessions: in-tree over ours. At least 100 is wanted.
``stats_1024_over_1``
    Our ``stats()`` with 1,024 sessions over that with 1. At most 1.5 is wanted.
``settle_us``
    ``settle()`` of one session of the 64 after all 30 values were replaced, and a question for the bytes, at
    which the ledgers follow, in microseconds: the walk, the ledgers, everything. At most 100 is wanted. Most
    steps replace few; with none replaced it is ``settle_same_us``.
``settle_over_intree_walk``
    The same over in-tree's walk of the same session, of which ``stats()`` does one for each session. At most
    3 is wanted.
``settle_10000_over_1``
    ``settle()`` of a session like those, after one more chunk came to an append buffer, when that holds
    10,000 chunks over when it holds 1. At most 1.5 is wanted.
``books_share_of_step``
    Steps of the tiny DreamZero with the flag on: what the plugin's own code takes of them (session lookup,
    lease, view, every field read or written, settlement, the VAE's copy), over the steps. At most 0.01 is
    wanted. A round is one attention window of 4 steps, of which the first fills it anew and takes four times
    as long; ``books_share_of_short_step`` is that of the others alone, and
    ``books_share_of_shortest_step`` that of the shortest one, at most 0.01 too. Field access is clocked call
    by call, and the clock's own time counts as the plugin's. The session goes on, and what it keeps for
    decoding grows by one tensor a step.

Times are CPU time of the one thread, so that what else the machine does shows only through its caches.
"""

from __future__ import annotations

import gc
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.measure import (
    Machine,
    Spread,
    Wanted,
    add_figures,
    consoles,
    last_line,
    machine,
    one_thread,
    options,
)

SESSIONS, VALUES, BUFFERS, MANY, WINDOW, CHUNKS = 64, 30, 4, 1024, 4, 10_000
WANTED: Wanted = {
    "stats_speedup_64": (">=", 100.0),
    "stats_1024_over_1": ("<=", 1.5),
    "settle_us": ("<=", 100.0),
    "settle_over_intree_walk": ("<=", 3.0),
    "settle_10000_over_1": ("<=", 1.5),
    "books_share_of_step": ("<=", 0.01),
    "books_share_of_shortest_step": ("<=", 0.01),
}
Figures = dict[str, list[float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    quick = options("accounting", __doc__, quick="2 rounds").parse_args(arguments).quick
    rounds, windows = (2, 2) if quick else (20, 20)
    console, aside = consoles()
    aside.print("Importing vLLM-Omni (10 to 30 seconds) ...")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    one_thread()
    place = machine()
    found: Figures = {}
    for name, measure, turns in (
        ("stats()", stats, rounds),
        ("settle()", settle, rounds),
        ("settle() of a long session", chunks, rounds),
        ("steps of the tiny DreamZero", step, windows),
    ):
        aside.print(f"Measuring {name} ...")
        found |= measure(turns)
    figures = {name: Spread.of(values) for name, values in found.items()}
    console.print(_table(figures, place))
    sys.stdout.write(
        last_line(
            figures,
            machine=place,
            counts={"sessions": SESSIONS, "values": VALUES, "rounds": rounds, "steps": windows * WINDOW},
        )
        + "\n"
    )
    sys.stdout.flush()
    return 0


def stats(rounds: int) -> Figures:
    """Ours and in-tree over the same 64 sessions; ours with 1,024 and with 1."""
    pair, many, one = Pair(SESSIONS), Pair(MANY, in_tree=False), Pair(1, in_tree=False)
    figures: Figures = {
        name: [] for name in ("stats_us", "stats_in_tree_us", "stats_speedup_64", "stats_1024_over_1")
    }
    for _ in range(rounds):
        ours, theirs, large, small = _take_turns(
            [
                (pair.ours.stats, 100),
                (pair.theirs.stats, 1),
                (many.ours.stats, 100),
                (one.ours.stats, 100),
            ],
            turns=15,
        )
        figures["stats_us"].append(ours / 1000)
        figures["stats_in_tree_us"].append(theirs / 1000)
        figures["stats_speedup_64"].append(theirs / ours)
        figures["stats_1024_over_1"].append(large / small)
    return figures


def settle(rounds: int) -> Figures:
    """Ours and in-tree's walk of one session after another, each after its values were replaced."""
    pair = Pair(SESSIONS)
    figures: Figures = {
        name: [] for name in ("settle_us", "settle_same_us", "walk_in_tree_us", "settle_over_intree_walk")
    }
    for _ in range(rounds):
        ours, theirs, same = [], [], []
        for turn in range(4 * SESSIONS):
            index = turn % SESSIONS
            pair.replace(index)
            session, twin = pair.sessions[index], pair.twins[index]
            if turn % 2:
                ours.append(_ns(_charge, pair.ours, session))
                theirs.append(_ns(twin.nbytes_by_device))
            else:
                theirs.append(_ns(twin.nbytes_by_device))
                ours.append(_ns(_charge, pair.ours, session))
            same.append(_ns(_charge, pair.ours, session))
        held = sum(pair.theirs.nbytes_by_device().values())
        if pair.ours.stats()["total_nbytes"] != held:
            raise AssertionError("the contenders count different bytes")
        figures["settle_us"].append(statistics.median(ours) / 1000)
        figures["settle_same_us"].append(statistics.median(same) / 1000)
        figures["walk_in_tree_us"].append(statistics.median(theirs) / 1000)
        figures["settle_over_intree_walk"].append(statistics.median(ours) / statistics.median(theirs))
    return figures


def chunks(rounds: int) -> Figures:
    """Our ``settle()`` of one session with 10,000 chunks and one with 1, each after one more came."""
    import torch

    figures: Figures = {name: [] for name in ("settle_chunk_us", "settle_10000_over_1")}
    for _ in range(rounds):
        pair = Pair(2, in_tree=False)
        buffers: list[Any] = [session.get("value 0") for session in pair.sessions]
        buffers[1].extend(torch.zeros(256) for _ in range(CHUNKS - 1))
        taken: list[list[int]] = [[], []]
        for turn in range(101):
            for session, buffer, times in zip(pair.sessions, buffers, taken, strict=True):
                buffer.append(torch.zeros(256))
                spent = _ns(_charge, pair.ours, session)
                if turn:  # the first one looks at all that came
                    times.append(spent)
        few, many = map(statistics.median, taken)
        figures["settle_chunk_us"].append(many / 1000)
        figures["settle_10000_over_1"].append(many / few)
    return figures


def step(windows: int) -> Figures:
    """Steps of one session of the real pipeline at tiny sizes, flag on, with the plugin's code clocked."""
    import numpy as np
    from omni_tiny.checkpoint.dreamzero import write_dreamzero
    from omni_tiny.inproc import TinyDreamZero

    from benchmarks.plugin_clock import PluginClock

    figures: Figures = {
        name: []
        for name in (
            *("step_ms", "books_ms", "books_share_of_step"),
            *("books_share_of_short_step", "books_share_of_shortest_step"),
        )
    }
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, TinyDreamZero(write_dreamzero(folder), flag=True) as model:
        logging.getLogger("vllm_omni").setLevel(logging.ERROR)  # each step is logged at INFO
        for number in range(WINDOW):  # the first window, in which much happens for the first time
            model.step("bench", rng=rng, frames=4 if number else 1)
        for _ in range(windows):
            taken = []
            for _ in range(WINDOW):
                with PluginClock() as clock:
                    began = time.thread_time_ns()
                    model.step("bench", rng=rng)
                    taken.append((time.thread_time_ns() - began, clock.ns))
            steps, books = (sum(each) for each in zip(*taken, strict=True))
            short = sorted(taken)[: WINDOW - 1]
            figures["step_ms"].append(steps / WINDOW / 1e6)
            figures["books_ms"].append(books / WINDOW / 1e6)
            figures["books_share_of_step"].append(books / steps)
            figures["books_share_of_short_step"].append(
                sum(each for _, each in short) / sum(each for each, _ in short)
            )
            figures["books_share_of_shortest_step"].append(short[0][1] / short[0][0])
    return figures


class Pair:
    """Our manager and the in-tree one, whose sessions hold the same tensors.

    Args:
        sessions: How many.
        in_tree: Whether there is an in-tree one.
    """

    def __init__(self, sessions: int, *, in_tree: bool = True) -> None:
        from vllm_omni.experimental.world_models import session_state

        from vllm_omni_session_state import LatentBuffer, SessionStateManager

        names = [f"session {index}" for index in range(sessions)]
        self.ours = SessionStateManager(max_sessions=sessions)
        self.theirs = session_state.SessionStateManager(max_sessions=sessions)
        self.buffers = LatentBuffer, session_state.LatentBuffer
        self.sessions = [self.ours.get_or_create_session(name) for name in names]
        self.twins = [self.theirs.get_or_create_session(name) for name in names] if in_tree else []
        for index in range(sessions):
            self.replace(index)
            self.ours.settle(self.sessions[index])

    def replace(self, index: int) -> None:
        """Give one session, and its twin, 30 new tensors."""
        import torch

        tensors = [torch.zeros(256) for _ in range(VALUES)]
        for session, kind in zip(
            (self.sessions[index], *self.twins[index : index + 1]), self.buffers, strict=False
        ):
            for number, tensor in enumerate(tensors):
                if number >= BUFFERS:
                    session.attrs[f"value {number}"] = tensor
                    continue
                buffer: Any = kind()
                buffer.allocate(maxlen=None)
                buffer.append(tensor)
                session.put(f"value {number}", buffer)


def _take_turns(calls: list[tuple[Callable[[], object], int]], *, turns: int) -> list[float]:
    """Nanoseconds of one call of each, the median over the turns; each turn begins with another one.

    Args:
        calls: What is called, and how often in a row: a call far shorter than the clock's own needs many.
        turns: How often each gets its turn.
    """
    taken: list[list[float]] = [[] for _ in calls]
    gc.collect()
    gc.disable()
    try:
        for turn in range(turns):
            for place in range(len(calls)):
                which = (turn + place) % len(calls)
                call, times = calls[which]
                began = time.thread_time_ns()
                for _ in range(times):
                    call()
                taken[which].append((time.thread_time_ns() - began) / times)
    finally:
        gc.enable()
    return [statistics.median(each) for each in taken]


def _charge(manager: Any, session: Any) -> None:
    manager.settle(session)
    manager.nbytes_by_device()


def _ns(call: Callable[..., object], *arguments: object) -> int:
    began = time.thread_time_ns()
    call(*arguments)
    return time.thread_time_ns() - began


def _table(figures: dict[str, Spread], place: Machine) -> Table:
    table = Table(
        title=f"Books: {SESSIONS} sessions of {VALUES} values, {place.threads} thread",
        caption=f"{place.cpu}, {place.cores} cores; {place.system}; Python {place.python}, "
        f"torch {place.torch}, vLLM-Omni {place.vllm_omni}; tensors on the CPU",
        box=box.SIMPLE_HEAD,
    )
    add_figures(table, figures, WANTED)
    return table


if __name__ == "__main__":
    sys.exit(main())

"""What vLLM-Omni's in-tree accounting gets wrong about bytes, beside ours and beside what is right.

``python -m benchmarks.in_tree_faults``. Each row is one thing that a session may hold or that may happen to
it, run on both managers in this process; a crash is shown as the exception's name. The last line is one JSON
object with every row. The exit status is 0 if ours is right in each.

Not here: the faults that are not about bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich import box
from rich.table import Table

from benchmarks.measure import consoles, machine, one_thread
from vllm_omni_session_state import LatentBuffer, SessionStateManager
from vllm_omni_session_state.accounting.footprint import footprint, register_children
from vllm_omni_session_state.offload.host_tier import HostTier

Figure = int | str
"""Bytes, a count, or the name of what was raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manager:
    """One of the two managers, made anew.

    Attributes:
        manager: It.
        buffer: Makes an empty append buffer of its kind.
        ours: Whether it is ours.
    """

    manager: Any
    buffer: Callable[[], Any]
    ours: bool

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[Any]:
        """The session of that name for one use."""
        if not self.ours:
            yield self.manager.get_or_create_session(name)
            return
        with self.manager.lease(name) as session:
            yield session

    def known(self) -> int:
        """Bytes that its ``stats()`` says are held on account of sessions, wherever it says so."""
        stats = self.manager.stats()
        return sum(
            stats.get(name, 0) for name in ("total_nbytes", "staged_nbytes", "detached_nbytes", "outside")
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One fault.

    Attributes:
        name: What is held or happens, for people.
        right: The right figure.
        run: Takes a maker of managers and returns the figure.
    """

    name: str
    right: Figure
    run: Callable[[Make], Figure]

    def figure(self, make: Make) -> Figure:
        """The figure of one manager."""
        try:
            return self.run(make)
        except Exception as error:  # noqa: BLE001 - which one is the figure
            return type(error).__name__


Make = Callable[..., Manager]
"""Makes a manager; takes ``max_sessions`` and ``budget``, in bytes."""


def ours(*, max_sessions: int = 64, budget: int | None = None) -> Manager:
    """Our manager, with room to park where there is a budget."""
    tier = None if budget is None else HostTier(budget=1 << 20)
    manager = SessionStateManager(max_sessions=max_sessions, device_budget=budget, tier=tier)
    return Manager(manager=manager, buffer=_allocated(LatentBuffer), ours=True)


def in_tree(*, max_sessions: int = 64, budget: int | None = None) -> Manager:
    """vLLM-Omni's."""
    from vllm_omni.experimental.world_models import session_state

    manager = session_state.SessionStateManager(max_sessions=max_sessions, byte_budget=budget)
    return Manager(manager=manager, buffer=_allocated(session_state.LatentBuffer), ours=False)


def _allocated(kind: type) -> Callable[[], Any]:
    def make() -> Any:
        buffer = kind()
        buffer.allocate(maxlen=None)
        return buffer

    return make


@dataclass
class Frame:
    """A dataclass as a model might write it."""

    pixels: object


class Holder:
    """An object that its adapter registered."""

    def __init__(self, held: object) -> None:
        self.held = held


register_children(Holder, lambda holder: (holder.held,))


def _held(value: Callable[[], object]) -> Callable[[Make], Figure]:
    def run(make: Make) -> Figure:
        one = make()
        with one.use("a") as session:
            session.attrs["value"] = value()
        return one.known()

    return run


def _knot() -> list[object]:
    knot: list[object] = [torch.zeros(10)]
    knot.append(knot)
    return knot


def _staged(make: Make) -> Figure:
    one = make()
    with one.use("a") as session:
        buffer = session.put("buffer", one.buffer())
        buffer.stage(torch.zeros(10))
    return one.known()


def _twin(make: Make) -> Figure:
    one = make(max_sessions=1)
    with one.use("a") as held:
        held.attrs["value"] = torch.zeros(10)
    for name in ("b", "a"):
        with one.use(name):
            pass
    known = one.known()
    del held
    return known


def _asked(make: Make) -> Figure:
    one = make()
    for name in range(64):
        with one.use(str(name)) as session:
            session.attrs["values"] = [torch.zeros(1) for _ in range(30)]
    storage = torch.zeros(1).untyped_storage()
    with mock.patch.object(torch.Tensor, "untyped_storage", autospec=True, return_value=storage) as asked:
        one.manager.stats()
    return asked.call_count


def _beyond_budget(make: Make) -> Figure:
    one = make(budget=100)
    for name in ("a", "b"):
        with one.use(name) as session:
            session.attrs["value"] = torch.zeros(20)
    sessions = map(one.manager.get_or_create_session if not one.ours else one.manager.peek, ("a", "b"))
    on_device = sum(session.nbytes for session in sessions if not getattr(session, "parked", False))
    return max(0, on_device - 100)


ROWS = (
    Row("array from tensor.numpy(), of 40 bytes", 40, _held(lambda: torch.zeros(10).numpy())),
    Row("array from np.frombuffer, of 64 bytes", 64, _held(lambda: np.frombuffer(bytearray(64), np.uint8))),
    Row("tensor in a set", 40, _held(lambda: {torch.zeros(10)})),
    Row("tensor in a dataclass", 40, _held(lambda: Frame(torch.zeros(10)))),
    Row("tensor in a registered object", 40, _held(lambda: Holder(torch.zeros(10)))),
    Row("sparse tensor", 3 * 16 + 3 * 4, _held(lambda: torch.eye(3).to_sparse())),
    Row("list that contains itself", 40, _held(_knot)),
    Row("two meta tensors", 0, _held(lambda: [torch.zeros(4, device="meta"), torch.zeros(8, device="meta")])),
    Row("staged payload", 40, _staged),
    Row("held session evicted, its id used again", 40, _twin),
    Row("tensors asked by stats() of 64 sessions of 30", 0, _asked),
    Row("bytes beyond a budget of 100", 0, _beyond_budget),
)


def left_by_cosmos3(checkpoint: str, *, flag: bool) -> Figure:
    """Bytes that Cosmos3's transformer still holds after a request and that no manager knows of.

    Args:
        checkpoint: Folder of a tiny checkpoint.
        flag: With this plugin, else with the in-tree manager as vLLM-Omni itself would set it up.
    """
    from omni_tiny.cosmos3 import TinyCosmos3

    with TinyCosmos3(checkpoint, flag=flag) as model:
        if not flag:
            model.pipeline._use_session_state = True
            model.pipeline._memory_manager = in_tree().manager
        model.generate("request")
        transformer, manager = model.pipeline.transformer, model.pipeline._memory_manager
        left = footprint(transformer.cached_kv, transformer.cached_freqs_gen).nbytes
        return left - int(manager.stats()["total_nbytes"])


COSMOS3 = "Cosmos3: bytes of a request that has ended"


def main() -> int:
    """Run every row on both and print them; returns the exit status."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    one_thread()
    console, aside = consoles()
    aside.print("Importing vLLM-Omni and running a tiny Cosmos3 (a minute) ...")
    from omni_tiny.checkpoint.cosmos3 import write_cosmos3

    found = [(row.name, row.right, row.figure(ours), row.figure(in_tree)) for row in ROWS]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(write_cosmos3(f"{folder}/regular", variant="regular"))
        left = [left_by_cosmos3(checkpoint, flag=flag) for flag in (True, False)]
    found.append((COSMOS3, 0, *left))
    table = Table(title="Bytes of session state, and who counts them", box=box.SIMPLE_HEAD)
    for column in ("held, or what happens", "right", "ours", "in-tree"):
        table.add_column(column, justify="left" if column.startswith("held") else "right")
    for name, right, mine, theirs in found:
        style = None if theirs == right else "red"
        table.add_row(name, str(right), str(mine), f"[{style}]{theirs}[/]" if style else str(theirs))
    console.print(table)
    rows = [dict(zip(("row", "right", "ours", "in_tree"), each, strict=True)) for each in found]
    wrong = sum(row["ours"] != row["right"] for row in rows)
    said = {
        "rows": rows,
        "ours_wrong": wrong,
        "in_tree_wrong": sum(row["in_tree"] != row["right"] for row in rows),
        "machine": asdict(machine()),
    }
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

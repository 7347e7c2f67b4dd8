"""What parking costs: a session to host memory or disk and back, and a lease that moves nothing.

``python -m benchmarks.tiers``. The session is 24 tensors of together 603 MiB, a DreamZero feature map at the
shipped size. Each figure is the median over the rounds:

``host_over_memcpy``
    The limit over ours. Ours is one lease of a parked session under a device budget of 0: the manager brings
    it back, and parks it again when the lease ends. The limit is as many copies of the same sizes, each into
    memory allocated for it, back and out again; what was copied is let go, as ours lets it go. The two take
    turns in one process and move the same bytes. At least 0.8 is wanted.
``disk_over_plain``
    A plain file over ours. Ours takes the session apart, writes it with the disk tier, reads it back, puts
    it together and removes it. The plain file has the same bytes in the same writes, the same checksum,
    fsync, rename and fsync of the folder, is read into new memory and verified, and removed. Both reads come
    from the page cache, as the files were just written. At least 0.8 is wanted.
``disk_over_plain_cold``
    The same, with the file's pages out of the page cache before it is read: said of the machine that this
    runs in, and not of a host or a disk that keeps pages too.
``disk_over_plain_no_checksum``
    The plain file without its checksum over ours with it, which cannot be switched off.
``idle_lease_us``
    A lease of an empty session, in microseconds: nothing to move and nothing to settle, with a tier, a
    budget that all idle sessions fit in, and 63 others of 24 tensors each. Less than 20 is wanted.
``held_lease_us``
    The same lease of one of those others: its 24 tensors are walked, and found to be as they were.

Copies and files are timed on the wall, which is what a request waits, and again in CPU time of the one thread
(``host_over_memcpy_cpu``), in which others' work shows only through caches and memory. Leases, far shorter
than a turn of the scheduler, are CPU time. On a CPU device and host are the same memory, so these are copies
from memory to memory: what a GPU's bus would add is not here.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import disk_moves
from benchmarks.feature_map import Shapes, feature_map_shapes, filled, same_bits
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

if TYPE_CHECKING:
    import torch

OTHERS, BATCH = 63, 200
WANTED: Wanted = {
    "host_over_memcpy": (">=", 0.8),
    "disk_over_plain": (">=", 0.8),
    "idle_lease_us": ("<", 20.0),
}
Figures = dict[str, list[float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    asked = _parser().parse_args(arguments)
    rounds, files = (asked.rounds or (2 if asked.quick else count) for count in (40, 18))
    shapes = feature_map_shapes()
    if asked.quick:
        shapes = [tuple(-(-length // 16) for length in shape) for shape in shapes]
    console, aside = consoles()
    one_thread()
    if not asked.recycle:
        _take_memory_from_the_system()
    place = machine()
    with disk_moves.place(asked.folder) as folder:
        disk = {
            "file_system": disk_moves.file_system(folder),
            "pages_can_be_dropped": disk_moves.can_forget(folder),
            "rounds": files,
        }
        console.print(_header(shapes, place, rounds=rounds, disk=disk))
        found = (
            moves(shapes, rounds=rounds, aside=aside)
            | disk_moves.moves(shapes, folder, rounds=files, aside=aside)
            | leases(rounds=rounds)
        )
    figures = {name: Spread.of(values) for name, values in found.items()}
    console.print(_figures(figures))
    session = {"tensors": len(shapes), "mib": round(_mib(shapes), 1), "rounds": rounds}
    sys.stdout.write(last_line(figures, machine=place, session=session, disk=disk) + "\n")
    sys.stdout.flush()
    return 0


def moves(shapes: Shapes, *, rounds: int, aside: Console) -> Figures:
    """Round trips of ours and of the limit, in turns."""
    aside.print("Filling the session ...")
    ours, limit = Ours(shapes), Limit(shapes)
    order = orders((ours, limit))
    names = ("host_over_memcpy", "host_over_memcpy_cpu", "park_and_restore_ms", "memcpy_ms")
    figures: Figures = {name: [] for name in names}
    for contender in next(order):  # their first time is not counted
        contender.round_trip()
    with no_collector():
        for _ in turns(rounds, what="round trip", aside=aside):
            wall, cpu = {}, {}
            for contender in next(order):
                began = time.perf_counter_ns(), time.thread_time_ns()
                contender.round_trip()
                wall[contender] = time.perf_counter_ns() - began[0]
                cpu[contender] = time.thread_time_ns() - began[1]
            figures["host_over_memcpy"].append(wall[limit] / wall[ours])
            figures["host_over_memcpy_cpu"].append(cpu[limit] / cpu[ours])
            figures["park_and_restore_ms"].append(wall[ours] / 1e6)
            figures["memcpy_ms"].append(wall[limit] / 1e6)
    if (ours.trips(), limit.trips) != (rounds + 1, rounds + 1):
        raise AssertionError("a round did not move the session")
    if not ours.holds(limit.tensors):
        raise AssertionError("the contenders hold different bytes")
    return figures


def leases(*, rounds: int) -> Figures:
    """Leases of an empty session and of one of 24 small tensors, in turns, with nothing to move."""
    import torch

    from vllm_omni_session_state import SessionStateManager
    from vllm_omni_session_state.offload.host_tier import HostTier

    manager = SessionStateManager(
        max_sessions=OTHERS + 1, device_budget=1 << 30, tier=HostTier(budget=1 << 30)
    )
    for number in range(OTHERS):
        with manager.lease(f"session {number}") as session:
            session.attrs["map"] = [torch.zeros(256) for _ in feature_map_shapes()]
    with manager.lease("empty"):
        pass

    def take(name: str) -> Callable[[], None]:
        def once() -> None:
            with manager.lease(name):
                pass

        return once

    figures: Figures = {}
    contenders = {"idle_lease_us": take("empty"), "held_lease_us": take("session 0")}
    with no_collector():
        for order, _ in zip(orders(tuple(contenders)), range(rounds), strict=False):
            for name in order:
                lease, taken = contenders[name], []
                for _ in range(BATCH):
                    began = time.thread_time_ns()
                    lease()
                    taken.append(time.thread_time_ns() - began)
                figures.setdefault(name, []).append(statistics.median(taken) / 1000)
    if manager.stats()["parks"]:
        raise AssertionError("a lease moved something")
    return figures


class Ours:
    """A session that is parked whenever nobody uses it, under the real manager.

    Args:
        shapes: Of its tensors.
    """

    def __init__(self, shapes: Shapes) -> None:
        from vllm_omni_session_state import SessionStateManager
        from vllm_omni_session_state.offload.host_tier import HostTier

        self.manager = SessionStateManager(device_budget=0, tier=HostTier(budget=1 << 40))
        with self.manager.lease("bench") as session:
            session.attrs["map"] = filled(shapes)

    def round_trip(self) -> None:
        """Back to the device and out again."""
        with self.manager.lease("bench"):
            pass

    def trips(self) -> int:
        """How often all of its bytes went back and out."""
        stats = self.manager.stats()
        return min(stats["restores"], stats["parks"] - 1)

    def holds(self, tensors: list[torch.Tensor]) -> bool:
        """Whether it has the same bits as these."""
        with self.manager.lease("bench") as session:
            return same_bits(session.attrs["map"], tensors)


class Limit:
    """As many tensors of the same sizes, copied and nothing else.

    Args:
        shapes: Of the tensors.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.tensors = filled(shapes)
        self.trips = 0

    def round_trip(self) -> None:
        """Back and out again, each time into new memory."""
        for _ in ("back", "out"):
            self.tensors = [_copied(tensor) for tensor in self.tensors]
        self.trips += 1


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _mib(shapes: Shapes) -> float:
    return sum(2 * math.prod(shape) for shape in shapes) / 2**20


def _parser() -> argparse.ArgumentParser:
    parser = options("tiers", __doc__, quick="2 rounds of tiny tensors")
    parser.add_argument("--rounds", type=positive, help="of each contender (default: 40, of files 18)")
    parser.add_argument("--folder", help=f"where files go (default: {disk_moves.LASTING}, if it is there)")
    parser.add_argument(
        "--recycle", action="store_true", help="let the C library hand out memory again that was let go"
    )
    return parser


def _take_memory_from_the_system() -> None:
    m_mmap_threshold = -3  # of glibc's <malloc.h>
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 20)


def _header(shapes: Shapes, place: Machine, *, rounds: int, disk: dict[str, object]) -> Table:
    kept = "" if disk["pages_can_be_dropped"] else ", whose pages stay in memory: its cold figure is warm"
    table = Table(
        title=f"Park and restore: {len(shapes)} tensors, {_mib(shapes):.1f} MiB, {rounds} rounds, "
        f"{place.threads} thread",
        caption=f"{place.cpu}, {place.cores} cores; {place.system}; Python {place.python}, "
        f"torch {place.torch}; tensors on the CPU; {disk['rounds']} rounds of files on "
        f"{disk['file_system']}{kept}",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("tensors", justify="right")
    table.add_column("shape and type")
    table.add_column("MiB each", justify="right")
    for shape, count in Counter(shapes).items():
        table.add_row(str(count), f"{'x'.join(map(str, shape))} bfloat16", f"{_mib([shape]):.1f}")
    return table


def _figures(figures: dict[str, Spread]) -> Table:
    table = Table(title="Medians over the rounds", box=box.SIMPLE_HEAD)
    add_figures(table, figures, WANTED)
    return table


if __name__ == "__main__":
    sys.exit(main())

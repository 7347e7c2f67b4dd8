"""What the disk tier costs: a session into a file and back, against a plain file of the same bytes.

Part of ``python -m benchmarks.tiers``, which says what its figures mean. Not covered: which session is moved
when, and the manager around it.
"""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.feature_map import Shapes, filled, same_bits
from benchmarks.measure import no_collector, orders, turns

if TYPE_CHECKING:
    import torch

LASTING = "/var/tmp"
"""Where files outlive a restart by convention: on a disk, then, which ``/tmp`` often is not."""

NAMES = (
    "disk_over_plain",
    "disk_over_plain_cold",
    "disk_over_plain_no_checksum",
    "disk_park_and_restore_ms",
    "plain_file_ms",
)


def moves(shapes: Shapes, folder: Path, *, rounds: int, aside: Console) -> dict[str, list[float]]:
    """Round trips of ours and of plain files with and without a checksum, in turns."""
    aside.print("Filling sessions for the disk ...")
    ours = Ours(folder, shapes)
    plain, bare = Plain(folder, shapes), Plain(folder, shapes, checksum=False)
    figures: dict[str, list[float]] = {name: [] for name in NAMES}
    order = orders((ours, plain, bare))
    for contender in next(order):  # their first time is not counted
        round_trip(contender)
    with no_collector():
        for _ in turns(rounds, what="file", aside=aside):
            took = {contender: round_trip(contender) for contender in next(order)}
            warm, cold = ({who: times[state] for who, times in took.items()} for state in (0, 1))
            figures["disk_over_plain"].append(warm[plain] / warm[ours])
            figures["disk_over_plain_cold"].append(cold[plain] / cold[ours])
            figures["disk_over_plain_no_checksum"].append(warm[bare] / warm[ours])
            figures["disk_park_and_restore_ms"].append(warm[ours] / 1e6)
            figures["plain_file_ms"].append(warm[plain] / 1e6)
    ours.tier.check()
    ours.tier.close()
    original = filled(shapes)
    for contender in (ours, plain, bare):
        if contender.trips != 2 * (rounds + 1):
            raise AssertionError("a round did not move the session")
        if not same_bits(contender.tensors, original):
            raise AssertionError(f"{type(contender).__name__} brought other bytes back")
    return figures


def round_trip(contender: Ours | Plain) -> tuple[int, int]:
    """Nanoseconds to write a session, read it and remove its file: once from the page cache, once not."""
    began = time.perf_counter_ns()
    contender.park()
    parked = time.perf_counter_ns()
    contender.restore()
    warm = time.perf_counter_ns() - parked
    contender.tensors = []  # what comes back comes into new memory, both times
    forget(contender.file)
    again = time.perf_counter_ns()
    contender.restore()
    cold = time.perf_counter_ns() - again
    again = time.perf_counter_ns()
    contender.drop()
    rest = parked - began + time.perf_counter_ns() - again
    return rest + warm, rest + cold


class Ours:
    """A session in a file of the disk tier, and back from nothing but that file.

    Args:
        folder: The tier's.
        shapes: Of the session's tensors.
    """

    def __init__(self, folder: Path, shapes: Shapes) -> None:
        from vllm_omni_session_state.offload.disk_tier import DiskTier

        self.tier = DiskTier(folder / "tier", budget=1 << 40)
        self.tensors = filled(shapes)
        self.trips = 0

    @property
    def file(self) -> Path:
        """Where the session is while it is parked."""
        return Path(self.tier.folder, self._ticket.name)

    def park(self) -> None:
        """Take the session apart, write it, and let its tensors go."""
        from vllm_omni_session_state.offload.pack import pack_whole

        packed = pack_whole({"map": self.tensors})
        self._ticket = self.tier.put(packed.tree, packed.memory, session="00" * 16)
        self.tensors = []

    def restore(self) -> None:
        """Read the file, verify it, and put the session together; the file stays."""
        from vllm_omni_session_state.offload.unpack import unpack

        contents = self.tier.get(self._ticket)
        self.tensors = unpack(contents.tree, contents.storages)["map"]
        self.trips += 1

    def drop(self) -> None:
        """Remove the file."""
        self.tier.drop(self._ticket)


class Plain:
    """The same bytes in a file with nothing around them: as safe on the disk, and verified by the same sum.

    Args:
        folder: Where its file is.
        shapes: Of the tensors.
        checksum: Whether what is read is compared with what was written.
    """

    def __init__(self, folder: Path, shapes: Shapes, *, checksum: bool = True) -> None:
        self.file = folder / f"plain-{'summed' if checksum else 'bare'}"
        self.tensors = filled(shapes)
        self.trips = 0
        self._shapes = shapes
        self._checksum = zlib.crc32 if checksum else (lambda _: 0)
        self._sums: list[int] = []

    def park(self) -> None:
        """Write one tensor after the other into a new file, which gets its name when it is on the disk."""
        part = self.file.with_suffix(".part")
        views = [_bytes(tensor) for tensor in self.tensors]
        self._sums = [self._checksum(view) for view in views]
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for view in views:
                _all(view, lambda rest: os.write(fd, rest))
            os.fsync(fd)
        finally:
            os.close(fd)
        part.rename(self.file)
        folder = os.open(self.file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self.tensors = []

    def restore(self) -> None:
        """Read the file into new tensors; it stays."""
        import torch

        tensors = []
        fd = os.open(self.file, os.O_RDONLY)
        try:
            for shape, wanted in zip(self._shapes, self._sums, strict=True):
                tensors.append(torch.empty(shape, dtype=torch.bfloat16))
                view = _bytes(tensors[-1])
                _all(view, lambda rest: os.readv(fd, [rest]))
                if self._checksum(view) != wanted:
                    raise AssertionError("a plain file is damaged")
        finally:
            os.close(fd)
        self.tensors = tensors
        self.trips += 1

    def drop(self) -> None:
        """Remove the file."""
        self.file.unlink()


@contextmanager
def place(asked: str | None) -> Iterator[Path]:
    """A new folder below the one that is asked for, by default where a disk is likely; removed afterwards."""
    top = asked or (LASTING if os.access(LASTING, os.W_OK) else None)
    with tempfile.TemporaryDirectory(prefix="session-state-", dir=top) as folder:
        yield Path(folder)


def file_system(folder: Path) -> str:
    """The kind of file system that a folder is on, as in ``ext4``; ``unknown`` where Linux does not say."""
    found, longest = "unknown", -1
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, mount, kind, *_ = line.split()
            if folder.resolve().is_relative_to(mount) and len(mount) >= longest:
                found, longest = kind, len(mount)
    return found


def forget(file: Path) -> None:
    """Let a file's clean pages leave the page cache."""
    fd = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def can_forget(folder: Path) -> bool:
    """Whether pages of this file system leave the page cache when they are asked to; in memory they stay."""
    file = folder / "probe"
    file.write_bytes(bytes(1 << 20))
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        forget(file)
        os.preadv(fd, [bytearray(1)], 1 << 19, os.RWF_NOWAIT)
    except BlockingIOError:  # it would have to wait for the disk
        return True
    except OSError:  # a file system that always has what is read, and does not know the question
        return False
    finally:
        os.close(fd)
        file.unlink()
    return False


def _all(view: memoryview, move: Callable[[memoryview], int]) -> None:
    while view.nbytes:
        view = view[move(view) :]


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    with torch.inference_mode(False):
        flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return memoryview(flat.numpy())

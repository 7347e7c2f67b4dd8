"""Where two runs differ, bit by bit: each run a folder with one file of outputs an ask, and one of state.

Torch is imported where something differs, to say by how much. Not here: what the runs were.
"""

from __future__ import annotations

import filecmp
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_omni_session_state.ab.compare.tensor_file import TensorFile
from vllm_omni_session_state.ab.workload.requests import Request

NOT_THERE = "not there"
STATE = "state."
"""With this begins the name of a value of session state."""

PER_STEP = 3
"""A session that is not there differs in all that it has: so many values of one step are shown."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """How two tensors of one kind differ: of how many elements, the first one's index, and by how much.

    The greatest absolute difference is of those that are finite numbers in both; ``None`` where there is
    none. A zero of the other sign differs by 0.
    """

    elements: int
    differing: int
    first: tuple[int, ...]
    max_difference: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """An output, or a value of session state, that is not the same in both runs after an ask."""

    ask: Request
    tensor: str  # of a value of state it begins with ``state.``, and has its rank where there are several
    off: str  # what it is with the flag off, ``"not there"`` where it is missing
    on: str
    numbers: Numbers | None = None  # where both are outputs, and of one kind

    @property
    def of_state(self) -> bool:
        """Whether it is a value of session state."""
        return self.tensor.startswith(STATE)

    def __str__(self) -> str:
        place = f"{self.ask.place}, tensor {self.tensor}"
        if self.numbers is None:
            return f"{place}: {self.off} with the flag off, {self.on} with it on"
        greatest = self.numbers.max_difference
        by = "none of them finite in both" if greatest is None else f"by at most {greatest:.6g}"
        count = f"{self.numbers.differing:,} of {self.numbers.elements:,} elements of {self.off}"
        return f"{place}: {count} differ, {by}, the first at {list(self.numbers.first)}"


@dataclass(slots=True)
class Comparison:
    """What came of it: how many outputs and values of state were compared, also those that one run lacks."""

    outputs: int = 0
    values: int = 0
    nbytes: int = 0  # of the outputs with the flag off
    differences: list[Difference] = field(default_factory=list)
    """In the order in which they came, an ask's outputs before its state."""
    unread: list[tuple[Request, str]] = field(default_factory=list)
    """Asks after which state was not compared, each with the reason, in one line."""

    @property
    def values_different(self) -> int:
        """Values of session state that are not the same in both runs."""
        return sum(difference.of_state for difference in self.differences)

    @property
    def outputs_different(self) -> int:
        """Outputs that are not the same in both runs."""
        return len(self.differences) - self.values_different

    def shown(self, most: int) -> list[Difference]:
        """The first of the differences, of one step's state no more than `PER_STEP`."""
        kept: list[Difference] = []
        of_state: Counter[int] = Counter()
        for difference in self.differences:
            of_state[difference.ask.number] += difference.of_state
            if not difference.of_state or of_state[difference.ask.number] <= PER_STEP:
                kept.append(difference)
        return kept[:most]


def output_file(folder: Path, number: int) -> Path:
    """Where the outputs of an ask are."""
    return folder / f"{number:06d}.safetensors"


def state_file(folder: Path, number: int) -> Path:
    """Where the state after an ask is."""
    return folder / f"{number:06d}.state.json"


def compare(off: Path, on: Path, asks: Sequence[Request]) -> Comparison:
    """Compare what two runs have in their folders of the asks that both have answered.

    Raises:
        DamagedFileError: A file is damaged.
        OSError: A file is not there.
    """
    found = Comparison()
    for ask in asks:
        _compare_outputs(found, ask, output_file(off, ask.number), output_file(on, ask.number))
        _compare_state(found, ask, state_file(off, ask.number), state_file(on, ask.number))
    return found


def _compare_outputs(found: Comparison, ask: Request, off: Path, on: Path) -> None:
    mine, theirs = TensorFile(off), TensorFile(on)
    names = {**mine.kinds, **theirs.kinds}
    found.outputs += len(names)
    found.nbytes += sum(kind.nbytes for kind in mine.kinds.values())
    if filecmp.cmp(off, on, shallow=False):
        return
    for name in names:
        kinds = mine.kinds.get(name), theirs.kinds.get(name)
        numbers = None
        if kinds[0] == kinds[1]:
            (first,), (second,) = (file.tensors([name], framework="torch") for file in (mine, theirs))
            numbers = numbers_of(first, second)
            if numbers is None:
                continue
        first, second = (NOT_THERE if kind is None else str(kind) for kind in kinds)
        found.differences.append(Difference(ask, name, first, second, numbers))


def numbers_of(off: Any, on: Any) -> Numbers | None:
    """How two of torch's tensors of one kind differ; ``None`` where they do not."""
    import torch  # noqa: PLC0415 - seconds, and only needed here

    if not off.numel():
        return None
    bits = [tensor.reshape(-1).view(torch.uint8).view(-1, tensor.element_size()) for tensor in (off, on)]
    differs = (bits[0] != bits[1]).any(1)
    if not differs.any():
        return None
    wide = torch.complex128 if off.is_complex() else torch.float64
    values = [tensor.reshape(-1)[differs].to(wide) for tensor in (off, on)]
    finite = torch.isfinite(values[0]) & torch.isfinite(values[1])
    gaps = (values[0] - values[1])[finite].abs()
    return Numbers(
        elements=off.numel(),
        differing=int(differs.sum()),
        first=tuple(differs.view(off.shape).nonzero()[0].tolist()),
        max_difference=float(gaps.max()) if gaps.numel() else None,
    )


def _compare_state(found: Comparison, ask: Request, off: Path, on: Path) -> None:
    """Compare what each rank saw; without a file nobody has looked, and nothing is compared."""
    if not off.exists() or not on.exists():
        return
    mine, theirs = (json.loads(path.read_text()) for path in (off, on))
    for word, ranks in (("off", mine), ("on", theirs)):
        for rank in ranks:
            if not rank["ok"] or rank["parked"]:
                why = "its session was parked" if rank["ok"] else rank["error"]
                found.unread.append((ask, f"flag {word}, rank {rank['rank']}: {why}"))
                return
    for first, second in zip(mine, theirs, strict=True):
        place = f" on rank {first['rank']}" if len(mine) > 1 else ""
        for name in {**first["values"], **second["values"]}:
            found.values += 1
            seen = first["values"].get(name), second["values"].get(name)
            if seen[0] != seen[1]:
                found.differences.append(Difference(ask, f"{STATE}{name}{place}", *_said(*seen)))


def _said(off: list[str] | None, on: list[str] | None) -> tuple[str, str]:
    """In words; the digest only where nothing else tells one from the other."""
    alike = off is not None and on is not None and off[0] == on[0]
    first, second = (
        NOT_THERE if seen is None else f"{seen[0]}, digest {seen[1][:8]}" if alike else seen[0]
        for seen in (off, on)
    )
    return first, second

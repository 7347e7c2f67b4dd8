"""Where the outputs of two runs differ, bit by bit: each run a folder with one file of tensors an ask.

Torch is imported where something differs, to say by how much. Not here: what the runs were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_omni_session_state.ab.asks import Ask
from vllm_omni_session_state.ab.tensors import NAMES, Kind, TensorFile


@dataclass(frozen=True, slots=True)
class Numbers:
    """How two tensors of one kind differ.

    Attributes:
        elements: Of each.
        differing: Elements of which a bit differs.
        first: Index of the first of these.
        max_difference: The greatest absolute difference of those that are finite numbers in both;
            ``None`` where there is none. A zero of the other sign differs by 0.
    """

    elements: int
    differing: int
    first: tuple[int, ...]
    max_difference: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """An output that is not the same in both runs.

    Attributes:
        ask: After which it came.
        tensor: Its name.
        off: What it is with the flag off, ``"not there"`` where it is missing; ``on`` with the flag on.
        numbers: How the two differ, where both are there and of one kind.
    """

    ask: Ask
    tensor: str
    off: str
    on: str
    numbers: Numbers | None

    def __str__(self) -> str:
        place = f"session {self.ask.session}, step {self.ask.step} ({self.ask.label}), tensor {self.tensor}"
        if self.numbers is None:
            return f"{place}: {self.off} with the flag off, {self.on} with it on"
        greatest = self.numbers.max_difference
        by = "none of them finite in both" if greatest is None else f"by at most {greatest:.6g}"
        count = f"{self.numbers.differing:,} of {self.numbers.elements:,} elements of {self.off}"
        return f"{place}: {count} differ, {by}, the first at {list(self.numbers.first)}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of it.

    Attributes:
        outputs: Tensors that were compared, those that only one run has among them.
        nbytes: Bytes of those of the run with the flag off.
        differences: In the order in which they came.
    """

    outputs: int
    nbytes: int
    differences: tuple[Difference, ...]


def file_of(folder: Path, number: int) -> Path:
    """Where the outputs of an ask are."""
    return folder / f"{number:06d}.safetensors"


def compare(off: Path, on: Path, asks: Sequence[Ask]) -> Comparison:
    """Compare the outputs of two runs.

    Args:
        off: Folder of the run with the flag off.
        on: Folder of the other.
        asks: Those that both have answered.

    Raises:
        DamagedFileError: A file is damaged.
        OSError: A file is not there.
    """
    outputs = nbytes = 0
    differences = []
    for ask in asks:
        mine, theirs = TensorFile(file_of(off, ask.number)), TensorFile(file_of(on, ask.number))
        for name in {**mine.kinds, **theirs.kinds}:
            outputs += 1
            kinds = mine.kinds.get(name), theirs.kinds.get(name)
            numbers = None
            if kinds[0] is not None:
                nbytes += kinds[0].nbytes
                if kinds[0] == kinds[1]:
                    numbers = numbers_of(kinds[0], mine.content(name), theirs.content(name))
                    if numbers is None:
                        continue
            first, second = ("not there" if kind is None else str(kind) for kind in kinds)
            differences.append(Difference(ask, name, first, second, numbers))
    return Comparison(outputs, nbytes, tuple(differences))


def numbers_of(kind: Kind, off: bytes, on: bytes) -> Numbers | None:
    """How two contents of one kind differ; ``None`` where they do not."""
    if off == on:
        return None
    import torch  # noqa: PLC0415 - seconds, and only needed here

    dtype = getattr(torch, NAMES[kind.dtype])
    first, second = (torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in (off, on))
    elements = math.prod(kind.shape)
    differs = (first.view(elements, -1) != second.view(elements, -1)).any(1)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    values = [content.view(dtype)[differs].to(wide) for content in (first, second)]
    finite = torch.isfinite(values[0]) & torch.isfinite(values[1])
    gaps = (values[0] - values[1])[finite].abs()
    index = int(differs.nonzero()[0])
    place = []
    for size in reversed(kind.shape):
        index, here = divmod(index, size)
        place.append(here)
    return Numbers(
        elements=elements,
        differing=int(differs.sum()),
        first=tuple(reversed(place)),
        max_difference=float(gaps.max()) if gaps.numel() else None,
    )

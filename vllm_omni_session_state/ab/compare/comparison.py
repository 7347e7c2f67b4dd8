"""Where two runs differ, bit by bit: each run a folder with one file of outputs an ask, and one of state.

Torch is imported where something differs, to say by how much. Not here: what the runs were.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_omni_session_state.ab.compare.states import NOT_THERE, STATE, compare_state, state_file
from vllm_omni_session_state.ab.compare.tensor_file import NAMES, Kind, TensorFile
from vllm_omni_session_state.ab.workload.requests import Request

PER_STEP = 3
"""A session that is not there differs in all that it has: so many values of one step are shown."""


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
    """An output, or a value of session state, that is not the same in both runs.

    Attributes:
        ask: After which it came.
        tensor: Its name; that of a value of state begins with ``state.``.
        off: What it is with the flag off, ``"not there"`` where it is missing; ``on`` with the flag on.
        numbers: How the two differ, where both are outputs, and of one kind.
    """

    ask: Request
    tensor: str
    off: str
    on: str
    numbers: Numbers | None

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


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of it.

    Attributes:
        outputs: Tensors that were compared, those that only one run has among them.
        nbytes: Bytes of those of the run with the flag off.
        differences: In the order in which they came, an ask's outputs before its state.
        values: Values of session state that were compared, those that only one run has among them.
        unread: Asks after which state was not compared, each with the reason, in one line.
    """

    outputs: int
    nbytes: int
    differences: tuple[Difference, ...]
    values: int = 0
    unread: tuple[tuple[Request, str], ...] = ()

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


def file_of(folder: Path, number: int) -> Path:
    """Where the outputs of an ask are."""
    return folder / f"{number:06d}.safetensors"


def compare(off: Path, on: Path, asks: Sequence[Request]) -> Comparison:
    """Compare the outputs of two runs, and the session state that they left.

    Args:
        off: Folder of the run with the flag off.
        on: Folder of the other.
        asks: Those that both have answered.

    Raises:
        DamagedFileError: A file is damaged.
        OSError: A file is not there.
    """
    outputs = nbytes = values = 0
    differences, unread = [], []
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
            first, second = (NOT_THERE if kind is None else str(kind) for kind in kinds)
            differences.append(Difference(ask, name, first, second, numbers))
        state = compare_state(state_file(off, ask.number), state_file(on, ask.number))
        values += state.values
        unread += [(ask, state.unread)] if state.unread else []
        differences += [Difference(ask, each.name, each.off, each.on, None) for each in state.unlike]
    return Comparison(outputs, nbytes, tuple(differences), values, tuple(unread))


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

"""Sizes as operators write them: ``8GiB``, ``512MB``, ``1000000``, ``80%``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*|%)", re.ASCII)

SIZE_WORDS = "a size such as 8GiB, 512MB, 1000000 or 80%"
"""What a setting of this kind wants, for whoever wrote something else."""


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, or a part of a whole that is known later.

    Attributes:
        amount: Bytes, or per cent.
        relative: Whether it is a part.
    """

    amount: float
    relative: bool = False

    def of(self, whole: int) -> int:
        """The bytes, where ``whole`` bytes are there in all."""
        return int(whole * self.amount / 100) if self.relative else int(self.amount)

    def __str__(self) -> str:
        return f"{self.amount:g}%" if self.relative else str(int(self.amount))


def read_size(value: object) -> Size | None:
    """A size from a config or an environment; ``None`` for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    match = _WRITTEN.fullmatch(str(value).strip().lower())
    if match is None:
        return None
    number, unit = float(match[1]), match[2]
    if not math.isfinite(number * 1024**4):
        return None
    if unit == "%":
        return Size(number, relative=True) if number <= 100 else None
    return Size(number * _UNITS[unit]) if unit in _UNITS else None

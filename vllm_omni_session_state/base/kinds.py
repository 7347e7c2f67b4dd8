"""Kinds of values that settings hold, and how each is read from a config or an environment."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

VideoLatents: TypeAlias = Literal["keep", "spill"] | int
"""All in host memory, the older ones on the disk, or only the last so many."""

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*|%)", re.ASCII)
_SWITCH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value.

    Attributes:
        wanted: What such a value is, in words that follow "is not".
        read: Gives the value, or ``None`` for nonsense. It never raises.
    """

    wanted: str
    read: Callable[[object], Any]


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
    """A size as operators write it; ``None`` for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    match = _SIZE.fullmatch(str(value).strip().lower())
    if match is None:
        return None
    number, unit = float(match[1]), match[2]
    if not math.isfinite(number * 1024**4):
        return None
    if unit == "%":
        return Size(number, relative=True) if number <= 100 else None
    return Size(number * _UNITS[unit]) if unit in _UNITS else None


def _read_seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _read_count(value: object) -> int | None:
    try:
        count = int(str(value)) if isinstance(value, int | str) and not isinstance(value, bool) else 0
    except ValueError:
        return None
    return count if count > 0 else None


def _read_path(value: object) -> str | None:
    text = value.strip() if isinstance(value, str) else ""
    return text if text and "\0" not in text else None


def _read_video_latents(value: object) -> VideoLatents | None:
    name, _, number = str(value).strip().lower().partition(":")
    return _read_count(number) if name.strip() == "last" else _KEEP_OR_SPILL.read(value)


def _words(wanted: str, words: Mapping[str, object]) -> Kind:
    return Kind(wanted, lambda value: words.get(str(value).strip().lower()))


def _one_of(first: str, second: str) -> Kind:
    return _words(f"{first} or {second}", {first: first, second: second})


_KEEP_OR_SPILL = _one_of("keep", "spill")

SIZE = Kind("a size such as 8GiB, 512MB, 1000000 or 80%", read_size)
COUNT = Kind("a positive whole number", _read_count)
SECONDS = Kind("a number of seconds, 0 or more", _read_seconds)
FOLDER = Kind("the path of a folder", _read_path)
SWITCH = _words("one of " + "/".join(_SWITCH), _SWITCH)
ON_LOST = _one_of("warn", "error")
KV_POOL = _one_of("budget", "host")
VIDEO_LATENTS = Kind("keep, spill or last:N, such as last:100", _read_video_latents)

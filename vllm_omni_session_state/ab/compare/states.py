"""Session state as a run's workers saw it after an ask: a file beside the ask's outputs, and what differs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOT_THERE = "not there"
STATE = "state."
"""With this begins the name of a value of session state."""


@dataclass(frozen=True, slots=True)
class Unlike:
    """A value that is not the same in both runs.

    Attributes:
        name: Its name, with its rank where there are several.
        off: What it is with the flag off; ``on`` with the flag on.
    """

    name: str
    off: str
    on: str


@dataclass(frozen=True, slots=True)
class StateComparison:
    """What came of it.

    Attributes:
        values: Values that were compared.
        unlike: Those that are not the same.
        unread: Why there was nothing to compare, in one line; ``""`` if there was.
    """

    values: int
    unlike: tuple[Unlike, ...]
    unread: str = ""


def state_file(folder: Path, number: int) -> Path:
    """Where the state after an ask is."""
    return folder / f"{number:06d}.state.json"


def write_state(path: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Write what the workers said to a file that is whole as soon as it is there."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(ranks) + "\n")
    part.rename(path)


def compare_state(off: Path, on: Path) -> StateComparison:
    """Compare two files; without either nobody has looked, and nothing is compared."""
    if not off.exists() or not on.exists():
        return StateComparison(0, ())
    mine, theirs = (json.loads(path.read_text()) for path in (off, on))
    for word, ranks in (("off", mine), ("on", theirs)):
        for rank in ranks:
            if not rank["ok"] or rank["parked"]:
                why = "its session was parked" if rank["ok"] else rank["error"]
                return StateComparison(0, (), f"flag {word}, rank {rank['rank']}: {why}")
    count, unlike = 0, []
    for first, second in zip(mine, theirs, strict=True):
        place = f" on rank {first['rank']}" if len(mine) > 1 else ""
        for name in {**first["values"], **second["values"]}:
            count += 1
            seen = first["values"].get(name), second["values"].get(name)
            if seen[0] != seen[1]:
                unlike.append(Unlike(f"{STATE}{name}{place}", *_said(*seen)))
    return StateComparison(count, tuple(unlike))


def _said(off: list[str] | None, on: list[str] | None) -> tuple[str, str]:
    """In words; the digest only where nothing else tells one from the other."""
    alike = off is not None and on is not None and off[0] == on[0]
    first, second = (
        NOT_THERE if seen is None else f"{seen[0]}, digest {seen[1][:8]}" if alike else seen[0]
        for seen in (off, on)
    )
    return first, second

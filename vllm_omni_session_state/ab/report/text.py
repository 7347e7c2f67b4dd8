"""How the report says a count."""

from __future__ import annotations


def some(count: int, noun: str) -> str:
    """A count with its noun, as ``1 step``, ``1,200 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

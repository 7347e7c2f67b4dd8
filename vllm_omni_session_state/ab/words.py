"""How the report says a count, and a text that may be a stranger's."""

from __future__ import annotations


def some(count: int, noun: str) -> str:
    """A count with its noun, as ``1 step``, ``1,200 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def printable(text: str, *, keep: str = "") -> str:
    """Text with what no terminal should get, escapes and ends of lines among it, written out.

    Args:
        text: It may be a stranger's.
        keep: Signs that stay as they are.
    """
    return "".join(
        sign if sign.isprintable() or sign in keep else sign.encode("unicode_escape").decode()
        for sign in text
    )

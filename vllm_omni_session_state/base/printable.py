"""Text that may be a stranger's, written so that a log, a terminal and a person can take it.

An end of a line would begin a line of somebody's choice, an escape sequence would steer the terminal, and
signs that change the direction of writing would show another text than the one that is there.
"""

from __future__ import annotations


def printable(text: str, *, keep: str = "") -> str:
    r"""Text with what no terminal should get written out, as ``\x1b``; all else stays, and so does its look.

    Args:
        text: It may be a stranger's.
        keep: Signs that stay as they are.
    """
    return "".join(
        sign if sign.isprintable() or sign in keep else sign.encode("unicode_escape").decode()
        for sign in text
    )


def escaped(text: str) -> str:
    r"""Text as one word of ASCII, and another one for each other text: what looks alike is the same.

    Letters of two alphabets can look alike, and so can one letter and its parts. Spaces are lost at the end
    of a cell, and where a line is folded. So all that is not plain ASCII, and every space, is written out as
    Python does, ``\u0430``, and a backslash is doubled.
    """
    return text.encode("unicode_escape").decode("ascii").replace(" ", "\\x20")

"""The pages as text: fenced blocks, links, names in backticks and tables, each with where it stands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[2]
DOCS = PROJECT / "docs"
PAGES = (PROJECT / "README.md", *sorted(DOCS.glob("*.md")))

_FENCE = re.compile(r"^( *)```+ *([^\n]*)\n(.*?)^\1```+ *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block.

    Attributes:
        page: The page's file.
        line: Of its first line, from 1.
        language: The first word behind the fence, ``""`` for none.
        text: What stands in it.
    """

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, (found[2].split() or [""])[0], found[3])
        for found in _FENCE.finditer(text)
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Targets of all links and pictures."""
    return _LINK.findall(prose(page))


def names(page: Path) -> list[str]:
    """What stands in backticks."""
    return [name.strip() for name in _CODE.findall(prose(page))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the builder makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in headings}


def table(page: Path, *heading: str) -> list[list[str]]:
    """The rows of the one table with these first headings.

    Raises:
        LookupError: There is none, or more than one.
    """
    found: list[list[list[str]]] = []
    rows: list[list[str]] | None = None
    for line in prose(page).splitlines():
        cells = (
            [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else None
        )
        if cells is None:
            rows = None
        elif rows is None:
            rows = []
            if cells[: len(heading)] == list(heading):
                found.append(rows)
        elif not set("".join(cells)) <= set("-: "):
            rows.append(cells)
    if len(found) != 1:
        raise LookupError(f"{page.name} has {len(found)} tables that begin with {heading}, not one")
    return found[0]

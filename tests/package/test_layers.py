"""The architecture, walked: imports run downward, files stay short, only two layers know the host."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = "vllm_omni_session_state"
ROOT = Path(__file__).parents[2] / PACKAGE

# Top row first. A file may import what stands in rows below it and, in its own row, what stands to its left.
ROWS = (
    ("__init__", "testing", "ab", "cli", "plugin"),
    ("omni",),
    ("adapters",),
    (
        *("table", "settlement", "watch", "outside", "exchange", "levels", "cascade", "eviction"),
        *("pool", "room", "uses", "manager"),
    ),
    (
        *("slots", "arrays", "pack", "atoms", "skeleton", "rebuild", "page_locked", "transfer", "tiers"),
        *("spill", "remains", "parking", "lease"),
    ),
    ("contract", "segments", "objects", "paged", "session", "listing"),
    (
        *("footprint", "release", "ascending", "tangle", "addresses", "chunks", "glance", "reach"),
        *("growth", "ledger", "accounts", "order", "moves"),
    ),
    ("errors", "printable", "events", "sizes", "config", "regions", "ids", "losses", "origins", "rows"),
)
PLACE = {name: (row, column) for row, names in enumerate(ROWS) for column, name in enumerate(names)}
SERVES = ROOT / "ab" / "child.py"
"""Beside the layers that know the host: a process that serves a deployment as its user does, by `Omni`."""
FILES = sorted(ROOT.rglob("*.py"))


def noun_of(module: str) -> str:
    """The first part below the package: a file or a folder of the table above."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what is imported"
            if node.module == PACKAGE:  # ``from package import module``
                yield from ((f"{PACKAGE}.{alias.name}", node) for alias in node.names)
            else:
                yield node.module, node


def test_there_is_something_to_walk():
    assert len(FILES) > 10


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downward_only(path):
    module = ".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts))
    own = noun_of(module)
    assert own in PLACE, f"{own} has no place in the architecture"
    if own == "__init__":
        return  # lazy: it names the homes of the public names, and imports them when they are used
    for imported, node in imports_of(path):
        if imported.split(".")[0] != PACKAGE:
            continue
        other = noun_of(imported)
        if other == own:
            continue
        assert other in PLACE, f"{path.name}:{node.lineno}: {other} has no place in the architecture"
        row, column = PLACE[own]
        other_row, other_column = PLACE[other]
        assert other_row > row or (other_row == row and other_column < column), (
            f"{path.name}:{node.lineno}: {own} must not import {other}"
        )


def test_the_page_on_the_design_has_a_place_for_each_file():
    page = (ROOT.parent / "docs" / "design.md").read_text()
    section = page[page.index("## Layers") : page.index("## Data flows one way")]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", table)) - {"__init__.py"}
    files = {path.relative_to(ROOT).as_posix() for path in FILES if path.name != "__init__.py"}
    folders = {name for name in named if name.endswith("/")}
    wanted = {name for name in files if not name.startswith(tuple(folders - {"omni/", "adapters/"}))}
    assert named - folders == wanted


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_host_layers_import_the_host_and_only_inside_functions(path):
    inside = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside.update(id(child) for child in ast.walk(node))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            if name.split(".")[0] in ("vllm", "vllm_omni"):
                assert path.relative_to(ROOT).parts[0] in ("omni", "adapters") or path == SERVES, (
                    f"{path}: knows the host"
                )
                assert id(node) in inside, f"{path}:{node.lineno}: imports the host at module level"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short_and_say_what_they_are(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 350
    assert ast.get_docstring(ast.parse(text))


def test_only_the_books_the_codec_and_who_plays_a_client_look_inside_arrays():
    books, codec, client = (
        ("footprint", "reach", "atoms"),
        ("arrays", "skeleton", "rebuild"),
        ("robots", "clips", "recording", "outputs"),
    )
    for path in FILES:
        for imported, node in imports_of(path):
            if imported.split(".")[0] == "numpy":
                assert path.stem in (*books, *codec, *client), f"{path.name}:{node.lineno} imports numpy"

"""The architecture, walked: imports run downward, files stay short, only two rooms know vLLM-Omni."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = "vllm_omni_session_state"
ROOT = Path(__file__).parents[2] / PACKAGE

# Top row first. A file may import from its own folder and from rows below it.
ROWS = (
    ("__init__", "testing", "ab", "cli", "plugin"),
    ("omni",),
    ("adapters",),
    ("manager",),
    ("offload",),
    ("state",),
    ("accounting",),
    ("base",),
)
ROW = {name: row for row, names in enumerate(ROWS) for name in names}
FACE_ORDER = ("__init__", "testing", "ab", "cli", "plugin")
"""In the top row a folder may import those that stand to its left."""
SERVES = ROOT / "ab" / "runs" / "child.py"
"""Beside the rooms that know vLLM-Omni: a process that serves a deployment as its user does, by `Omni`."""
FILES = sorted(ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_of(path) for path in FILES}


def room_of(module: str) -> str:
    """The first part below the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(path: Path):
    """The modules that a file imports, each with its node; names of a package that are modules are these."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what is imported"
            for name in {alias.name for alias in node.names}:
                full = f"{node.module}.{name}"
                yield (full if full in MODULES else node.module), node


def test_there_is_something_to_walk():
    assert len(FILES) > 10


def test_the_top_has_few_entries():
    entries = {path.name for path in ROOT.iterdir()} - {"__pycache__", "py.typed"}
    assert len(entries) <= 12
    assert {name.removesuffix(".py") for name in entries} <= set(ROW)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downward_only(path):
    own = room_of(module_of(path))
    if own == "__init__":
        return  # lazy: it names the homes of the public names, and imports them when they are used
    for imported, node in imports_of(path):
        if imported.split(".")[0] != PACKAGE:
            continue
        other = room_of(imported)
        if other == own:
            continue
        down = ROW[other] > ROW[own]
        left = ROW[other] == ROW[own] == 0 and FACE_ORDER.index(other) < FACE_ORDER.index(own)
        assert down or left, f"{path.name}:{node.lineno}: {own} must not import {other}"


def test_imports_have_no_cycle():
    """Also inside a room: whoever reads a file finds what it builds on without coming back to it."""
    below = {
        module_of(path): {name for name, _ in imports_of(path) if name in MODULES} - {module_of(path)}
        for path in FILES
    }
    while below:
        free = {module for module, wanted in below.items() if not wanted & below.keys()}
        assert free, f"these import each other in a circle: {sorted(below)}"
        for module in free:
            del below[module]


def test_the_page_on_the_design_names_each_room_and_only_files_that_are_there():
    page = (ROOT.parent / "docs" / "design.md").read_text()
    section = page[page.index("## Rooms") : page.index("## Data flows one way")]
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    folders = set(re.findall(r"`(\w+)/`", table))
    assert {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} <= folders
    for name in re.findall(r"`([\w/]+\.py)`", table):
        assert list(ROOT.rglob(name)), f"{name} is not there"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_some_rooms_import_vllm_omni_and_only_inside_functions(path):
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
                    f"{path}: knows vLLM-Omni"
                )
                assert id(node) in inside, f"{path}:{node.lineno}: imports vLLM-Omni at module level"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short_and_say_what_they_are(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 350
    assert ast.get_docstring(ast.parse(text))


PARTS = {"capacity", "offloader", "_table", "_uses", "_outside"}
"""What a manager is made of. `watch` and `moves` are for everybody."""


def test_the_parts_of_a_manager_are_still_those():
    tree = ast.parse((ROOT / "manager" / "manager.py").read_text())
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    made = {each.attr for node in assigned for each in node.targets if isinstance(each, ast.Attribute)}
    assert made >= PARTS


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_reaches_past_a_manager_s_own_methods(path):
    if path.relative_to(ROOT).parts[0] == "manager":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in PARTS:
            whose = ast.unparse(node.value)
            assert "manager" not in whose, f"{path}:{node.lineno} reaches for {whose}.{node.attr}"


def test_the_base_needs_the_standard_library_alone():
    import sys

    for path in (ROOT / "base").rglob("*.py"):
        for imported, node in imports_of(path):
            first = imported.split(".")[0]
            assert first in sys.stdlib_module_names or first == PACKAGE, f"{path.name}:{node.lineno}: {first}"


def test_only_who_counts_copies_or_plays_a_client_looks_inside_arrays():
    books, files, client = (
        ("footprint", "reach", "memory"),
        ("schema", "registered", "pack", "unpack"),
        ("dreamzero", "cosmos3", "trace", "outputs"),
    )
    for path in FILES:
        for imported, node in imports_of(path):
            if imported.split(".")[0] == "numpy":
                assert path.stem in (*books, *files, *client), f"{path.name}:{node.lineno} imports numpy"

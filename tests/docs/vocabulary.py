"""The names that exist: in this project, in the parts of vLLM-Omni that the pages speak of, and in Python.

A name in backticks that looks like code must be one of them.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import importlib.util
import re
from pathlib import Path

from pages import PROJECT

from vllm_omni_session_state.base.ids import ENV_KEY
from vllm_omni_session_state.base.settings import SETTINGS

PACKAGE = PROJECT / "vllm_omni_session_state"
HOST_FILES = (
    "diffusion/data.py",
    "diffusion/model_loader/diffusers_loader.py",
    "diffusion/models/cosmos3/pipeline_cosmos3.py",
    "diffusion/models/cosmos3/transformer_cosmos3.py",
    "diffusion/models/dreamzero/pipeline_dreamzero.py",
    "diffusion/models/dreamzero/state_dreamzero.py",
    "engine/stage_pool.py",
    "engine/stage_runtime.py",
    "entrypoints/async_omni.py",
    "entrypoints/cli/serve.py",
    "entrypoints/omni.py",
    "entrypoints/openai/serving_rl_rollout.py",
    "entrypoints/openpi/connection.py",
    "entrypoints/utils.py",
    "experimental/ar_diffusion/runner.py",
    "plugins/__init__.py",
)
PINS = ("OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "DIFFUSION_ATTENTION_BACKEND")
"""Variables of others, with which a reader pins what could differ."""

OTHERS = frozenset({"torch", "cat", "cuda", "cpu", "vllm", *PINS, *dir(dict)})
VARIABLES = frozenset({ENV_KEY, *(setting.variable for setting in SETTINGS)})
"""Settings as variables, of which the code builds the names."""

NONSENSE = frozenset({"maybe", "lots"})
"""What a page shows as a value that is not understood."""

MONITORING = frozenset(
    {"rule_files", *re.findall(r"alert: (\w+)", (PROJECT / "docs/monitoring/alerts.yml").read_text())}
)
"""The names of the alert rules, and the key under which Prometheus is told of them."""

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_CODE_LIKE = re.compile(r"[A-Za-z_][\w.]*(\(.*\)|\[.*\])?")
_PATH = re.compile(r"[\w./-]+\.(py|md|toml|yml|yaml|svg|txt)|[\w.-]+/")


@functools.cache
def ours() -> frozenset[str]:
    """Every name that package, harness and benchmarks define or use, and the words of the settings."""
    found: set[str] = set()
    folders = (PACKAGE, PROJECT / "tests" / "harness", PROJECT / "benchmarks")
    for path in (file for folder in folders for file in folder.rglob("*.py")):
        found.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text())):
            found |= set(_of(node))
    return frozenset(found)


def _of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Constant):
        is_name = isinstance(node.value, str) and _IDENTIFIER.fullmatch(node.value)
        return [node.value] if is_name else []
    found = (getattr(node, field, None) for field in ("name", "id", "attr", "arg"))
    return [name for name in found if isinstance(name, str)]


@functools.cache
def hosts() -> frozenset[str]:
    """Every identifier in vLLM-Omni's files that the pages speak of."""
    spec = importlib.util.find_spec("vllm_omni")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    return frozenset(word for file in HOST_FILES for word in _IDENTIFIER.findall((root / file).read_text()))


def unknown(name: str) -> str | None:
    """What of a name in backticks does not exist, ``None`` where all of it does or it is no name."""
    if _PATH.fullmatch(name):
        places = (PROJECT, PACKAGE, PROJECT / "tests", PROJECT / "tests" / "harness")
        return None if name in LEFT or any((place / name).exists() for place in places) else name
    if name.startswith("vllm_omni_session_state."):
        return _unknown_dotted(name)
    if not _CODE_LIKE.fullmatch(name):
        return None
    missing = [
        word for word in _IDENTIFIER.findall(re.sub(r"\"[^\"]*\"|'[^']*'", "", name)) if not _known(word)
    ]
    return ", ".join(missing) or None


LEFT = frozenset({"off/", "on/"})
"""Folders that a command makes."""


def _known(word: str) -> bool:
    field = re.sub(r"^stage_\d+_", "", word)  # how vLLM-Omni spells a stage's field as a keyword argument
    known = (ours(), hosts(), OTHERS, VARIABLES, NONSENSE, MONITORING)
    return any(field in names for names in known) or hasattr(builtins, field)


def _unknown_dotted(name: str) -> str | None:
    value: object = importlib.import_module("vllm_omni_session_state")
    path = "vllm_omni_session_state"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if hasattr(value, "__path__") and importlib.util.find_spec(path) is not None:
            value = importlib.import_module(path)
        elif hasattr(value, part):
            value = getattr(value, part)
        else:
            return name
    return None

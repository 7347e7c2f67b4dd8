"""Shell lines of the pages: what each is, and that it is right. A line of no known kind is refused.

Lines that can be run here cheaply are run; what would install, uninstall or serve a real model is checked
against what it names.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

from pages import PROJECT
from travel import serve_arguments
from vocabulary import OTHERS, VARIABLES

from vllm_omni_session_state.base.ids import ENV_KEY
from vllm_omni_session_state.base.settings import resolve
from vllm_omni_session_state.cli.main import _parser

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "vllm-omni-session-state"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def lines(text: str) -> list[str]:
    """The commands of a block, without comments, continued lines joined."""
    joined = text.replace("\\\n", " ")
    bare = [re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.splitlines()]
    return [line for line in bare if line]


def check(line: str) -> str:
    """Check one command; returns what kind it is.

    Raises:
        AssertionError: It is of no known kind, or names something that is not there.
    """
    words = shlex.split(line)
    if words[0] == "export":
        for word in words[1:]:
            setting(word)
        return "setting"
    while words and _ASSIGNMENT.fullmatch(words[0]):
        setting(words.pop(0))
    for kind, known in KINDS.items():
        if words[: len(kind)] == list(kind):
            known(words[len(kind) :])
            return " ".join(kind)
    raise AssertionError(f"no test knows what to do with the command {line!r}")


def setting(word: str) -> None:
    """An assignment: of a variable that is read, to a value that is understood."""
    found = _ASSIGNMENT.fullmatch(word)
    assert found, f"{word!r} sets nothing"
    name, value = found.groups()
    if name in VARIABLES - {ENV_KEY}:
        _, complaints = resolve(None, {name: value})
        assert not complaints, complaints
    elif name == "VLLM_PLUGINS":
        assert (
            f'\n{value} = "vllm_omni_session_state.plugin:register"\n'
            in (PROJECT / "pyproject.toml").read_text()
        )
    else:
        assert name in OTHERS, f"{name} is no variable that a test knows"


def _make(arguments: list[str]) -> None:
    (target,) = arguments
    makefile = (PROJECT / "Makefile").read_text()
    assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"make has no target {target}"
    phony = re.search(r"^\.PHONY:(.*)$", makefile, re.MULTILINE)
    assert phony
    assert target in phony[1].split()


def _pip_install(arguments: list[str]) -> None:
    (what,) = arguments
    found = re.fullmatch(r"\.(?:\[(\w+)\])?", what)
    assert found, "the project is installed from its clone"
    extras = (PROJECT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    assert found[1] is None or f"\n{found[1]} = [" in extras, f"there is no extra {found[1]}"
    _install()


@functools.cache
def _install() -> None:
    """See that pip would install this clone; ``tests/package/test_wheel.py`` installs it."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "."]
    subprocess.run(command, check=True, cwd=PROJECT, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})


def _pip_uninstall(arguments: list[str]) -> None:
    assert arguments == [NAME]
    assert f'\nname = "{NAME}"\n' in (PROJECT / "pyproject.toml").read_text()


def _own_command(arguments: list[str]) -> None:
    assert f'\n{NAME} = "vllm_omni_session_state.cli.main:main"\n' in (PROJECT / "pyproject.toml").read_text()
    try:
        _parser().parse_args(arguments)
    except SystemExit:
        raise AssertionError(f"{NAME} does not know {arguments}") from None


def _vllm_serve(arguments: list[str]) -> None:
    assert "--omni" in arguments, "without --omni it is vLLM's own server"
    assert serve_arguments(arguments)["model"] in ("GEAR-Dreams/DreamZero-DROID", "nvidia/Cosmos3-Nano")


def _python_module(arguments: list[str]) -> None:
    """A benchmark of this clone that knows these options."""
    name, *options = arguments
    assert (PROJECT / f"{name.replace('.', '/')}.py").is_file(), f"there is no {name} in a clone"
    command = [sys.executable, "-m", name, "--help"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert all(f" [{option}]" in done.stdout for option in options), f"{name} does not know {options}"


def _diff(arguments: list[str]) -> None:
    """Of what two runs of ``ab`` left."""
    assert all(re.fullmatch(r"\w+/(off|on)", argument) for argument in arguments)


KINDS: dict[tuple[str, ...], Callable[[list[str]], None]] = {
    ("make",): _make,
    ("pip", "install"): _pip_install,
    ("pip", "uninstall"): _pip_uninstall,
    ("vllm", "serve"): _vllm_serve,
    (NAME,): _own_command,
    ("python", "-m"): _python_module,
    ("diff", "-r"): _diff,
}

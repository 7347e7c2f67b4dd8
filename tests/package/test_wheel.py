"""What a user installs: the built wheel, alone in a clean environment."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--quiet",
        "--wheel-dir",
        str(out),
        str(PROJECT),
    ]
    subprocess.run(command, check=True)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"vllm_omni_session_state", "vllm_omni_session_state-0.1.0.dist-info"}
    assert "vllm_omni_session_state/py.typed" in names


def test_in_a_clean_environment_the_plugin_is_found_and_importing_takes_no_torch(wheel, tmp_path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = str(venv / "bin" / "python")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, env=environ)
    code = (
        "import sys, importlib.metadata as metadata\n"
        "(found,) = metadata.entry_points(group='vllm_omni.general_plugins')\n"
        "print(found.name, found.value)\n"
        "found.load()()\n"
        "import vllm_omni_session_state\n"
        "print('torch' in sys.modules)\n"
    )
    out = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env=environ).stdout
    assert out.split("\n")[:2] == ["session_state vllm_omni_session_state.plugin:register", "False"]


def test_with_its_dependencies_pip_check_is_clean(wheel, tmp_path):
    """The dependencies come from this environment, so that nothing is fetched twice."""
    target = tmp_path / "target"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(command, check=True)
    code = (
        "import importlib.metadata as metadata\n"
        "from packaging.requirements import Requirement\n"
        "for text in metadata.requires('vllm-omni-session-state'):\n"
        "    need = Requirement(text)\n"
        "    if need.marker is None or need.marker.evaluate({'extra': ''}):\n"
        "        assert need.specifier.contains(metadata.version(need.name), prereleases=True), text\n"
        "        print(need.name)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(target)}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ
    ).stdout
    assert out.split() == ["torch", "numpy", "safetensors"]

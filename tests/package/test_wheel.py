"""What a user installs: the built wheel, alone in a clean environment."""

import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from profiles import LONG

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
    templates = {name for name in names if name.endswith(".j2")}
    assert templates == {
        f"vllm_omni_session_state/ab/report/{path.name}"
        for path in (PROJECT / "vllm_omni_session_state" / "ab" / "report").glob("*.j2")
    }
    assert len(templates) == 2


def test_in_a_clean_environment_plugin_and_command_are_found_and_importing_takes_no_torch(wheel, tmp_path):
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
    command = [str(venv / "bin" / "vllm-omni-session-state"), "doctor"]
    bare = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert (bare.returncode, bare.stdout) == (2, "")
    assert "pip install 'vllm-omni-session-state[cli]'" in bare.stderr
    told = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False, env=environ)
    found = json.loads(told.stdout)
    assert (told.returncode, found["plugin"]["name"]) == (2, "session_state")
    assert found["unseen"][0].startswith("vLLM-Omni is not there: vllm, vllm_omni, torch cannot be found by")


@pytest.mark.skipif(not LONG, reason="installs torch: long run only")
def test_with_its_dependencies_in_a_clean_environment_pip_check_is_clean(wheel, tmp_path):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    version = metadata.version("torch").split("+")[0]
    local = subprocess.run([*pip, "install", "--quiet", f"torch=={version}+cpu"], check=False)
    if local.returncode:
        index = "https://download.pytorch.org/whl/cpu"
        subprocess.run([*pip, "install", "--quiet", f"torch=={version}", "--index-url", index], check=True)
    subprocess.run([*pip, "install", "--quiet", str(wheel)], check=True)
    done = subprocess.run([*pip, "check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "No broken requirements found.")

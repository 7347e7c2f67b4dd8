"""`ab` on the real host and the tiny checkpoints: equal as it is, and a mistake or a death is named.

Starting up is nearly all of it. In the short run the worker is vLLM-Omni's one for one device, in the
engine's own process. Mutants of the plugin are served in the long run only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from profiles import LONG

from vllm_omni_session_state.ab.document import COULD_NOT_RUN, DIFFERENT, EQUAL

pytestmark = pytest.mark.host

NAMED = {
    "view_keyed_to_the_wrong_session": (1, 2, "actions"),
    "ring_one_frame_short": (1, 6, "actions"),
    "attribute_kept_on_the_view": (1, 2, "actions"),
}
"""Mutant of DreamZero's adapter -> session, step and tensor of the first difference."""

REFUSED = {"drop_that_forgets": "session 3, step 7 (wave (reset))"}
"""Mutant with which the host fails: the step that is named."""

TESTS = Path(__file__).parents[1]
EXECUTOR = "mp" if LONG else "uni"


@pytest.fixture(scope="module")
def cosmos3(tmp_path_factory):
    from omni_tiny.checkpoint.cosmos3 import write_cosmos3

    return write_cosmos3(tmp_path_factory.mktemp("cosmos3") / "checkpoint")


def deploy(path, checkpoint, model, executor):
    from omni_tiny.omni_cosmos3 import write_cosmos3_deploy
    from omni_tiny.omni_runs import write_deploy

    if model == "DreamZero":
        return write_deploy(path, checkpoint, executor=executor)
    return write_cosmos3_deploy(path, executor=executor)


def start(folder, checkpoint, model, *arguments, executor=EXECUTOR, **environ):
    """Start the command as a user does."""
    file = deploy(folder / "deploy.yaml", checkpoint, model, executor)
    command = [sys.executable, "-m", "vllm_omni_session_state.cli", "ab", "--deploy-config", str(file)]
    command += ["--model", str(checkpoint), "--out", str(folder / "ab"), *arguments]
    paths = [str(TESTS / "dreamzero"), str(TESTS / "cosmos3"), *(part for part in sys.path if part)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "100", **environ}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


def result_of(process, folder):
    """Its exit status, what it said, and its document."""
    said, _ = process.communicate(timeout=600)
    file = folder / "ab" / "ab.json"
    return process.returncode, said, json.loads(file.read_text()) if file.exists() else None


def test_dreamzero_is_equal_and_its_sessions_are_counted(dreamzero_checkpoint, tmp_path):
    process = start(tmp_path, dreamzero_checkpoint, "DreamZero", VLLM_LOGGING_LEVEL="INFO")
    status, said, found = result_of(process, tmp_path)
    assert status == EQUAL, said
    line = "session state manager (experimental) is on for DreamZeroPipeline"
    logs = [(tmp_path / "ab" / f"{word}.log").read_text() for word in ("off", "on")]
    assert [log.count(line) for log in logs] == [0, 1], "only the second run is managed"
    assert "EQUAL: all 74 outputs of 38 steps are equal to the last bit" in said
    assert found["left"] == []
    steps = found["runs"]["on"]["steps"]
    assert all(step["sessions"] is None and step["seconds"] > 0 for step in found["runs"]["off"]["steps"])
    counted = [set(step["sessions"]) for step in steps]
    assert counted[2] == {"session 1", "session 2", "session 3"}
    closed = next(number for number, step in enumerate(steps) if step["does"] == "close")
    assert counted[closed] == {"session 1", "session 3"}
    assert counted[-1] == {"session 1", "session 2"}, "the last step closes its session"
    assert all(sum(held.values()) > 100_000 for step in steps for held in step["sessions"].values())
    assert all(step["peak_bytes"] > 0 for step in steps if step["does"] not in ("reset", "close"))


@pytest.mark.skipif(not LONG, reason="two served runs, as by the demo: part of the long run")
def test_cosmos3_is_equal_and_nothing_is_left_after_a_request(cosmos3, tmp_path):
    status, said, found = result_of(start(tmp_path, cosmos3, "Cosmos3"), tmp_path)
    assert status == EQUAL, said
    assert "EQUAL: all 12 outputs of 12 steps are equal to the last bit" in said
    assert found["left"] == []
    assert [step["sessions"] for step in found["runs"]["on"]["steps"]] == [{}] * 12
    assert {step["does"] for step in found["runs"]["on"]["steps"]} == {
        *("T2V with CFG", "T2V", "T2I with CFG", "T2I", "I2V with CFG", "I2V")
    }


@pytest.mark.skipif(not LONG, reason="two served runs: part of the long run")
def test_a_run_that_is_killed_is_named_with_its_log_and_the_others_results_are_kept(cosmos3, tmp_path):
    process = start(tmp_path, cosmos3, "Cosmos3", "--steps", "40", "--sessions", "1")
    off, on = tmp_path / "ab" / "off", tmp_path / "ab" / "on"
    try:
        until = time.monotonic() + 600
        while not (on / "000003.safetensors").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.02)
        (child,) = children_of(process.pid)  # it may have given itself another name
        os.kill(child, signal.SIGKILL)
        status, said, found = result_of(process, tmp_path)
    finally:
        process.kill()
    assert status == COULD_NOT_RUN
    assert (
        "COULD NOT RUN: the process with the flag on failed: its process ended early with signal SIGKILL"
        in said
    )
    assert f"its log: {tmp_path / 'ab' / 'on.log'}" in said
    came = len(found["runs"]["on"]["steps"])
    assert 3 <= came < 40
    assert len(found["runs"]["off"]["steps"]) == len(list(off.glob("*.safetensors"))) == 40
    assert found["compared"] == came
    assert f"As far as both came, all {came} outputs of {came} steps are equal." in said
    until = time.monotonic() + 20
    while living_in(child) and time.monotonic() < until:
        time.sleep(0.1)  # killed, and not gone yet
    assert living_in(child) == []


def living_in(group):
    """Pids of a process group's members, without those that are dead and whom nobody has collected."""
    command = ["ps", "-eo", "pid=,pgid=,stat="]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    members = [line.split() for line in found]
    return [int(pid) for pid, of, state in members if int(of) == group and not state.startswith("Z")]


def children_of(pid):
    """Pids of a process's children."""
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return {int(word) for word in found.stdout.split()}


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="two served runs each: SESSION_STATE_LONG=1")
@pytest.mark.parametrize("mutant", [*NAMED, *REFUSED])
def test_a_mutant_is_named(dreamzero_checkpoint, tmp_path, mutant):
    from omni_tiny.mutant import VARIABLE

    process = start(tmp_path, dreamzero_checkpoint, "DreamZero", **{VARIABLE: f"mutants:{mutant}"})
    status, said, found = result_of(process, tmp_path)
    if mutant in REFUSED:
        assert status == COULD_NOT_RUN
        assert f"the process with the flag on failed: RuntimeError: {REFUSED[mutant]}" in said
        return
    assert status == DIFFERENT, said
    first = found["first_difference"]
    assert (first["session"], first["step"], first["tensor"]) == NAMED[mutant]
    session, step, tensor = NAMED[mutant]
    assert f"  session {session}, step {step} (" in said
    assert f"tensor {tensor}: " in said


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="two served runs: SESSION_STATE_LONG=1")
def test_a_mutant_that_frees_nothing_is_said_as_left_behind(cosmos3, tmp_path):
    from omni_tiny.mutant import VARIABLE

    process = start(tmp_path, cosmos3, "Cosmos3", **{VARIABLE: "mutants_cosmos3:drop_that_forgets"})
    status, said, found = result_of(process, tmp_path)
    assert status == EQUAL, "outputs are as they were"
    left = "with the flag on, an ended session was still there after 12 of 12 steps, first session 1, step 1"
    assert f"LEFT BEHIND: {left}" in said
    assert len(found["left"]) == 12

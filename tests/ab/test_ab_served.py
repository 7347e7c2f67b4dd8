"""`ab` on the real host and the tiny checkpoints: equal as it is, and a mistake or a death is named.

Every mutant of the adapters has its place here: named with session, step and tensor; or said; or, where it
changes nothing that one run can see of the other, with the reason.

Starting up is nearly all of it. In the short run the worker is vLLM-Omni's one for one device, in the
engine's own process. Mutants of the plugin are served in the long run only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from profiles import EXECUTOR, LONG

from vllm_omni_session_state.ab.compare.comparison import state_file
from vllm_omni_session_state.ab.report.result import COULD_NOT_RUN, DIFFERENT, EQUAL

pytestmark = pytest.mark.host

ENDED = "of the session that ended"
NAMED = {
    "view_keyed_to_the_wrong_session": (1, 1, "state.stitched_buffer"),
    "attribute_kept_on_the_view": (1, 1, "state.call_count"),
    "ring_one_frame_short": (1, 5, "state.vae_encoder_out"),
    "ring_one_frame_long_that_aliases": (1, 9, "state.vae_encoder_out"),
    "drop_that_forgets": (2, 3, "state.call_count"),
    "reset_that_skips_an_attribute": (2, 3, f"state.prompt_embeds {ENDED}"),
}
"""Mutant of DreamZero's adapter -> session, step and tensor of the first difference."""

OUTPUTS = {
    "view_keyed_to_the_wrong_session": (1, 2, "actions"),
    "attribute_kept_on_the_view": (1, 2, "actions"),
    "ring_one_frame_short": (1, 6, "actions"),
}
"""The same of the first difference of an output; the others change none."""

REFUSED = {"drop_that_forgets": "session 2, step 4 (open the drawer)"}
"""Mutant with which vLLM-Omni fails in the end: the step that is named, too."""

EQUAL_ALL_THE_SAME = {
    "mutants:buffer_setter_shares_the_callers_list": "the model's own path shares it, too",
    "mutants_cosmos3:alias_left_on_the_transformer": "the model's own path leaves it there, too",
}
"""Mutants that only do what the first run does: there is nothing by which one run differs from the other."""

NOT_SERVED = {
    "decode_of_what_is_in_memory_alone": "shows after 64 chunks, with video_latents=spill",
    "assigned_list_in_a_new_buffer": "shows after 64 chunks, with video_latents=spill",
    "one_state_for_one_id": "takes two requests under one id at once; here one follows the other",
    "capture_layer_by_layer": "takes a request that fails midway; here none does",
}
"""Mutants that take more than is sent here, and what; the tests of the adapters catch them."""

TESTS = Path(__file__).parents[1]


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


def start(folder, checkpoint, model, *arguments, stage=None, **environ):
    """Start the command as a user does, with more in the deploy YAML's one stage."""
    file = deploy(folder / "deploy.yaml", checkpoint, model, EXECUTOR)
    if stage is not None:
        written = yaml.safe_load(file.read_text())
        written["stages"][0] |= stage
        file.write_text(yaml.safe_dump(written))
    command = [sys.executable, "-m", "vllm_omni_session_state.cli", "ab", "--deploy-config", str(file)]
    command += ["--model", str(checkpoint), "--out", str(folder / "ab"), *arguments]
    paths = [str(TESTS / "dreamzero"), str(TESTS / "cosmos3"), *(part for part in sys.path if part)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "100", **environ}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


def mutated(mutant):
    """The environment of a served run with a mistake, ``module:name``."""
    from omni_tiny.mutant import VARIABLE

    return {VARIABLE: mutant}


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
    assert re.search(
        r"EQUAL: all 74 outputs of 38 steps and 1,\d\d\d values of session state are equal", said
    )
    assert "WARNING of the plugin" not in said
    assert found["left"] == found["state_unread"] == found["runs"]["on"]["warnings"] == []
    steps = found["runs"]["on"]["steps"]
    counted = [set(step["sessions"]) for step in steps]
    for off, on in zip(found["runs"]["off"]["steps"], steps, strict=True):
        assert off["seconds"] > 0
        assert set(off["sessions"]) == set(on["sessions"]), "both runs have the same sessions"
        for name, held in on["sessions"].items():
            assert sum(held.values()) <= sum(off["sessions"][name].values()), (
                "no copy, and a ring for a history"
            )
    assert counted[2] == {"session 1", "session 2", "session 3"}
    closed = next(number for number, step in enumerate(steps) if step["does"] == "close")
    assert counted[closed] == {"session 1", "session 3"}
    assert counted[-1] == {"session 1", "session 2"}, "the last step closes its session"
    for word in ("off", "on"):
        begins = values(tmp_path / "ab" / word, steps, session=1, name="current_start_frame")
        assert any(later < earlier for earlier, later in pairwise(begins)), "its attention window was full"
        ring = values(tmp_path / "ab" / word, steps, session=1, name="vae_encoder_out")
        assert ring.count(2) > 5, "and it had more frames than are kept"
    assert all(sum(held.values()) > 100_000 for step in steps for held in step["sessions"].values())
    assert all(step["peak_bytes"] > 0 for step in steps if step["does"] not in ("reset", "close"))


def values(folder, steps, *, session, name):
    """A value of a session over its steps before its call for a reset: an int, or frames."""
    found = []
    for number, step in enumerate(steps):
        if step["session"] == session and step["does"] == "reset":
            break
        if step["session"] == session:
            (rank,) = json.loads(state_file(folder, number).read_text())
            what = rank["values"][name][0]
            found.append(int(what.removeprefix("int ") if what.startswith("int") else what.split(", ")[2]))
    return found


@pytest.mark.skipif(not LONG, reason="two served runs, as by the demo: part of the long run")
def test_cosmos3_is_equal_and_nothing_is_left_after_a_request(cosmos3, tmp_path):
    status, said, found = result_of(start(tmp_path, cosmos3, "Cosmos3"), tmp_path)
    assert status == EQUAL, said
    assert "EQUAL: all 12 outputs of 12 steps are equal to the last bit" in said
    assert found["left"] == []
    for word in ("off", "on"):
        assert [step["sessions"] for step in found["runs"][word]["steps"]] == [{}] * 12
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


def test_every_mutant_has_its_place():
    sys.path += [str(TESTS / "dreamzero"), str(TESTS / "cosmos3")]
    import mutants
    import mutants_cosmos3

    placed = {*NAMED, "hook_that_attaches_twice", *NOT_SERVED, *(m.split(":")[1] for m in EQUAL_ALL_THE_SAME)}
    assert placed == {mutant.__name__ for mutant in (*mutants.MUTANTS, *mutants_cosmos3.MUTANTS)}


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="two served runs each: SESSION_STATE_LONG=1")
@pytest.mark.parametrize("mutant", NAMED)
def test_a_mutant_is_named(dreamzero_checkpoint, tmp_path, mutant):
    process = start(tmp_path, dreamzero_checkpoint, "DreamZero", **mutated(f"mutants:{mutant}"))
    status, said, found = result_of(process, tmp_path)
    assert status == (COULD_NOT_RUN if mutant in REFUSED else DIFFERENT), said
    places = [(each["session"], each["step"], each["tensor"]) for each in found["differences"]]
    assert places[0] == NAMED[mutant]
    assert next((place for place in places if not place[2].startswith("state.")), None) == OUTPUTS.get(mutant)
    for session, step, tensor in filter(None, (NAMED[mutant], OUTPUTS.get(mutant))):
        assert re.search(rf"  session {session}, step {step} \(.*\), tensor {tensor}: ", said)
    if mutant in REFUSED:
        assert f"the process with the flag on failed: RuntimeError: {REFUSED[mutant]}" in said


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="two served runs: SESSION_STATE_LONG=1")
def test_a_hook_that_attaches_twice_is_said(dreamzero_checkpoint, tmp_path):
    environ = mutated("mutants:hook_that_attaches_twice")
    status, said, found = result_of(start(tmp_path, dreamzero_checkpoint, "DreamZero", **environ), tmp_path)
    assert status == EQUAL, "the second manager has all sessions"
    (warning,) = found["runs"]["on"]["warnings"]
    assert warning["text"] == "the model was loaded again: 0 sessions of the earlier load are dropped"
    place = "session 1, step 1 (pick up the cup)"
    assert f"WARNING of the plugin with the flag on, heard with {place}: {warning['text']}" in said


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="two served runs each: SESSION_STATE_LONG=1")
@pytest.mark.parametrize("mutant", EQUAL_ALL_THE_SAME)
def test_a_mutant_that_does_as_the_models_own_path_is_equal(dreamzero_checkpoint, cosmos3, tmp_path, mutant):
    model = "Cosmos3" if "cosmos3" in mutant else "DreamZero"
    checkpoint = cosmos3 if model == "Cosmos3" else dreamzero_checkpoint
    status, said, found = result_of(start(tmp_path, checkpoint, model, **mutated(mutant)), tmp_path)
    assert status == EQUAL, said
    assert found["runs"]["on"]["warnings"] == []


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="two served runs: SESSION_STATE_LONG=1")
def test_a_mutant_that_frees_nothing_is_said_as_left_behind(cosmos3, tmp_path):
    process = start(tmp_path, cosmos3, "Cosmos3", **mutated("mutants_cosmos3:drop_that_forgets"))
    status, said, found = result_of(process, tmp_path)
    assert status == EQUAL, "outputs are as they were"
    left = "with the flag on, an ended session was still there after 12 of 12 steps, first session 1, step 1"
    assert f"LEFT BEHIND: {left}" in said
    assert len(found["left"]) == 12


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="two served runs: SESSION_STATE_LONG=1")
def test_with_an_extension_of_the_stages_own_outputs_are_compared_and_that_is_said(cosmos3, tmp_path):
    (tmp_path / "mine.py").write_text("class Extension:\n    def mine(self):\n        return 1\n")
    stage = {"worker_extension_cls": "mine.Extension"}
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *(part for part in sys.path if part)])}
    process = start(tmp_path, cosmos3, "Cosmos3", "--steps", "2", stage=stage, **paths)
    status, said, found = result_of(process, tmp_path)
    assert status == EQUAL, said
    assert found["state_values"] == 0
    assert found["about"]["session_state"] == (
        "not compared: the stage has a worker_extension_cls of its own"
    )

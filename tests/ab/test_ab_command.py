"""The command `ab`, with processes that only pretend to serve: its exit status, its words and its files."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_omni_session_state.ab import command
from vllm_omni_session_state.ab.runs.subprocess import FLAG
from vllm_omni_session_state.ab.workload.dreamzero import Robots
from vllm_omni_session_state.ab.workload.requests import numbered
from vllm_omni_session_state.ab.workload.trace import write_recording
from vllm_omni_session_state.cli.main import main

HERE = Path(__file__).parent


@pytest.fixture
def ab(tmp_path, monkeypatch, capfd):
    """Run the command in a folder with a deploy YAML; its exit status and its words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "CHILD", "fake_child")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "deploy.yaml").write_text("stages: []\n")

    def ab(*arguments, fake=""):
        monkeypatch.setenv("AB_FAKE", fake)
        capfd.readouterr()
        status = main(["ab", "--deploy-config", "deploy.yaml", *arguments])
        out, err = capfd.readouterr()
        return status, out, err

    return ab


def test_an_equal_run_exits_with_0_and_leaves_its_report(ab, tmp_path, monkeypatch):
    monkeypatch.setenv(f"{FLAG}_MAX_SESSIONS", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv(f"{FLAG}_ID_KEY", "a secret")
    status, out, err = ab("--out", "x", "--sessions", "1", "--steps", "3")
    assert (status, err) == (0, "")
    assert "EQUAL: all 5 outputs of 5 steps" in out
    found = json.loads((tmp_path / "x/ab.json").read_text())
    assert found["status"] == 0
    assert found["about"]["environment"][f"{FLAG}_MAX_SESSIONS"] == "3"
    assert "a secret" not in (tmp_path / "x/ab.json").read_text() + (tmp_path / "x/ab.html").read_text()
    assert (tmp_path / "x/off.log").read_text() == "noise of vLLM-Omni 0 2 2 2 3\n", "all else is as it was"
    assert (tmp_path / "x/on.log").read_text() == "noise of vLLM-Omni 1 2 2 2 3\n"
    assert all(sign.isprintable() or sign == "\n" for sign in out)
    assert re.search(r"  0:00:\d\d  flag on: serving \(about 0:\d\d:\d\d left\)", out)


def test_without_a_folder_it_makes_a_new_one_here(ab, tmp_path):
    assert ab()[0] == 0
    (folder,) = tmp_path.glob("session-state-ab-*")
    assert (folder / "ab.html").is_file()


def test_a_difference_exits_with_1_and_is_named(ab):
    status, out, _ = ab("--out", "x", fake="on differs")
    assert status == 1
    assert "DIFFERENT: 4 of 6 outputs of 6 steps. The first:\n  session " in out
    assert "tensor actions: 3 of 3 elements of F32 (3) differ, by at most 1, the first at [0]" in out


def test_what_the_plugin_warned_of_is_said_and_is_no_difference(ab, tmp_path):
    status, out, _ = ab("--out", "x", fake="on warns")
    assert status == 0
    found = json.loads((tmp_path / "x/ab.json").read_text())
    ask = found["runs"]["on"]["steps"][2]
    place = f"session {ask['session']}, step {ask['step']} ({ask['does']})"
    assert f"WARNING of the plugin with the flag on, the first of 2, heard with {place}: careful" in out
    assert [warning["text"] for warning in found["runs"]["on"]["warnings"]] == ["careful", "again"]
    assert "careful" in (tmp_path / "x/ab.html").read_text()


@pytest.mark.parametrize(
    ("fake", "said"),
    [
        ("on dies", "the process with the flag on failed: its process ended early with signal SIGKILL"),
        ("on fails", "the process with the flag on failed: RuntimeError: session 1, step 2 was refused"),
        ("off dies", "the process with the flag off failed: its process ended early with signal SIGKILL"),
        ("on other", "the process with the flag on failed: it was to send something else than the first"),
    ],
)
def test_a_run_that_dies_exits_with_2_names_its_process_and_log_and_keeps_the_rest(ab, tmp_path, fake, said):
    status, out, _ = ab("--out", "x", fake=fake)
    assert status == 2
    who, what = fake.split()
    assert f"COULD NOT RUN: {said}" in out
    assert f"its log: x/{who}.log" in out
    found = json.loads((tmp_path / "x/ab.json").read_text())
    answered = {word: len(found["runs"][word]["steps"]) for word in ("off", "on")}
    came = 0 if what == "other" else 2
    assert answered == ({"off": 6, "on": came} if who == "on" else {"off": 2, "on": 0})
    assert found["compared"] == (came if who == "on" else 0)
    assert len(list((tmp_path / "x/off").iterdir())) == answered["off"]
    assert said in (tmp_path / "x/ab.html").read_text()
    assert f"The run with the flag off answered {answered['off']} of" in out


def test_what_was_recorded_is_replayed(ab, tmp_path):
    assert ab("--out", "x", "--record", "sent", "--sessions", "2", "--steps", "3")[0] == 0
    status, out, _ = ab("--out", "y", "--replay", "sent")
    assert status == 0
    assert "EQUAL: all 8 outputs of 8 steps" in out
    first, second = (json.loads((tmp_path / name / "ab.json").read_text()) for name in "xy")
    assert (first["about"]["recorded"], second["about"]["replayed"]) == ("sent", "sent")
    places = [
        [(step["session"], step["does"]) for step in each["runs"]["on"]["steps"]] for each in (first, second)
    ]
    assert places[0] == places[1]


def test_a_report_that_cannot_be_written_is_said_after_the_verdict(ab, tmp_path, monkeypatch):
    def page(result):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "page", page)
    status, out, _ = ab("--out", "x", fake="on differs")
    assert status == 2
    assert "COULD NOT RUN: the report cannot be written: [Errno 28] No space left on device" in out
    assert "DIFFERENT: 4 of 6 outputs of 6 steps. The first:" in out
    assert "There is no report: [Errno 28] No space left on device" in out
    status, out, _ = ab("--out", "y", fake="off dies")
    assert "COULD NOT RUN: the process with the flag off failed: its process ended early" in out


def test_a_strangers_prompt_moves_no_cursor(ab, tmp_path):
    sent = Robots(sessions=1, steps=3)
    prompt = "\x1b[31mred\x07\nEQUAL: all is fine [bold]<b>\u202e"
    sent.asks = numbered([(1, "step", {"prompt": prompt, "seed": n}) for n in range(4)])
    write_recording(tmp_path / "sent", sent)
    status, out, _ = ab("--out", "x", "--replay", "sent", fake="on differs")
    assert status == 1
    assert all(sign.isprintable() or sign == "\n" for sign in out)
    assert not [line for line in out.splitlines() if line.startswith("EQUAL")]
    assert "(\\x1b[31mred\\x07\\nEQUAL: all is fine [bold]<b>\\u202e)" in out
    text = (tmp_path / "x/ab.html").read_text()
    assert all(sign.isprintable() or sign == "\n" for sign in text)
    assert json.loads((tmp_path / "x/ab.json").read_text())["runs"]["on"]["steps"][0]["does"] == prompt


def started(tmp_path, *arguments, fake=""):
    """The command in a process of its own."""
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys\n"
        "from vllm_omni_session_state.ab import command\n"
        "from vllm_omni_session_state.cli.main import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where tests run behind a shell
        "command.CHILD = 'fake_child'\n"
        "sys.exit(main(['ab', '--deploy-config', __file__, '--out', *sys.argv[1:]]))\n"
    )
    path = os.pathsep.join([str(HERE), *(part for part in sys.path if part)])
    environment = {**os.environ, "PYTHONPATH": path, "AB_FAKE": fake}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "x"), *arguments], env=environment, **pipes
    )


def test_when_nobody_reads_any_more_the_report_is_written_all_the_same(tmp_path):
    process = started(tmp_path, fake="on differs")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 1
    assert process.stderr.read() == ""
    process.stderr.close()
    assert json.loads((tmp_path / "x/ab.json").read_text())["verdict"] == "different"


def until(condition):
    """Wait until it holds."""
    while not condition():
        time.sleep(0.02)


def child_of(pid):
    """The pid of a process's only child."""
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True
    )
    (child,) = found.stdout.split()
    return int(child)


def alive(pid):
    """Whether it is there, and not dead with nobody to collect it."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.strip()[:1] not in ("", "Z")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_leaves_no_process_and_what_came_until_then(tmp_path, number):
    process = started(tmp_path, fake="on sleeps")
    until((tmp_path / "x/on/000001.safetensors").exists)
    child = child_of(process.pid)
    process.send_signal(number)
    out, err = process.communicate()
    assert (process.returncode, err) == (2, "")
    assert "COULD NOT RUN: it was stopped" in out
    assert ("by SIGTERM" in out) == (number == signal.SIGTERM)
    assert "As far as both came, all 2 outputs of 2 steps are equal." in out
    assert not alive(child)
    assert json.loads((tmp_path / "x/ab.json").read_text())["compared"] == 2


def test_when_the_command_is_killed_its_process_ends_at_once(tmp_path):
    process = started(tmp_path, fake="off sleeps")
    until((tmp_path / "x/off/000001.safetensors").exists)
    child = child_of(process.pid)
    process.kill()
    process.communicate()
    until(lambda: not alive(child))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--deploy-config", "none.yaml"], "there is no deploy YAML none.yaml"),
        (["--model", "./none"], "there is no checkpoint folder ./none"),
        (["--steps", "0"], "--steps 0 is not one of 1 to 1000"),
        (["--steps", "1001"], "--steps 1001 is not one of 1 to 1000"),
        (["--sessions", "65"], "--sessions 65 is not one of 1 to 64"),
        (["--sessions", "-1"], "--sessions -1 is not one of 1 to 64"),
        (["--replay", "none"], "--replay: No such file or directory: none"),
        (["--replay", "deploy.yaml"], "--replay: deploy.yaml: it is no whole safetensors file"),
        (["--replay", "sent", "--steps", "3"], "--steps and --sessions have no place beside --replay"),
        (["--record", "deploy.yaml"], "--record deploy.yaml is there already: name a new file"),
        (["--record", "no/where"], "--record no/where is in a folder that is not there"),
        (["--out", "full"], "--out full is there and is not an empty folder"),
        (["--out", "deploy.yaml"], "--out deploy.yaml is there and is not an empty folder"),
        (["--out", "deploy.yaml/x"], "--out deploy.yaml/x: "),
    ],
)
def test_what_cannot_be_done_is_one_line_and_2_and_starts_nothing(ab, tmp_path, arguments, said):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    status, out, err = ab(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"vllm-omni-session-state: {said}")
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_record_and_replay_exclude_each_other(ab, capfd):
    with pytest.raises(SystemExit) as exit_:
        ab("--record", "a", "--replay", "b")
    assert exit_.value.code == 2
    assert "not allowed with argument" in capfd.readouterr().err


def test_this_process_needs_neither_the_host_nor_torch_where_all_is_equal(tmp_path):
    script = (
        "import sys\n"
        "from vllm_omni_session_state.ab import command\n"
        "from vllm_omni_session_state.cli.main import main\n"
        "command.CHILD = 'fake_child'\n"
        "status = main(['ab', '--deploy-config', __file__, '--out', sys.argv[1]])\n"
        "assert not {'torch', 'vllm', 'vllm_omni'} & set(sys.modules), sorted(sys.modules)\n"
        "sys.exit(status)\n"
    )
    file = tmp_path / "script.py"
    file.write_text(script)
    path = os.pathsep.join([str(HERE), *(part for part in sys.path if part)])
    command = [sys.executable, str(file), str(tmp_path / "x")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

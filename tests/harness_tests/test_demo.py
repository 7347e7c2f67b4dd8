"""The demo: its scenarios do what they say, it sees every difference, and it claims only what it saw.

`make demo` runs all of it; what is here needs no second of a served model but for the scenarios themselves.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import re
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omni_tiny import request_watch
from omni_tiny.demo import __main__ as command
from omni_tiny.demo import child, tables, verdict
from omni_tiny.demo.face import say_equality
from omni_tiny.demo.scenarios import REQUESTS, ROBOTS, SCENARIOS, cosmos3, dreamzero
from omni_tiny.demo.tables import bytes_table, show_requests, show_sessions
from omni_tiny.demo.verdict import Served, check_runs, differences, left_behind
from omni_tiny.digest import digest
from rich.console import Console

from vllm_omni_session_state.ab.runs import subprocess
from vllm_omni_session_state.ab.runs.progress import ProgressView
from vllm_omni_session_state.ab.runs.subprocess import CouldNotRunError

OURS = "vllm_omni_session_state.manager.manager.SessionStateManager"


@pytest.mark.host
def test_the_robots_reset_their_window_their_prompt_and_on_request(dreamzero_checkpoint, monkeypatch):
    from omni_tiny.inproc import TinyDreamZero
    from vllm_omni.diffusion.models.dreamzero.state_dreamzero import DreamZeroState

    reasons = []
    host = DreamZeroState.reset_reason

    def reset_reason(self, *args, **kwargs):
        reasons.append(host(self, *args, **kwargs))
        return reasons[-1]

    monkeypatch.setattr(DreamZeroState, "reset_reason", reset_reason)
    with TinyDreamZero(dreamzero_checkpoint, flag=False) as model:
        answers = [dict(op.run(model)) for op in dreamzero().operations if not op.look]
        left = {name for name in model.pipeline._states if name in ROBOTS}
    assert reasons.count("inference") >= len(ROBOTS), "no window was filled"
    assert reasons.count("session") == len(ROBOTS) + 1 + 2, "a beginning each, a change of prompt, two resets"
    assert all(answer["answer"] is True for answer in answers if "answer" in answer)
    assert left == {ROBOTS[2]}


class WatchedCosmos3:
    """What `OmniCosmos3` offers, on a model in this process."""

    def __init__(self, model):
        self._model, self._worker = model, SimpleNamespace(model_runner=model.runner)
        request_watch.tiny_watch(self._worker)

    def generate(self, **words):
        (seen,) = self._model.generate("a request", **words).values()
        return seen

    def forwards(self):
        return request_watch.tiny_forwards(self._worker)

    def held(self):
        return request_watch.tiny_held(self._worker)


def serve_here(model):
    served = Served()
    scenario = dataclasses.replace(cosmos3(), open=lambda _: contextlib.nullcontext(WatchedCosmos3(model)))
    child.serve(scenario, None, lambda **event: served.take(event))
    return served


@pytest.mark.host
def test_cosmos3s_requests_hold_each_branch_while_they_run_and_a_byte_that_stays_is_seen(tmp_path):
    from omni_tiny.checkpoint.cosmos3 import write_cosmos3
    from omni_tiny.cosmos3 import TinyCosmos3

    checkpoint = write_cosmos3(tmp_path / "cosmos3")
    with TinyCosmos3(checkpoint, flag=False, dtype="bfloat16") as model:
        off = serve_here(model)
    with TinyCosmos3(checkpoint, flag=True, dtype="bfloat16") as model:
        on = serve_here(model)
        model.pipeline.transformer.reset_cache = lambda: None
        leaking = serve_here(model)
    assert differences(off, on) == []
    assert len(on.outputs) == len(REQUESTS) + 3 * (6 + 3), "a clip each, and each forward of three steps"
    assert len(set(on.outputs.values())) == len(on.outputs), "something was computed twice"
    assert left_behind(on) == []
    assert left_behind(leaking) == list(REQUESTS)
    for look, without in zip(on.looks, off.looks, strict=True):
        (session,) = look["during"]
        assert sum(session["nbytes"].values()) == look["during_alive"] == without["during_alive"] > 0
        branches = tables.BRANCHES if "CFG" in look["of"] else tables.BRANCHES[:1]
        assert {value["name"] for value in session["values"] if value["nbytes"]} == set(branches)
        assert (look["sessions"], look["alive"]) == ([], 0)
        assert without["alive"] > 0, "without the plugin the last branch stays"
        assert look["manager"] == OURS
        assert without["manager"] is None


def a_watched_run(manager=None, **digests):
    run = a_run(manager, **digests)
    names = [{"name": name, "bucket": "object", "nbytes": {"cpu": 54_321}} for name in tables.BRANCHES]
    during = [{"session": "s", "nbytes": {"cpu": 108_642}, "values": names}] if manager else []
    more = {"sessions": [], "during": during, "during_alive": 108_642, "alive": 0 if manager else 54_321}
    run.looks = [{**run.looks[0], **more, "of": name} for name in REQUESTS]
    return run


def a_run(manager=None, **digests):
    entries = [
        {
            "session": name,
            "nbytes": {"cpu": 24},
            "values": [
                {"name": "ys", "bucket": "attrs", "nbytes": {"cpu": 24}},
                {"name": "call_count", "bucket": "attrs", "nbytes": {}},
            ],
        }
        for name in ("robot-1", "robot-2")
    ]
    look = {"pid": 2, "from": 1, "of": "a look", "manager": manager, "sessions": entries}
    return Served(outputs=digests, looks=[look, {**look, "sessions": entries[:1]}])


def test_a_changed_a_missing_and_an_extra_output_are_each_a_difference():
    off, on = a_run(a="1", b="2", c="3"), a_run(a="1", b="0", d="4")
    assert differences(off, on) == ["b", "c", "d"]
    assert differences(off, copy.deepcopy(off)) == []


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(2)),
        (np.zeros(2), np.zeros((1, 2))),
        (np.zeros(1, np.float32), np.zeros(1, np.int32)),
        (True, False),
        (1, True),
    ],
)
def test_a_digest_tells_every_bit_shape_and_kind_apart(value, other):
    assert digest(value) == digest(copy.deepcopy(value))
    assert digest(value) != digest(other)


def test_two_runs_that_may_not_be_compared_are_no_result():
    check_runs(a_run(a="1"), a_run(OURS, a="1"))
    host = "vllm_omni.experimental.world_models.session_state.manager.SessionStateManager"
    in_process = a_run(OURS, a="1")
    in_process.looks[0]["from"] = in_process.looks[0]["pid"]
    check_runs(a_watched_run(a="1"), a_watched_run(OURS, a="1"))
    elsewhere = a_watched_run(OURS, a="1")
    elsewhere.looks[1]["during"] = []
    for off, on, said in [
        (a_run(a="1"), a_run(host, a="1"), "not the plugin's"),
        (a_run(a="1"), a_run(None, a="1"), "not the plugin's"),
        (a_run(OURS, a="1"), a_run(OURS, a="1"), "still used a manager"),
        (a_run(), a_run(OURS), "without outputs"),
        (a_run(a="1"), Served(outputs={"a": "1"}), "without a listing"),
        (a_run(a="1"), in_process, "own process"),
        (a_watched_run(a="1"), elsewhere, "held nothing while the model served: T2V$"),
    ]:
        with pytest.raises(CouldNotRunError, match=said):
            check_runs(off, on)


def printed(show, *args, **kwargs):
    text = io.StringIO()
    show(Console(file=text, width=80, highlight=False), *args, **kwargs)
    return text.getvalue()


def test_the_face_says_which_outputs_differ():
    assert "IDENTICAL: all 2" in printed(say_equality, dreamzero(), total=2, different=[])
    said = printed(say_equality, dreamzero(), total=20, different=[f"output {n}" for n in range(12)])
    assert "DIFFERENT: 12 of 20" in said
    assert "output 9\n" in said
    assert "and 2 more" in said
    assert "IDENTICAL" not in said


def test_the_table_has_every_byte_and_without_a_terminal_no_control_characters():
    said = printed(show_sessions, a_run(a="1"), a_run(OURS, a="1"))
    assert said.count("24") >= 4
    assert "close of robot-2 its 24 bytes" in said
    assert OURS in said
    assert all(sign.isprintable() or sign == "\n" for sign in said)
    two = a_run().looks[0]["sessions"]
    two[0]["values"][0]["nbytes"] = {"cpu": 8, "cuda:0": 16}
    assert bytes_table(two).row_count == 2 + 1 + 1


def test_the_table_of_requests_fits_a_terminal_and_claims_only_what_was_counted():
    off, on = a_watched_run(a="1"), a_watched_run(OURS, a="1")
    said = printed(show_requests, off, on)
    assert said.count("54,321") == 3 * len(REQUESTS)
    assert said.count("108,642") == len(REQUESTS)
    assert "\N{HORIZONTAL ELLIPSIS}" not in said
    assert "also what memory held" in said
    assert OURS in said
    on.looks[2]["during_alive"] += 1
    assert "also what memory held" not in printed(show_requests, off, on)


@pytest.mark.parametrize(
    ("happens", "status", "says"),
    [
        ("nothing", 0, "IDENTICAL"),
        ("a difference", 1, "DIFFERENT: 1 of 1"),
        ("a leak", 1, "LEFT BEHIND: with the flag on, state was there after: I2V\n"),
        ("vLLM-Omni's manager", 2, "COULD NOT RUN: Cosmos3: with"),
        ("a crash", 2, "COULD NOT RUN: it died"),
    ],
)
def test_the_exit_status_is_that_of_the_worst_model(monkeypatch, tmp_path, happens, status, says):
    def run_job(words, *, environment, log):
        job, *names, _ = words[3:]
        assert words[2] == "omni_tiny.demo.child"
        if job == "write":
            assert names == list(SCENARIOS)
            return
        (name,) = names
        manager = OURS if environment[subprocess.FLAG] == "1" else None
        if manager and name == "cosmos3" and happens == "a crash":
            raise CouldNotRunError("it died")
        run = (a_watched_run if name == "cosmos3" else a_run)(manager, a="1")
        if manager and name == "cosmos3":
            if happens == "a difference":
                run.outputs["a"] = "2"
            if happens == "a leak":
                run.looks[-1]["alive"] = 1
            if happens == "vLLM-Omni's manager":
                run.looks[-1]["manager"] = "vllm_omni.SessionStateManager"
        yield from ({"phase": phase} for phase in (child.LOADING, child.SERVING))
        yield {"outputs": run.outputs, "done": 1}
        yield from ({"look": look} for look in run.looks)
        yield {"phase": child.STOPPING}

    monkeypatch.setattr(command, "run_job", run_job)
    monkeypatch.setattr(command.tempfile, "tempdir", str(tmp_path))  # a log is kept where a run failed
    text = io.StringIO()
    assert command.demo(list(SCENARIOS), Console(file=text, width=80, highlight=False)) == status
    assert says in text.getvalue()
    assert status == 2 or max(map(len, text.getvalue().splitlines())) <= 80


def test_the_bar_fits_a_terminal_in_every_phase():
    text = io.StringIO()
    console = Console(file=text, width=80, force_terminal=True, color_system=None)
    phases = command.phases(scenario() for scenario in SCENARIOS.values())
    with ProgressView(console, phases).shown() as watch:
        for _ in phases:
            watch.begin()
            watch.reached(0.5)
        watch.finish()
    assert "0:00:00 gone" in text.getvalue()
    assert max(map(len, re.split("[\r\n]|\x1b\\[[0-9?]*[A-Za-z]", text.getvalue()))) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in text.getvalue()


def test_the_bar_never_goes_back_and_what_is_left_follows_the_pace(monkeypatch):
    now = 0.0
    view = ProgressView(Console(file=io.StringIO()), {"a": 10, "b": 20, "c": 10})
    monkeypatch.setattr(view._progress, "get_time", lambda: now)
    monkeypatch.setattr(view.task, "_get_time", lambda: now)
    view.task.start_time = 0.0
    done = []

    def at(seconds, act, *args):
        nonlocal now
        now = float(seconds)
        act(*args)
        done.append(view.task.completed)

    at(0, view.begin)
    assert view.task.remaining == 40
    for seconds in range(1, 20):
        at(seconds, view.tick)
    assert (done[5], done[-1]) == (5, 9.5), "as long as it should take, and then it waits"
    at(20, view.begin)
    assert view.task.completed == 10
    assert view.task.time_remaining == pytest.approx(60, abs=5)  # twice as slow as expected
    at(24, view.tick)
    assert view.task.completed == pytest.approx(12, abs=0.2)
    at(25, view.reached, 0.01)
    at(29, view.tick)
    at(30, view.reached, 0.5)
    assert view.task.completed == 20
    at(40, view.begin)
    at(41, view.finish)
    assert (done, done[-1]) == (sorted(done), 40)


def job(tmp_path, body):
    """Run a child that does no more than the body; `say` writes an event."""
    script = tmp_path / "child.py"
    script.write_text(
        "import json, os, sys, time\n"
        "def say(**event): os.write(int(sys.argv[-1]), (json.dumps(event) + '\\n').encode())\n"
        + textwrap.dedent(body)
    )
    log = tmp_path / "log"
    environment = command.environment(flag=True)
    events = [
        e for e in subprocess.run_job([sys.executable, str(script)], environment=environment, log=log) if e
    ]
    return events, log.read_text()


def test_a_job_reports_its_events_and_only_its_log_has_the_noise(monkeypatch, tmp_path):
    monkeypatch.setenv(subprocess.FLAG + "_MAX_SESSIONS", "3")
    body = f"""
        print(sorted(name for name in os.environ if name.startswith('{subprocess.FLAG}')))
        say(done=1)
        say(end=True, error='')
    """
    events, log = job(tmp_path, body)
    assert events == [{"done": 1}, {"end": True, "error": ""}]
    assert log == f"['{subprocess.FLAG}']\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("say(done=1); say(end=True, error='ValueError: so')", "ValueError: so"),
        ("say(done=1); sys.exit(3)", "exit status 3"),
        (
            "import subprocess; subprocess.Popen(['sleep', '60'], close_fds=False); os._exit(4)",
            "exit status 4",
        ),
        ("os.kill(os.getpid(), 9)", "signal SIGKILL"),
        ("time.sleep(60)", "reported nothing"),
    ],
)
def test_a_job_that_fails_dies_or_hangs_is_no_result(monkeypatch, tmp_path, body, said):
    monkeypatch.setattr(subprocess, "SILENCE_S", 2.0)
    with pytest.raises(CouldNotRunError, match=said):
        job(tmp_path, body)


def test_the_demo_calls_the_plugins_things_by_their_names():
    from vllm_omni_session_state import SessionStateManager
    from vllm_omni_session_state.adapters.cosmos3 import BRANCHES

    assert tables.BRANCHES == BRANCHES
    assert f"{SessionStateManager.__module__}.".startswith(verdict.OURS)

"""What `benchmarks.live_sessions` prints, and that it fails when an output is wrong; never how fast it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from profiles import LONG

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.host

SPOILED = """
import sys
from benchmarks import live_sessions
from vllm_omni_session_state.omni.worker import engine_kv as kv

exact = kv.put_back

def spoiled(state, tree):
    for values in tree["values"]:
        values.neg_()
    exact(state, tree)

kv.put_back = spoiled
sys.exit(live_sessions.main(["--sessions", "2", "--steps", "3", "--room", "1"]))
"""


def run(*arguments, status):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr[-4000:]
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not LONG, reason="five sessions, three times over: part of the long run")
def test_the_last_line_counts_the_outputs_and_those_that_are_wrong_with_the_plugin_and_without():
    printed, last = run("-m", "benchmarks.live_sessions", "--quick", status=0)
    assert [last[name] for name in ("sessions", "room", "steps", "outputs", "wrong")] == [5, 3, 3, 15, 0]
    assert 0 < last["wrong_without_plugin"] < 15
    assert last["machine"]["threads"] == 1
    for name in ("parked_mib", "step_ms", "step_without_plugin_ms", "step_alone_ms"):
        low, high = last["quartiles"][name]
        assert low <= last[name] <= high
    assert "5 live sessions, room for 3: 3 steps each" in printed


@pytest.mark.skipif(not LONG, reason="a benchmark from end to end: part of the long run")
def test_wrong_outputs_are_counted_and_are_the_exit_status():
    """Of sessions whose KV comes back with another sign."""
    _, last = run("-c", SPOILED, status=1)
    assert 0 < last["wrong"] < last["outputs"] == 6

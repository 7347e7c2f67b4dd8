"""What `benchmarks.live_sessions` prints, and that it fails when an output is wrong; never how fast it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

pytestmark = pytest.mark.host


def test_the_last_line_counts_the_outputs_and_those_that_are_wrong_with_the_plugin_and_without():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.live_sessions", "--quick"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    last = json.loads(done.stdout.splitlines()[-1])
    assert [last[name] for name in ("sessions", "room", "steps", "outputs", "wrong")] == [5, 3, 3, 15, 0]
    assert 0 < last["wrong_without_plugin"] < 15
    assert last["machine"]["threads"] == 1
    for name in ("parked_mib", "step_ms", "step_without_plugin_ms", "step_alone_ms"):
        low, high = last["quartiles"][name]
        assert low <= last[name] <= high
    assert "5 live sessions, room for 3: 3 steps each" in done.stdout


def test_a_wrong_output_is_counted_and_is_the_exit_status(monkeypatch, capsys):
    """Of a KV that comes back with another sign: in process, for it must be spoiled."""
    from benchmarks import live_sessions
    from vllm_omni_session_state.omni import kv

    def spoiled(state, tree):
        for values in tree["values"]:
            values.neg_()
        exact(state, tree)

    exact = kv.put_back
    monkeypatch.setattr(kv, "put_back", spoiled)
    assert live_sessions.main(["--sessions", "2", "--steps", "3", "--room", "1"]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["wrong"] > 0

"""What `benchmarks.scrape` prints, and that it measures writings that were made; never how fast it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from profiles import LONG

from benchmarks import scrape
from vllm_omni_session_state.omni.stats_file import place
from vllm_omni_session_state.omni.worker import publisher

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.host


def test_each_begin_and_end_of_a_lease_and_each_move_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(place, "BASE", str(tmp_path))
    found = scrape._writing(20)
    assert {name: len(took) for name, took in found.items()} == {
        "write_us_20": 6000,
        "move_write_us_20": 600,
    }
    assert all(min(took) > 0 for took in found.values())


def test_a_worker_that_writes_nothing_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(place, "BASE", str(tmp_path))
    monkeypatch.setattr(publisher.Publisher, "_write", lambda *_, **__: None)
    with pytest.raises(Exception, match=r"it has written nothing|header does not fit"):
        scrape._writing(20)


@pytest.mark.skipif(not LONG, reason="starts an engine with two workers: part of the long run")
def test_the_last_line_has_the_ratio_and_what_a_writing_takes():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scrape", "--quick"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["pairs"], last["steps"], last["asked"], last["listed"]) == (1, 8, False, 4)
    for name in ("throughput_scraped_over_quiet", "quiet_steps_per_s", "look_ms", "write_us_1000"):
        low, high = last["quartiles"][name]
        assert 0 < low <= last[name] <= high
    assert last["machine"]["cores"] > 0

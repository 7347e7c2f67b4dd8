"""What `benchmarks.accounting` and `benchmarks.in_tree_faults` print; never how fast anything is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from profiles import LONG

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.plugin_clock import PluginClock
from vllm_omni_session_state import SessionStateManager

pytestmark = pytest.mark.host

WANTED = {
    "stats_speedup_64",
    "stats_1024_over_1",
    "settle_us",
    "settle_over_intree_walk",
    "settle_10000_over_1",
    "books_share_of_step",
    "books_share_of_shortest_step",
}


def run(module, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.skipif(not LONG, reason="a benchmark from end to end: part of the long run")
def test_accounting_shows_every_figure_with_what_is_wanted_of_it():
    printed = run("benchmarks.accounting", "--quick")
    last = json.loads(printed.splitlines()[-1])
    assert set(last) >= WANTED | {"quartiles", "machine", "counts"}
    for name in last["quartiles"]:
        low, high = last["quartiles"][name]
        assert 0 < low <= last[name] <= high
        assert name in printed
    assert last["machine"]["threads"] == 1
    assert last["counts"] == {"sessions": 64, "values": 30, "rounds": 2, "steps": 8}


@pytest.mark.skipif(not LONG, reason="faults of the in-tree manager: part of the long run")
def test_every_in_tree_fault_stands_beside_ours():
    printed = run("benchmarks.in_tree_faults")
    last = json.loads(printed.splitlines()[-1])
    assert last["ours_wrong"] == 0
    assert last["in_tree_wrong"] == len(last["rows"]) > 10
    assert "RecursionError" in printed
    assert all(row["row"] in printed for row in last["rows"])


def test_the_plugins_clock_counts_nested_calls_once_and_leaves_no_trace():
    before = dict(vars(SessionStateManager))
    manager = SessionStateManager()
    with PluginClock() as clock:
        with manager.lease("a") as session:
            under_way = clock.ns
            session.attrs["x"] = sum(range(1_000_000))
            assert clock.ns == under_way > 0, "what runs under a lease is the model's"
        assert clock.ns > under_way
    assert dict(vars(SessionStateManager)) == before

"""What `benchmarks.state_ops` prints and measures with; never how fast anything is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.measure import LapClock, Spread, last_line, orders

FIGURES = {"encoder_over_bespoke", "all_over_intree", "with_books_over_intree", "host_only_share"}


@pytest.fixture(scope="module")
def printed():
    command = [sys.executable, "-m", "benchmarks.state_ops", "--quick"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.host
def test_the_last_line_is_one_object_of_every_figure_and_where_it_was_measured(printed):
    last = json.loads(printed.splitlines()[-1])
    assert set(last) == FIGURES | {"quartiles", "machine", "session"}
    assert set(last["quartiles"]) == FIGURES
    for name in FIGURES:
        low, high = last["quartiles"][name]
        assert 0 < low <= last[name] <= high < 1000
    assert last["machine"]["threads"] == 1
    assert set(last["machine"]) == {"cpu", "cores", "threads", "system", "python", "torch", "vllm_omni"}
    assert (last["session"]["steps"], last["session"]["pairs"]) == (12, 2)


@pytest.mark.host
def test_people_are_shown_threads_shapes_and_every_operation(printed):
    for shown in (
        "12 steps, 2 pairs, 1 thread",
        "1x352x640x3 uint8",
        "24 tensors, 603.3 MiB",
        "accumulate_frames",
    ):
        assert shown in printed


@pytest.mark.host
def test_a_session_that_read_something_else_wins_nothing():
    import torch

    from benchmarks.dreamzero_session import Session, bespoke, in_tree, keep_window, make_inputs, ours
    from benchmarks.state_ops import check_equal

    inputs = make_inputs(steps=10)
    sessions = {
        "bespoke": Session(bespoke, inputs),
        "ours": Session(ours, inputs),
        "in-tree": Session(in_tree, inputs),
        "host only": Session(bespoke, inputs, tidy=keep_window),
    }
    with torch.no_grad():
        for _ in range(10):
            for session in sessions.values():
                session.step()
    check_equal(sessions)
    assert sessions["bespoke"].windows == 2, "the session never came to a window's end"
    sessions["ours"].read = sessions["ours"].read + 1
    with pytest.raises(AssertionError, match="ours did not do what bespoke did"):
        check_equal(sessions)


def test_the_clock_gives_every_moment_to_the_lap_that_ends_it():
    clock = LapClock(("a", "b"))
    clock.start()
    sum(range(200_000))
    clock.lap("a")
    clock.lap("b")
    assert clock.ns["a"] > clock.ns["b"] >= 0
    assert clock.total() == clock.total(("a",)) + clock.total(("b",))


def test_each_contender_runs_equally_often_first_and_after_each_other():
    turns = [order for order, _ in zip(orders("abc"), range(12), strict=False)]
    assert [sum(order[0] == name for order in turns) for name in "abc"] == [4, 4, 4]
    after = [order[i : i + 2] for order in turns for i in range(2)]
    assert {pair: after.count(pair) for pair in after} == {(a, b): 4 for a in "abc" for b in "abc" if a != b}


def test_a_spread_is_the_median_and_the_quartiles():
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_the_last_line_takes_records_and_plain_values():
    line = last_line({"x": Spread(1.0, 0.5, 2.0)}, record=Spread(1, 2, 3), plain={"steps": 4})
    assert json.loads(line) == {
        "x": 1.0,
        "quartiles": {"x": [0.5, 2.0]},
        "record": {"median": 1, "low": 2, "high": 3},
        "plain": {"steps": 4},
    }

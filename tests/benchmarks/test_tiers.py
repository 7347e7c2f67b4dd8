"""What `benchmarks.tiers` prints, and that it moves what it says; never how fast anything is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from rich.console import Console

from benchmarks import tiers
from benchmarks.measure import turns

FIGURES = {
    "host_over_memcpy",
    "host_over_memcpy_cpu",
    "park_and_restore_ms",
    "memcpy_ms",
    "idle_lease_us",
    "held_lease_us",
}
SHAPES = [(4, 8), (2, 16)]


@pytest.mark.host
def test_the_last_line_is_one_object_of_every_figure_and_people_see_the_same():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tiers", "--quick"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    last = json.loads(done.stdout.splitlines()[-1])
    assert set(last) == FIGURES | {"quartiles", "machine", "session"}
    assert set(last["quartiles"]) == FIGURES
    for name in FIGURES:
        low, high = last["quartiles"][name]
        assert 0 < low <= last[name] <= high
        assert name in done.stdout
    assert last["machine"]["threads"] == 1
    assert last["session"] == {"tensors": 24, "mib": 0.1, "rounds": 2}
    assert "1x6x1x22x40 bfloat16" in done.stdout


def test_the_full_session_is_603_mib_in_24_tensors():
    shapes = tiers.feature_map_shapes()
    assert len(shapes) == 24
    assert round(tiers._mib(shapes)) == 603


def test_every_round_trip_brings_the_session_back_and_parks_it():
    ours = tiers.Ours(SHAPES)
    assert (ours.trips(), ours.manager.peek("bench").parked) == (0, True)
    for trips in (1, 2):
        ours.round_trip()
        assert (ours.trips(), ours.manager.peek("bench").parked) == (trips, True)
    limit = tiers.Limit(SHAPES)
    limit.round_trip()
    assert ours.holds(limit.tensors)
    limit.tensors[1].zero_()
    assert not ours.holds(limit.tensors)


def test_a_contender_that_does_not_move_its_session_wins_nothing(monkeypatch):
    monkeypatch.setattr(tiers.Ours, "round_trip", lambda self: None)
    with pytest.raises(AssertionError, match="a round did not move the session"):
        tiers.moves(SHAPES, rounds=2, aside=Console(quiet=True))


def test_every_turn_is_said_where_there_is_no_terminal(capsys):
    assert list(turns(2, what="pair", aside=Console())) == [0, 1]
    assert capsys.readouterr().out.splitlines() == [
        "pair 1 of 2, about 0 s left",
        "pair 2 of 2, about 0 s left",
    ]

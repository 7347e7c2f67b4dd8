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

from benchmarks import disk_moves, tiers
from benchmarks.feature_map import filled, same_bits
from benchmarks.measure import turns
from vllm_omni_session_state.base.errors import BadFileError

FIGURES = {
    "host_over_memcpy",
    "host_over_memcpy_cpu",
    "park_and_restore_ms",
    "memcpy_ms",
    "idle_lease_us",
    "held_lease_us",
    "disk_over_plain",
    "disk_over_plain_cold",
    "disk_over_plain_no_checksum",
    "disk_park_and_restore_ms",
    "plain_file_ms",
}
SHAPES = [(4, 8), (2, 16)]


@pytest.mark.host
def test_the_last_line_is_one_object_of_every_figure_and_people_see_the_same(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tiers", "--quick", "--folder", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    last = json.loads(done.stdout.splitlines()[-1])
    assert set(last) == FIGURES | {"quartiles", "machine", "session", "disk"}
    assert set(last["quartiles"]) == FIGURES
    for name in FIGURES:
        low, high = last["quartiles"][name]
        assert 0 < low <= last[name] <= high
        assert name in done.stdout
    assert last["machine"]["threads"] == 1
    assert last["session"] == {"tensors": 24, "mib": 0.1, "rounds": 2}
    assert last["disk"]["rounds"] == 2
    assert f"2 rounds of files on {last['disk']['file_system']}" in " ".join(done.stdout.split())
    assert "1x6x1x22x40 bfloat16" in done.stdout
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("contender", [disk_moves.Ours, disk_moves.Plain])
def test_each_contender_on_the_disk_brings_its_session_back_from_its_file_alone(tmp_path, contender):
    made = contender(tmp_path, SHAPES)
    made.park()
    assert made.tensors == []
    assert made.file.stat().st_size >= 64 * 2
    for trips in (1, 2):
        made.restore()
        assert made.trips == trips
        assert same_bits(made.tensors, filled(SHAPES))
    damaged = bytearray(made.file.read_bytes())
    damaged[-1] ^= 1
    made.file.write_bytes(damaged)
    with pytest.raises((AssertionError, BadFileError), match="damaged"):
        made.restore()
    made.drop()
    assert not made.file.exists()


def test_without_a_checksum_nothing_is_compared(tmp_path):
    bare = disk_moves.Plain(tmp_path, SHAPES, checksum=False)
    bare.park()
    bare.file.write_bytes(bytes(128))
    bare.restore()
    assert not any(tensor.any() for tensor in bare.tensors)


def test_a_contender_on_the_disk_that_brings_other_bytes_back_wins_nothing(tmp_path, monkeypatch):
    restore = disk_moves.Ours.restore

    def spoilt(self):
        restore(self)
        self.tensors[1] = self.tensors[1] * 0

    monkeypatch.setattr(disk_moves.Ours, "restore", spoilt)
    with pytest.raises(AssertionError, match="Ours brought other bytes back"):
        disk_moves.moves(SHAPES, tmp_path, rounds=1, aside=Console(quiet=True))


def test_the_file_system_is_that_of_the_folder_and_its_pages_leave_only_if_it_is_on_a_disk():
    assert disk_moves.file_system(Path("/proc/self")) == "proc"
    if os.access("/dev/shm", os.W_OK):
        with disk_moves.place("/dev/shm") as folder:
            assert disk_moves.file_system(folder) == "tmpfs"
            assert not disk_moves.can_forget(folder)


def test_every_turn_is_said_where_there_is_no_terminal(capsys):
    assert list(turns(2, what="pair", aside=Console())) == [0, 1]
    assert capsys.readouterr().out.splitlines() == [
        "pair 1 of 2, about 0 s left",
        "pair 2 of 2, about 0 s left",
    ]

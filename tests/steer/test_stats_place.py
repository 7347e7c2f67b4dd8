"""Where a worker's file is: its user's alone, locked for the worker's life, cleaned after its death."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from profiles import count

from vllm_omni_session_state.base.ids import digest
from vllm_omni_session_state.manager.rows import Row
from vllm_omni_session_state.omni.stats_file import place
from vllm_omni_session_state.omni.stats_file.layout import StatsWriter, UnreadableError
from vllm_omni_session_state.omni.stats_file.place import OwnFile, WorkerFile


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    """A place of the test's own."""
    monkeypatch.setattr(place, "BASE", str(tmp_path))
    return tmp_path


def files(base):
    return sorted(each.name for each in base.glob("vllm-omni-session-state-*/*"))


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


WORKER = """
import os, sys, time
from vllm_omni_session_state.omni.stats_file import place as stats_place
from vllm_omni_session_state.omni.stats_file.layout import StatsWriter
stats_place.BASE = sys.argv[1]
own = stats_place.OwnFile()
StatsWriter(own.grow).write({"a": 1}, {}, {"m": 1})
child = 0
if sys.argv[2] == "forks":
    there, here = os.pipe()
    child = os.fork()
    if not child:
        os.write(here, b"x")
        time.sleep(600)
    os.read(there, 1)  # it has begun to run
print(own.path, child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def worker(base):
    """Return a function that starts a worker: its process, its file's path and its child's process id."""
    started, children = [], []

    def start(how="alone"):
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(base), how], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        path, child = process.stdout.readline().split()
        children.append(int(child))
        return process, path, int(child)

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
    for child in filter(None, children):
        os.kill(child, signal.SIGKILL)


def test_the_file_is_the_users_alone_and_goes_with_its_worker(base):
    own = OwnFile()
    path = Path(own.path)
    assert mode(path) == 0o600
    assert mode(path.parent) == 0o700
    assert path.stat().st_size == 0
    assert len(own.grow(5000)) == 5000
    assert path.stat().st_size == 5000
    assert WorkerFile(own.path).alive
    own.close()
    own.close()
    assert files(base) == []


def test_each_worker_has_a_file_of_its_own(base):
    one, other = OwnFile(), OwnFile()
    assert one.path != other.path
    assert len(files(base)) == 2
    one.close()
    assert WorkerFile(other.path).alive
    other.close()


@pytest.mark.parametrize("wrong", ["readable", "a link", "a file"])
def test_a_folder_that_is_not_the_users_alone_is_refused(base, wrong):
    top = base / f"vllm-omni-session-state-{os.geteuid()}"
    elsewhere = base / "elsewhere"
    if wrong == "readable":
        top.mkdir(0o755)
    elif wrong == "a link":
        elsewhere.mkdir(0o700)
        top.symlink_to(elsewhere)
    else:
        top.touch(0o600)
    with pytest.raises(OSError, match=r"this user's alone|vllm-omni-session-state"):
        OwnFile()
    assert not elsewhere.exists() or not list(elsewhere.iterdir())


@pytest.mark.parametrize("wrong", ["readable", "a link", "a fifo", "gone"])
def test_a_file_that_is_not_the_users_alone_is_not_read(base, wrong):
    own = OwnFile()
    path = Path(own.path)
    if wrong == "readable":
        path.chmod(0o644)
    elif wrong == "a link":
        path = base / "link"
        path.symlink_to(own.path)
    elif wrong == "a fifo":
        path = base / "fifo"
        os.mkfifo(path, 0o600)
    else:
        path.unlink()
    with pytest.raises(OSError, match=r"this user's alone|No such file|symbolic link"):
        WorkerFile(str(path))
    own.close()


def test_a_place_without_room_is_an_error_and_no_signal(base, monkeypatch):
    own = OwnFile()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        StatsWriter(own.grow)
    own.close()


def test_a_worker_that_is_killed_is_dead_at_once_and_the_next_one_cleans(base, worker):
    process, path, _ = worker()
    seen = WorkerFile(path)
    assert seen.alive
    assert seen.read(rows=True).figures["a"] == 1
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not seen.alive
    assert seen.read(rows=True).figures["a"] == 1, "a reader keeps what it has open"
    _, other, _ = worker()
    assert files(base) == [Path(other).name]


def test_a_forked_child_does_not_keep_the_lock(worker):
    process, path, child = worker("forks")
    seen = WorkerFile(path)
    assert seen.alive
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    os.kill(child, 0)  # it lives
    assert not seen.alive


def test_a_forked_child_leaves_the_file_to_its_parent(base):
    own = OwnFile()
    child = os.fork()
    if not child:
        own.close()
        os._exit(own.ours)
    assert os.waitpid(child, 0)[1] == 0
    assert WorkerFile(own.path).alive
    own.close()


def test_a_file_of_a_living_worker_is_left_and_what_is_not_ours_too(base, worker):
    _, path, _ = worker()
    top = Path(path).parent
    for name in ("notes", "1-xyz"):
        (top / name).touch()
    (top / f"1-{'0' * 32}").symlink_to(path)
    OwnFile().close()
    assert WorkerFile(path).alive
    assert {"notes", "1-xyz"} <= set(files(base))


def test_a_worker_that_is_cleaned_before_it_has_its_lock_makes_another_file(base, monkeypatch):
    """By one that starts at the same time and finds the file without a lock."""
    flock, first = place.fcntl.flock, []

    def late(fd, how):
        if how == place.fcntl.LOCK_EX and not first:
            first.extend(files(base))
            OwnFile().close()
            assert files(base) == []
        flock(fd, how)

    monkeypatch.setattr(place.fcntl, "flock", late)
    own = OwnFile()
    assert files(base) == [Path(own.path).name] != first
    assert WorkerFile(own.path).alive
    own.close()


def test_a_file_that_is_cut_while_it_is_read_is_refused(base):
    own = OwnFile()
    StatsWriter(own.grow).write({}, {}, {"m": 1})
    seen = WorkerFile(own.path)
    for nbytes in (300, 100, 0):
        os.truncate(own.path, nbytes)
        with pytest.raises(UnreadableError):
            seen.read(rows=True)
    own.close()


def test_what_is_read_while_it_is_written_belongs_together(base):
    """Each row has the number of its writing, and the figures have the sum; files grow meanwhile."""
    own = OwnFile()
    writer = StatsWriter(own.grow)
    over = threading.Event()

    def write():
        numbers = {}
        number = 0
        while not over.is_set():
            number += 1
            key = f"k{number % 3000}"
            numbers[key] = number
            row = Row(key, digest(key), "device", used=False, turn=number, nbytes={"cpu": number})
            writer.write({"sum": sum(numbers.values())}, {key: row}, {"m": number})

    writer.write({"sum": 0}, {}, {"m": 0})
    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen, torn, whole = WorkerFile(own.path), 0, 0
        while whole < count(400):
            try:
                found = seen.read(rows=True)
            except UnreadableError:
                torn += 1
                continue
            whole += 1
            assert found.figures["sum"] == sum(row.turn for row in found.rows)
            assert found.figures["moves"]["m"] == max((row.turn for row in found.rows), default=0)
    finally:
        over.set()
        thread.join()
        own.close()

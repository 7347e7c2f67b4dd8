"""The process is stopped while a session moves: nothing waits for ever, and nobody has lost a bit.

The worker of vLLM-Omni turns the first SIGTERM or SIGINT into ``SystemExit``, wherever its main thread is,
and shuts down. A test can have that at each point: where a function of the package begins, ends, or comes
back from a call into C.
"""

import inspect
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from profiles import LONG
from tiered import all_hold, begin, files, holds, manager_of, places

from vllm_omni_session_state.accounting.accounts import Accounts
from vllm_omni_session_state.base import log
from vllm_omni_session_state.manager.entry import Placement
from vllm_omni_session_state.offload import worker_dir
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.omni.worker import lifecycle
from vllm_omni_session_state.state.session import SessionState

PACKAGE = str(Path(log.__file__).parents[1])


class Stop(SystemExit):
    """What the signal's handler raises."""


class StopAt:
    """Raises `Stop` at one point of what runs under it, counted from 0."""

    def __init__(self, point):
        self.point, self.passed, self.where = point, 0, None

    def __call__(self, frame, event, _):
        code = frame.f_code
        if event == "c_call" or self.where or not code.co_filename.startswith(PACKAGE):
            return
        if event == "return" and code.co_flags & inspect.CO_GENERATOR:
            return  # as it hands something out it is not at an end
        self.passed += 1
        if self.passed > self.point:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {event}"
            raise Stop(self.where)

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


def park_on_host(manager):
    manager.park("d")


def park_on_disk(manager):
    host, manager.offloader.host = manager.offloader.host, None
    try:
        manager.park("d")
    finally:
        manager.offloader.host = host


def make_room_on_host(manager):
    manager.offloader.host.budget = manager.offloader.host.nbytes + 4 * 700
    manager.park("d")


def bring_back_from_host(manager):
    manager.restore("c")


def bring_back_from_disk(manager):
    manager.restore("a")


def take_a_step(manager):
    manager.capacity.device_budget = 0
    with manager.lease("b") as session:
        assert holds(session, ord("b"))


def step_as_a_runner_does(manager):
    try:
        manager.prepare("b")
        with manager.lease("b") as session:
            assert holds(session, ord("b"))
    finally:
        manager.give_back("b")


def take_the_first_step(manager):
    manager.capacity.device_budget = 0
    begin(manager, "e")


DO = [
    park_on_host,
    park_on_disk,
    make_room_on_host,
    bring_back_from_host,
    bring_back_from_disk,
    take_a_step,
    step_as_a_runner_does,
    take_the_first_step,
]


@pytest.fixture
def four(tmp_path):
    """Makes managers of four sessions: a on the disk, b and c in host memory, d on the device."""
    made = []

    def make():
        disk = DiskTier(tmp_path / str(len(made)), budget=1 << 20, keep=True)
        manager = manager_of(disk, host=1 << 20, device=None)
        begin(manager, *"abcd")
        host, manager.offloader.host = manager.offloader.host, None
        manager.park("a")
        manager.offloader.host = host
        manager.park("b")
        manager.park("c")
        assert places(manager) == {"a": "disk", "b": "host", "c": "host", "d": "device"}
        made.append(disk)
        return manager

    yield make
    for disk in made:
        disk.close()


@pytest.fixture(autouse=True)
def no_bytes(monkeypatch):
    """Of a process that is stopped the charges may be those of a moment ago; who is where may not."""
    monkeypatch.setattr(Accounts, "check", lambda *_, **__: None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("act", DO, ids=lambda act: act.__name__)
def test_a_stop_at_any_point_settles_every_session_where_it_is_whole(four, act):
    stops = 0
    for point in itertools.count(step=3 if LONG else 37):
        manager = four()
        try:
            with StopAt(point) as stopped:
                act(manager)
        except Stop:
            stops += 1
        if stopped.where is None:
            break
        entries = manager._table.entries
        assert not [key for key, entry in entries.items() if entry.moving or entry.leases], stopped.where
        manager._table.check()
        for name in "abcd":
            with manager.lease(name) as session:
                assert holds(session, ord(name)), (name, stopped.where)
        manager._table.check()
        manager.offloader.host.check()
        manager.drop_all()
    assert stops > 10


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("level", ["host", "disk"])
def test_a_stop_as_a_session_lets_go_leaves_its_bytes_in_one_place(tmp_path, monkeypatch, level, gone):
    disk = DiskTier(tmp_path / "parked", budget=1 << 20)
    manager = manager_of(disk, host=1 << 20 if level == "host" else None, device=None)
    begin(manager, "a")
    let_go = SessionState.let_go

    def stopped(*args):
        if gone:
            let_go(*args)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(SessionState, "let_go", stopped)
        with pytest.raises(Stop):
            manager.park("a")
    assert places(manager) == {"a": level if gone else "device"}
    tier = manager.offloader.host if level == "host" else disk
    assert (tier.nbytes > 0) == gone
    assert len(files(disk)) == (gone and level == "disk")
    all_hold(manager, "a")
    assert tier.nbytes == 0
    assert files(disk) == []
    disk.close()


def test_a_stop_while_a_file_is_synced_ends_in_order_and_keeps_everybody(tmp_path, monkeypatch):
    """As vLLM-Omni's worker does it: the signal's handler raises, and the worker shuts down."""
    disk = DiskTier(tmp_path / "parked", budget=1 << 20, keep=True)
    manager = manager_of(disk, device=None)
    begin(manager, *"abc")
    sync = worker_dir.System.fsync

    def stopped(fd):
        monkeypatch.setattr(worker_dir.System, "fsync", staticmethod(sync))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)  # the signal comes before it is over
        raise AssertionError("the signal did not come")

    def handler(number, _):
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, handler)
    monkeypatch.setattr(worker_dir.System, "fsync", staticmethod(stopped))
    try:
        with pytest.raises(SystemExit):
            manager.park("a")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert places(manager) == dict.fromkeys("abc", "device")
    manager.check()
    ending = threading.Thread(target=lifecycle.leave_process, args=(manager,), daemon=True)
    ending.start()
    ending.join(300)
    assert not ending.is_alive(), "the shutdown waits for ever"
    (kept,) = (tmp_path / "parked").iterdir()
    assert len(list(kept.glob("*.safetensors"))) == 3


def test_a_shutdown_does_not_wait_for_ever_for_a_session_whose_mover_is_gone(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lifecycle, "WAIT_S", 0.2)
    disk = DiskTier(tmp_path / "parked", budget=1 << 20, keep=True)
    manager = manager_of(disk, device=None)
    begin(manager, *"abc")
    entries = manager._table.entries
    with manager._table.lock:
        for name in "ab":
            manager._table.transition(entries[name], Placement.LEAVING)
    lifecycle.leave_process(manager)
    assert "2 sessions are not kept" in caplog.text
    assert "it is on its way, and nobody waits for it any longer" in caplog.text
    assert places(manager)["c"] == "disk"


def test_a_wait_for_a_session_that_arrives_in_time_is_no_refusal(tmp_path):
    disk = DiskTier(tmp_path / "parked", budget=1 << 20)
    manager = manager_of(disk, device=None)
    begin(manager, "a")
    entry = manager._table.entries["a"]
    with manager._table.lock:
        manager._table.transition(entry, Placement.LEAVING)
    timer = threading.Timer(0.1, manager.offloader.arrive, (entry,))
    timer.start()
    assert manager.park("a", until=time.monotonic() + 60)
    timer.join()
    all_hold(manager, "a")
    disk.close()

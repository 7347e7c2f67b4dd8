"""``keep_on_exit``: whatever ends a worker, and in whichever instant, what it had on the disk is kept."""

import itertools
import os
import signal
import traceback
from pathlib import Path

import pytest
from tiered import FILE, begin, manager_of

from vllm_omni_session_state.base.ids import fingerprint
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.file_format import read_file
from vllm_omni_session_state.offload.file_system import System
from vllm_omni_session_state.offload.read_ahead import ReadAhead
from vllm_omni_session_state.omni.worker.lifecycle import hook_shutdown, leave_process

LARGE = 1 << 30
STOP = 128 + signal.SIGTERM  # what vLLM-Omni's worker makes of the signal


def folders(top):
    return sorted(path.name for path in Path(top).iterdir())


def kept(top):
    """The sessions in kept folders, each whole, by the hash of its identity."""
    found = set()
    for file in Path(top).glob("kept-*/*.safetensors"):
        contents = read_file(file)
        assert contents.storages
        found.add(contents.manifest.session)
    return found


def hashes(names):
    return {fingerprint(name).hex() for name in names}


def nbytes_below(top):
    return sum(path.stat().st_size for path in Path(top).rglob("*") if path.is_file())


def stop(*_, **__):
    raise SystemExit(STOP)


def parked(top, names):
    """A manager with these on the disk, and two more in use of nobody."""
    manager = manager_of(DiskTier(top, budget=LARGE, keep=True), device=LARGE)
    begin(manager, *names, "g", "h")
    for name in names:
        manager.park(name)
    return manager


def test_a_stop_in_the_middle_of_the_shutdowns_own_parking_keeps_what_was_on_the_disk(
    tmp_path, monkeypatch, caplog
):
    manager = parked(tmp_path / "t", "abcdef")
    with monkeypatch.context() as patched:
        patched.setattr(System, "fsync", staticmethod(stop))
        with pytest.raises(SystemExit) as stopped:
            leave_process(manager)
    assert stopped.value.code == STOP, "vLLM-Omni hears of it as of any stop"
    assert "SystemExit while sessions are written: 6 of 8 are kept" in caplog.text
    (folder,) = folders(tmp_path / "t")
    other = DiskTier(tmp_path / "t", budget=LARGE)
    assert other.figures()["kept_nbytes"] == nbytes_below(tmp_path / "t") > 0, "its lock is free"
    other.close()
    assert folders(tmp_path / "t") == [folder]
    assert kept(tmp_path / "t") == hashes("abcdef")
    leave_process(manager)


@pytest.mark.parametrize("place", [(ReadAhead, "close"), (DiskTier, "_remove_strays")])
def test_a_stop_while_the_tier_is_closed_keeps_it_too(tmp_path, monkeypatch, place):
    manager = parked(tmp_path / "t", "abc")
    with monkeypatch.context() as patched:
        if place[0] is ReadAhead:
            patched.setattr(*place, stop)
        else:
            patched.setattr(DiskTier, "close", interrupted(DiskTier.close, *place))
        with pytest.raises(SystemExit):
            leave_process(manager)
    assert kept(tmp_path / "t") == hashes("abcgh")
    other = DiskTier(tmp_path / "t", budget=0)
    other.close()
    assert folders(tmp_path / "t") == [], "its lock is free: another one can remove what has no room"


def interrupted(real, owner, name):
    def close(self):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(owner, name, stop)
            real(self)

    return close


def test_a_stop_goes_past_the_host_and_a_fault_does_not(tmp_path, monkeypatch):
    class Worker:
        def shutdown(self):
            return "down"

    manager = parked(tmp_path / "t", "a")
    hook_shutdown(Worker, lambda _: manager)
    with monkeypatch.context() as patched:
        patched.setattr(manager, "park", stop)
        with pytest.raises(SystemExit):
            Worker().shutdown()
    assert Worker().shutdown() == "down", "a second shutdown finds nothing to do"
    manager = parked(tmp_path / "u", "a")
    monkeypatch.setattr(DiskTier, "close", lambda _: 1 // 0)
    assert Worker().shutdown() == "down"


def counted_calls(act):
    """Let every system call of the tier ``act()`` first."""
    for name in [name for name in vars(System) if not name.startswith("_")]:
        setattr(System, name, staticmethod(after(act, getattr(System, name))))


def after(act, real):
    def call(*args, **kwargs):
        act()
        return real(*args, **kwargs)

    return call


def killed(work, *, at):
    """Run ``work()`` in a process that is killed before its system call number ``at``; whether it was."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work(at)
            status = 0
        except BaseException:  # noqa: BLE001 - a child of a test must not go on as the test
            traceback.print_exc()
        finally:
            os._exit(status)
    how = os.waitpid(child, 0)[1]
    assert how in (0, signal.SIGKILL), "the child went wrong"
    return how == signal.SIGKILL


def test_a_kill_between_any_two_steps_keeps_what_was_on_the_disk(tmp_path):
    def work(at):
        manager = parked(top, "ab")
        numbers = itertools.count()
        counted_calls(lambda: next(numbers) == at and os.kill(os.getpid(), signal.SIGKILL))
        leave_process(manager)

    most, whole = 0, set()
    for at in itertools.count():
        top = tmp_path / str(at)
        was_killed = killed(work, at=at)
        assert [name.partition("-")[0] for name in folders(top)] == ["kept"], f"before call {at}"
        found = kept(top)
        assert found >= hashes("ab"), f"before call {at}"
        most, whole = max(most, len(found)), found
        DiskTier(top, budget=LARGE).close()
        assert kept(top) == found
        assert not list(top.rglob("*.part")), "what has no end goes with the next start"
        if not was_killed:
            break
    assert at > 10, "two sessions were written meanwhile"
    assert whole == hashes("abgh")


def test_a_worker_that_is_killed_while_it_starts_leaves_nothing_in_the_way(tmp_path):
    def work(at):
        numbers = itertools.count()
        counted_calls(lambda: next(numbers) == at and os.kill(os.getpid(), signal.SIGKILL))
        DiskTier(top, budget=2 * FILE, keep=True).close()

    for at in itertools.count():
        top = tmp_path / str(at)
        was_killed = killed(work, at=at)
        DiskTier(top, budget=LARGE).close()
        assert folders(top) == [], f"before call {at}"
        if not was_killed:
            break
    assert at > 10


def test_restarts_of_one_budget_hold_one_budget(tmp_path):
    for restart in range(6):
        disk = DiskTier(tmp_path / "t", budget=3 * FILE, keep=True)
        manager = manager_of(disk, device=LARGE)
        begin(manager, *"abcd"[: 2 + restart % 3])
        for name in manager.keys():  # noqa: SIM118 - a manager is no mapping
            manager.park(name)
            assert nbytes_below(tmp_path / "t") <= disk.budget
            manager.check()
        stats = manager.stats()
        assert stats["disk_sessions"] == stats["sessions"]
        assert stats["disk_nbytes"] + stats["kept_nbytes"] == nbytes_below(tmp_path / "t")
        leave_process(manager)
    assert kept(tmp_path / "t") >= hashes("ab")

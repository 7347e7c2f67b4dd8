"""What goes wrong while sessions move between the tiers: nobody loses a bit, and nothing is left behind."""

import errno
import gc
import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch
from profiles import LONG
from saboteur import Saboteur
from tiered import HOSTED, all_hold, begin, files, holds, manager_of, places

from vllm_omni_session_state.accounting.release import Watch
from vllm_omni_session_state.base.errors import (
    BadFileError,
    CannotParkError,
    NoRoomError,
    SessionRestoreFailedError,
    TierFaultError,
)
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.file_system import System


@pytest.fixture
def disk(tmp_path):
    tier = DiskTier(tmp_path / "parked", budget=1 << 20)
    yield tier
    tier.close()


def test_a_refused_move_keeps_nothing_alive_afterwards(disk, monkeypatch):
    """Errors hold frames, and frames hold tensors: what is refused and then dropped is free at once."""
    manager = manager_of(disk, host=HOSTED)
    begin(manager, "a")

    def full(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(System, "write", staticmethod(full))
    gc.collect()
    gc.disable()
    try:
        begin(manager, "b")
        with pytest.raises(CannotParkError):
            manager.park("b")
        session = manager.peek("b")
        watch = Watch(session.attrs["base"])
        del session
        manager.drop_session("b")
        assert watch.alive() == ()
    finally:
        gc.enable()


def refused_once(manager, name):
    """Take a step that is sent again where it was refused; whether it was."""
    try:
        all_hold(manager, name)
    except SessionRestoreFailedError as error:
        why = error
    else:
        return False
    assert isinstance(why.__cause__, TierFaultError)
    assert "cannot read a parked session" in str(why)
    assert manager.peek(name).parked, "it is where it was"
    all_hold(manager, name)
    return True


@pytest.mark.parametrize("how", ["ENOSPC", "EIO", "late EIO", "short", "stuck"])
@pytest.mark.parametrize("host", [None, HOSTED])
def test_any_one_system_call_may_fail_while_sessions_move_and_nobody_loses_a_bit(
    tmp_path, monkeypatch, how, host
):
    """Each call of the tier fails once, in its own run; a step that is refused is sent again."""
    refusals = 0
    for at in itertools.count(step=1 if LONG else 9):
        disk = DiskTier(tmp_path / str(at), budget=1 << 20)
        manager = manager_of(disk, host=host)
        with monkeypatch.context() as patch:
            saboteur = Saboteur(patch, at, how)
            for name in "abcd":
                begin(manager, name)
                manager.check()
            for name in "acbd":
                refusals += refused_once(manager, name)
            manager.drop_all()
            manager.check()
        begin(manager, *"ef")  # one of them goes to the disk, and what could not be removed goes now
        manager.drop_all()
        assert disk.nbytes == 0
        assert files(disk) == []
        disk.close()
        if saboteur.calls <= at:
            break
    assert at > 40, "every call had its turn"
    assert refusals or how in ("short", "late EIO")


def test_a_file_that_changed_is_never_used_and_the_session_can_be_closed(disk):
    manager = manager_of(disk)
    begin(manager, *"ab")
    for name in files(disk):
        path = Path(disk.folder, name)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    for name in "ab":
        for _ in range(2):
            with pytest.raises(SessionRestoreFailedError, match="close the session") as failed:
                all_hold(manager, name)
            assert isinstance(failed.value.__cause__, BadFileError)
        assert manager.drop_session(name)
    assert files(disk) == []
    begin(manager, "a")
    all_hold(manager, "a")


def test_the_files_of_two_sessions_that_somebody_swapped_are_refused(disk):
    manager = manager_of(disk)
    begin(manager, *"ab")
    first, second = (Path(disk.folder, name) for name in files(disk))
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    for name in "ab":
        with pytest.raises(SessionRestoreFailedError, match="another session"):
            all_hold(manager, name)


def test_a_folder_that_goes_while_serving_refuses_the_new_and_hurts_nobody_in_memory(tmp_path, caplog):
    disk = DiskTier(tmp_path / "parked", budget=1 << 20)
    manager = manager_of(disk, device=None, max_sessions=2)
    begin(manager, *"abc")
    shutil.rmtree(tmp_path / "parked")
    with pytest.raises(NoRoomError, match="somebody removed it while it was in use"):
        begin(manager, "d")
    assert [record for record in caplog.records if "cannot write a parked session" in record.getMessage()]
    with pytest.raises(SessionRestoreFailedError, match="ENOENT"):
        all_hold(manager, "a")
    with manager.lease("b") as b, manager.lease("c") as c:
        assert holds(b, ord("b"))
        assert holds(c, ord("c"))
    manager.drop_all()


def test_a_restore_without_memory_leaves_the_file_and_the_next_try_succeeds(disk, monkeypatch):
    manager = manager_of(disk)
    begin(manager, "a")
    empty = torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(SessionRestoreFailedError, match="no host memory"), manager.lease("a"):
            raise AssertionError("it was not brought back")
    assert torch.empty is empty
    assert places(manager) == {"a": "disk"}
    all_hold(manager, "a")


def test_a_write_that_stops_in_the_middle_leaves_the_session_in_host_memory(disk, monkeypatch):
    manager = manager_of(disk, host=HOSTED)
    begin(manager, "a")
    write = System.write

    def full(fd, data):
        write(fd, data[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(System, "write", staticmethod(full))
        begin(manager, "b")
        assert places(manager) == {"a": "host", "b": "device"}
        with pytest.raises(NoRoomError, match="ENOSPC"):
            begin(manager, "c")
        assert places(manager) == {"a": "host", "b": "device"}
    assert files(disk) == []
    all_hold(manager, *"ab")
    begin(manager, "c")


def test_what_cannot_leave_host_memory_for_the_disk_stays_there_whole_and_is_said(tmp_path, caplog):
    disk = DiskTier(tmp_path, budget=10)
    manager = manager_of(disk, host=4 * HOSTED)
    begin(manager, *"ab")
    caplog.clear()
    manager.offloader.flush_to_disk()
    (said,) = caplog.messages
    assert said.startswith("2 sessions stay in host memory: ")
    assert "disk.budget" in said
    assert places(manager) == {"a": "host", "b": "host"}
    all_hold(manager, *"ab")
    disk.close()

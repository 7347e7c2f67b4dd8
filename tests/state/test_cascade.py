"""Device, host memory, disk: where sessions go when each of them is full, and how they come back.

The library alone, on the CPU, where device and host are the same memory. Files are real.
"""

import errno
import gc
import itertools
import logging
import os
import shutil
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from profiles import LONG
from saboteur import Saboteur

from vllm_omni_session_state import LatentBuffer, SessionStateManager, skeleton
from vllm_omni_session_state.errors import (
    BadFileError,
    CannotParkError,
    NoRoomError,
    SessionRestoreFailedError,
    TierFaultError,
    TierFullError,
)
from vllm_omni_session_state.release import Watch
from vllm_omni_session_state.session import Declaration
from vllm_omni_session_state.tiers.disk import DiskTier
from vllm_omni_session_state.tiers.folder import System
from vllm_omni_session_state.tiers.host import HostTier

SIZE = 1000
LIVE = 650  # above what one session's host values take
HOSTED = 1024 + LIVE  # above what one session takes in host memory: a slab and its host values
FILE = 8192  # above what one session's file takes
DECLARATION = Declaration(device_nbytes=10 * SIZE, host_fields=frozenset({"frames", "chunks"}))


UNWRITABLE = (
    "sessions of this model are not parked on the disk: attrs.odd (object) cannot be written to a file: its "
    "type is not on the list of what files hold. Keep plain values there, or let the model's adapter "
    "register the type with skeleton.register_kind()"
)


@pytest.fixture
def disk(tmp_path):
    tier = DiskTier(tmp_path / "parked", budget=1 << 20)
    yield tier
    tier.close()


def manager_of(disk, *, host=None, device=0, **bounds):
    return SessionStateManager(
        device_budget=device,
        tier=None if host is None else HostTier(budget=host),
        disk=disk,
        declaration=DECLARATION,
        **bounds,
    )


def fill(session, number):
    base = torch.full((SIZE,), number % 251, dtype=torch.uint8)
    session.attrs["number"] = number
    session.attrs["base"] = base
    session.attrs["ring"] = deque([base[:7], base[3:]], maxlen=5)
    session.attrs["frames"] = np.full((4, 5), number)
    session.attrs["alias"] = [base[10:]]
    with torch.inference_mode():
        session.put("chunks", LatentBuffer()).replace([torch.full((3,), number + i) for i in range(20)])


def holds(session, number):
    base, chunks = session.attrs["base"], session.get("chunks").container
    aliases = [*session.attrs["ring"], *session.attrs["alias"]]
    return (
        session.attrs["number"] == number
        and base.tolist() == [number % 251] * SIZE
        and [each.data_ptr() - base.data_ptr() for each in aliases] == [0, 3, 10]
        and session.attrs["ring"].maxlen == 5
        and (session.attrs["frames"] == number).all()
        and [int(chunk[0]) for chunk in chunks] == [number + i for i in range(20)]
        and all(chunk.is_inference() for chunk in chunks)
        and not base.is_inference()
    )


def begin(manager, *names):
    for name in names:
        with manager.lease(name) as session:
            fill(session, ord(name[0]))


def all_hold(manager, *names):
    for name in names:
        with manager.lease(name) as session:
            assert holds(session, ord(name[0])), name
        manager.check()


def places(manager):
    return dict(zip(manager.keys(), (entry.place for entry in manager.listing()), strict=True))


def files(disk):
    return sorted(path.name for path in Path(disk.folder).iterdir())


def test_sessions_go_down_in_the_order_of_their_last_use_and_each_comes_back_whole(disk):
    manager = manager_of(disk, host=2 * HOSTED + 4 * LIVE, device=3 * SIZE)
    begin(manager, *"abcdefgh")
    assert [place for _, place in sorted(places(manager).items())] == ["disk"] * 3 + ["host"] * 2 + [
        "device"
    ] * 3
    assert manager.stats()["disk_sessions"] == len(files(disk)) == 3
    assert manager.stats()["disk_nbytes"] == disk.nbytes > 3 * SIZE
    for _ in range(3):
        all_hold(manager, *"hbgacfde")
    assert manager.stats()["parked_sessions"] == 5
    assert not [name for name in manager.stats() if name.startswith("lost:")]
    manager.drop_all()
    assert manager.stats()["total_nbytes"] == manager.stats()["disk_nbytes"] == 0
    assert files(disk) == []


def test_a_session_on_the_disk_costs_no_memory_at_all(disk):
    manager = manager_of(disk)
    with manager.lease("a") as session:
        fill(session, 1)
        del session.attrs["frames"]  # memory of NumPy's own cannot be watched
        watch = Watch(*session.contents())
    del session
    assert places(manager) == {"a": "disk"}
    assert watch.alive() == ()
    assert manager.stats()["total_nbytes"] == 0
    assert disk.nbytes > SIZE


def test_without_host_memory_sessions_go_to_the_disk_at_once(disk):
    manager = manager_of(disk)
    begin(manager, *"abc")
    assert places(manager) == dict.fromkeys("abc", "disk")
    all_hold(manager, *"abc")


def test_what_is_larger_than_host_memory_goes_past_it_and_sends_nobody_on(disk):
    manager = manager_of(disk, host=5000)
    begin(manager, "a")
    with manager.lease("large") as session:
        session.attrs["base"] = torch.ones(6000, dtype=torch.uint8)
    assert places(manager) == {"a": "host", "large": "disk"}
    all_hold(manager, "a")


def test_host_values_that_grow_beyond_the_budget_send_others_on(disk):
    manager = manager_of(disk, host=6 * HOSTED, device=SIZE)
    begin(manager, *"abc")
    assert [place for _, place in sorted(places(manager).items())] == ["host", "host", "device"]
    with manager.lease("c") as session:
        session.attrs["frames"] = np.zeros(6 * HOSTED, dtype=np.uint8)
    assert [place for _, place in sorted(places(manager).items())] == ["disk", "disk", "device"]
    assert manager.cascade.host.nbytes == 0


@pytest.mark.parametrize("on_lost", ["warn", "error"])
@pytest.mark.parametrize("host", [None, HOSTED])
def test_a_full_lowest_tier_refuses_the_new_session_and_drops_nobody(tmp_path, on_lost, host):
    disk = DiskTier(tmp_path, budget=2 * FILE)
    manager = manager_of(disk, host=host, device=None, max_sessions=1, on_lost=on_lost)
    names = []
    with pytest.raises(NoRoomError, match=r"raise disk\.budget"):  # noqa: PT012 - which one is refused is not said
        for name in "abcdefghijkl":
            begin(manager, name)
            names.append(name)
    assert len(names) > 3
    assert sorted(manager.keys()) == names
    assert not [name for name in manager.stats() if name.startswith("lost:")]
    all_hold(manager, *names)
    manager.drop_session("b")
    begin(manager, "m")
    disk.close()


def test_too_many_parked_sessions_refuse_the_new_one_and_drop_nobody(disk):
    manager = manager_of(disk, device=None, max_sessions=1, max_parked=2)
    begin(manager, *"abc")
    with pytest.raises(NoRoomError, match="max_parked"):
        begin(manager, "d")
    all_hold(manager, *"abc")


def test_a_value_that_no_file_holds_keeps_its_session_in_memory_and_is_said_once_by_name(disk, caplog):
    manager = manager_of(disk, host=3 * HOSTED)
    caplog.set_level(logging.WARNING, logger="vllm_omni.session_state")
    for name in "abcdefgh":
        with manager.lease(name) as session:
            fill(session, ord(name))
            if name in "ab":
                session.attrs["odd"] = object()
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "not parked on the disk" in line] == [UNWRITABLE]
    where = places(manager)
    assert (where["a"], where["b"], where["c"]) == ("host", "host", "disk")
    all_hold(manager, *"abcdefgh")
    with manager.lease("a") as session:
        del session.attrs["odd"]
    begin(manager, *"ijk")
    all_hold(manager, *"cdefgh")
    assert places(manager)["a"] == "disk", "what it holds now can be written"


def test_thousands_that_cannot_be_written_are_each_asked_once_and_not_at_every_step(disk, monkeypatch):
    manager = manager_of(disk, host=300 * 1024)
    asked = []
    real = skeleton.write
    monkeypatch.setattr(skeleton, "write", lambda *args: asked.append(1) or real(*args))
    for number in range(300):
        with manager.lease(f"session {number}") as session:
            session.attrs["x"] = torch.ones(SIZE, dtype=torch.uint8)
            session.attrs["odd"] = object()
    assert not asked
    for leases in range(1, 6):
        with manager.lease("late") as session:
            session.attrs["x"] = torch.ones(SIZE, dtype=torch.uint8)
        assert places(manager)["late"] == "disk"
        assert len(asked) == 300 + leases
    assert manager.stats()["parked_sessions"] == 301


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


def test_memory_that_somebody_else_holds_comes_back_as_itself(disk):
    manager = manager_of(disk)
    outside, chunk = torch.full((SIZE,), 3, dtype=torch.uint8), torch.full((9,), 4, dtype=torch.uint8)
    with manager.lease("a") as session:
        session.attrs["lent"], session.attrs["own"] = outside, torch.ones(5)
        session.put("chunks", LatentBuffer()).replace([chunk])
    assert places(manager) == {"a": "disk"}
    outside.fill_(7)
    with manager.lease("a") as session:
        assert session.attrs["lent"].data_ptr() == outside.data_ptr()
        assert session.attrs["lent"].tolist() == [7] * SIZE
        assert session.get("chunks").container[0].data_ptr() == chunk.data_ptr()


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
        begin(manager, "e")  # what could not be removed goes now
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


def test_park_by_name_says_what_keeps_a_session_where_it_is(tmp_path):
    disk = DiskTier(tmp_path, budget=10)
    manager = manager_of(disk, device=None)
    begin(manager, "a")
    with pytest.raises(CannotParkError, match=r"disk.*raise disk\.budget"):
        manager.park("a")
    all_hold(manager, "a")
    disk.close()


def test_a_full_disk_is_a_typed_error_that_names_the_setting(tmp_path):
    disk = DiskTier(tmp_path, budget=10)
    with pytest.raises(TierFullError, match=r"disk\.budget"):
        disk.put({}, [torch.ones(20, dtype=torch.uint8).untyped_storage()], session="0" * 32)
    disk.close()


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

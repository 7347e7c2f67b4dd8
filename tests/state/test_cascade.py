"""Device, host memory, disk: where sessions go when each of them is full, and how they come back.

The library alone, on the CPU, where device and host are the same memory. Files are real; their faults are
in ``test_cascade_faults.py``.
"""

import logging

import numpy as np
import pytest
import torch
from tiered import FILE, HOSTED, LIVE, SIZE, all_hold, begin, files, fill, manager_of, places

from vllm_omni_session_state import LatentBuffer
from vllm_omni_session_state.accounting.release import Watch
from vllm_omni_session_state.base.errors import CannotParkError, NoRoomError, TierFullError
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.offload import parking
from vllm_omni_session_state.offload.disk_tier import DiskTier

UNWRITABLE = (
    "sessions of this model are not parked on the disk: attrs.odd (object) cannot be written to a file: its "
    "type is not on the list of what files hold. Keep plain values there, or let the model's adapter "
    "register the type with offload.registered.register_kind()"
)


@pytest.fixture
def disk(tmp_path):
    tier = DiskTier(tmp_path / "parked", budget=1 << 20)
    yield tier
    tier.close()


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
    assert manager.offloader.host.nbytes == 0


def test_one_byte_beyond_host_memory_sends_somebody_on_and_none_beyond_it_sends_nobody(disk):
    manager = manager_of(disk, host=6 * HOSTED)
    begin(manager, "a")
    host = manager.offloader.host
    host.budget -= host.room(manager._table.accounts.host_nbytes())
    manager.offloader.enforce_host_budget()
    assert places(manager) == {"a": "host"}
    host.budget -= 1
    manager.offloader.enforce_host_budget()
    assert places(manager) == {"a": "disk"}
    all_hold(manager, "a")


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
    forget_said()
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
    real = parking.pack_whole
    monkeypatch.setattr(parking, "pack_whole", lambda *args, **more: asked.append(1) or real(*args, **more))
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

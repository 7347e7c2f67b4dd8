"""Folders that dead workers kept: they count, they yield to whatever lives, and nobody else's is touched."""

import logging
import os
from pathlib import Path

import pytest
from files import SESSION, die, document, leave_kept, names, nbytes_below, raw, same, storages
from saboteur import broken_call

from vllm_omni_session_state.base.errors import TierFaultError, TierFullError
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.file_format import read_file
from vllm_omni_session_state.offload.file_system import System


@pytest.fixture(autouse=True)
def said_anew():
    forget_said()


@pytest.fixture
def top(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


def put(tier, size, number=0):
    return tier.put(document(number), storages(size, seed=number), session=SESSION)


def test_they_go_before_a_session_is_refused_the_oldest_first_and_no_more_of_them_than_must(top):
    newest, oldest, middle = (leave_kept(top, 0, 1000, age=age) for age in (1, 3, 2))
    tier = DiskTier(top, budget=4000)
    assert tier.figures()["kept_nbytes"] == 3000
    put(tier, 900)
    assert oldest not in names(top)
    assert {middle, newest} < set(names(top))
    put(tier, 1500)
    assert names(top) == [Path(tier.folder).name]
    assert tier.figures()["kept_nbytes"] == 0
    with pytest.raises(TierFullError):
        put(tier, 1000)
    tier.close()


def test_the_age_of_a_folder_is_that_of_its_newest_file(top):
    renewed = leave_kept(top, 0, 1000, 1000, age=10)
    os.utime(top / renewed / "1.safetensors", ns=(10**18, 10**18))
    older = leave_kept(top, 0, 1000, age=5)
    tier = DiskTier(top, budget=2900)
    assert older not in names(top)
    assert renewed in names(top)
    tier.close()


def test_a_budget_that_became_smaller_holds_from_the_start_on(top):
    old, new = leave_kept(top, 0, 1000, age=1), leave_kept(top, 0, 1000)
    tier = DiskTier(top, budget=1999)
    assert old not in names(top)
    assert new in names(top)
    tier.close()
    assert names(top) == [new]


def test_what_is_refused_for_its_size_costs_no_kept_folder(top):
    kept = leave_kept(top, 0, 1000)
    tier = DiskTier(top, budget=1500)
    with pytest.raises(TierFullError):
        put(tier, 1500)
    assert kept in names(top)
    tier.close()


def test_a_worker_counts_what_earlier_ones_of_its_number_kept_and_takes_the_lowest_free_number(top):
    zero, one, two = (leave_kept(top, number, 1000) for number in (0, 1, 2))
    first, second = DiskTier(top, budget=1500), DiskTier(top, budget=10_000, keep=True)
    assert Path(first.folder).name.startswith("worker-0-")
    assert Path(second.folder).name.startswith("kept-1-")
    put(first, 600)
    assert zero not in names(top)
    put(second, 8000)
    assert {one, two} < set(names(top)), "each has room for what counts to it"
    first.close()
    third = DiskTier(top, budget=1)
    assert Path(third.folder).name.startswith("worker-0-"), "a number is free when its worker is gone"
    assert one in names(top)
    third.close()
    second.close()


def test_a_folder_of_an_earlier_version_has_no_number_and_counts_as_the_first_ones(top):
    (top / f"kept-{'a' * 32}").mkdir()
    (top / f"kept-{'a' * 32}" / "x.safetensors").write_bytes(bytes(1000))
    tier = DiskTier(top, budget=1000)
    assert tier.figures()["kept_nbytes"] == 1000
    put(tier, 10)
    assert names(top) == [Path(tier.folder).name]
    tier.close()


def test_a_worker_that_is_killed_leaves_what_it_parked_under_the_name_for_it(top):
    tier = DiskTier(top, budget=1 << 20, keep=True)
    put(tier, 10, 1)
    (Path(tier.folder) / "0.safetensors.part").write_bytes(b"half of one")
    die(tier)
    other = DiskTier(top, budget=1 << 20)
    folder = next(top.glob("kept-*"))
    (file,) = folder.iterdir()
    assert same(read_file(file), storages(10, seed=1), 1)
    assert other.figures()["kept_nbytes"] == file.stat().st_size
    other.close()
    assert names(top) == [folder.name], "an order to keep nothing does not reach what others kept"


def test_one_in_which_nothing_was_written_to_its_end_goes(top):
    tier = DiskTier(top, budget=1 << 20, keep=True)
    (Path(tier.folder) / "0.safetensors.part").write_bytes(b"half of one")
    die(tier)
    DiskTier(top, budget=1 << 20).close()
    assert names(top) == []


def test_what_a_living_worker_keeps_is_never_touched(top):
    living = DiskTier(top, budget=1 << 20, keep=True)
    held = [put(living, 1000, number) for number in range(3)]
    other = DiskTier(top, budget=1000)
    put(other, 300)
    with broken_call("write", "ENOSPC"), pytest.raises(TierFaultError, match="ENOSPC"):
        put(other, 1)
    assert other.figures()["kept_nbytes"] == 0
    living.check()
    assert all(same(living.get(ticket), storages(1000, seed=n), n) for n, ticket in enumerate(held))
    living.close()
    other.close()


def test_where_the_file_system_is_full_the_oldest_of_all_goes_whatever_its_number(top):
    oldest, middle, newest = (
        leave_kept(top, number, 10, age=age) for number, age in ((3, 9), (0, 8), (7, 0))
    )
    tier = DiskTier(top, budget=1 << 20)
    with broken_call("write", "ENOSPC", times=2):
        ticket = put(tier, 100, 1)
    assert {oldest, middle, newest} & set(names(top)) == {newest}
    assert same(tier.get(ticket), storages(100, seed=1), 1)
    with broken_call("fsync", "EDQUOT", times=2), pytest.raises(TierFaultError, match="EDQUOT"):
        put(tier, 100, 2)
    assert names(top) == [Path(tier.folder).name], "and only when none is left a session is refused"
    tier.check()
    tier.close()


def test_a_worker_starts_where_the_file_system_is_full_of_kept_folders(top):
    for number in range(3):
        leave_kept(top, number, 10)
    with broken_call("mkdir", "ENOSPC", times=2):
        tier = DiskTier(top, budget=1 << 20)
    assert len(names(top)) == 2
    tier.close()


def test_one_that_cannot_be_removed_is_said_once_and_refuses_nobody(top, caplog):
    kept = leave_kept(top, 0, 1000)
    tier = DiskTier(top, budget=1500)
    with broken_call("rmdir", "EIO", times=2):
        first, second = put(tier, 300, 1), put(tier, 300, 2)
    assert kept in names(top)
    said = [record for record in caplog.records if "which a dead worker kept" in record.getMessage()]
    assert [(record.levelno, kept in record.getMessage()) for record in said] == [(logging.WARNING, True)]
    tier.check()
    tier.drop(first)
    tier.drop(second)
    put(tier, 600, 3)
    assert kept not in names(top), "it is tried again"
    tier.close()


def test_one_that_somebody_removes_by_hand_is_counted_no_more_once_its_room_is_wanted(top):
    kept = leave_kept(top, 0, 1000)
    tier = DiskTier(top, budget=1500)
    (top / kept / "0.safetensors").unlink()
    (top / kept).rmdir()
    put(tier, 900)
    assert tier.figures()["kept_nbytes"] == 0
    tier.check()
    tier.close()


def test_a_folder_that_is_being_made_is_not_locked_by_who_looks_for_room(top, monkeypatch):
    """Its maker, which does not wait, would take the look for another worker's life."""
    tier = DiskTier(top, budget=1 << 20)
    new = leave_kept(top, 1)
    locked, real = [], System.flock

    def flock(fd, how):
        locked.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        return real(fd, how)

    monkeypatch.setattr(System, "flock", staticmethod(flock))
    leave_kept(top, 2, 10)
    with broken_call("write", "ENOSPC", times=2), pytest.raises(TierFaultError):
        put(tier, 10)
    assert new in names(top)
    assert [path for path in locked if path.endswith(new)] == []
    assert locked, "the other one was looked at"
    tier.close()


@pytest.mark.parametrize("keep", [True, False])
def test_the_name_of_a_folder_to_be_kept_is_on_the_disk_before_a_file_is(top, monkeypatch, keep):
    synced, real = [], System.fsync

    def fsync(fd):
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        return real(fd)

    monkeypatch.setattr(System, "fsync", staticmethod(fsync))
    tier = DiskTier(top, budget=1 << 20, keep=keep)
    assert synced == [str(top)] * keep
    tier.close()


def test_names_that_only_look_alike_are_left_alone(top):
    for name in ("kept-0-short", f"kept-{'g' * 32}", f"kept-0-{'0' * 32}.bak", f"kept-{'9' * 10}-{'0' * 32}"):
        (top / name).mkdir()
        (top / name / "x").write_bytes(bytes(1000))
    (top / f"kept-0-{'1' * 32}").symlink_to(top / "kept-0-short")
    before = nbytes_below(top)
    tier = DiskTier(top, budget=500)
    put(tier, 10)
    tier.close()
    assert nbytes_below(top) == before
    assert len(names(top)) == 5


def test_an_empty_tier_that_is_told_to_keep_leaves_nothing(top):
    tier = DiskTier(top, budget=1 << 20, keep=True)
    tier.drop(put(tier, 10))
    tier.close()
    assert names(top) == []


def test_what_is_kept_in_order_can_be_read_without_a_ticket(top):
    tier = DiskTier(top, budget=1 << 20, keep=True)
    put(tier, 10, 4)
    tier.close()
    (file,) = next(top.glob("kept-0-*")).iterdir()
    assert [raw(storage) for storage in read_file(file).storages] == [raw(storages(10, seed=4)[0])]

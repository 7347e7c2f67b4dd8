"""The disk tier without faults: what comes back, what it costs, who may read it, and when it ends."""

import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from codec import addresses, alike, trees
from files import SESSION, document, final_files, names, raw, read_by_library, same, storages
from hypothesis import given
from hypothesis import strategies as st
from profiles import sized

from vllm_omni_session_state.base.errors import TierFaultError, TierFullError
from vllm_omni_session_state.offload import file_format
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.pack import pack_whole
from vllm_omni_session_state.offload.unpack import unpack


@pytest.fixture
def tier(tmp_path):
    made = DiskTier(tmp_path / "parked", budget=1 << 20)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_tier(tmp_path_factory):
    made = DiskTier(tmp_path_factory.mktemp("shared") / "parked", budget=1 << 30)
    yield made
    made.close()


@given(trees())
@sized(1000)
def test_a_session_comes_back_from_its_file_bit_for_bit(shared_tier, tree):
    packed = pack_whole(tree)
    ticket = shared_tier.put(packed.tree, packed.memory, session=SESSION)
    contents = shared_tier.get(ticket)
    back = unpack(contents.tree, contents.storages)
    assert alike(tree, back, {})
    assert addresses(tree) == addresses(back)
    shared_tier.check()
    shared_tier.drop(ticket)


@given(st.lists(st.integers(0, 200), max_size=5), st.integers(0, 9))
@sized(500)
def test_the_safetensors_library_reads_a_file_too(shared_tier, sizes, seed):
    wanted = storages(*sizes, seed=seed)
    ticket = shared_tier.put(document(seed), wanted, session=SESSION)
    found = read_by_library(f"{shared_tier.folder}/{ticket.name}")
    shared_tier.drop(ticket)
    assert found == (document(seed), [storage.tolist() for storage in wanted])


def test_large_storages_come_back_bit_for_bit_each_in_memory_of_its_own(tmp_path):
    tier = DiskTier(tmp_path, budget=1 << 30)
    wanted = storages(3 << 20, 5, (5 << 20) + 1)
    contents = tier.get(tier.put(document(), wanted, session=SESSION))
    assert same(contents, wanted)
    torch.empty(0, dtype=torch.uint8).set_(contents.storages[0]).zero_()
    assert same(tier.get(*tier._tickets.values()), wanted)
    assert [raw(storage) for storage in contents.storages[1:]] == [raw(storage) for storage in wanted[1:]]
    tier.close()


def test_parts_of_a_slab_are_written_like_storages(tier):
    slab = torch.arange(100, dtype=torch.uint8)
    contents = tier.get(tier.put(document(), [slab[10:20], slab[50:]], session=SESSION))
    assert [storage.tolist() for storage in contents.storages] == [list(range(10, 20)), list(range(50, 100))]


def test_the_charge_is_the_bytes_of_the_files(tier):
    tickets = [tier.put(document(n), storages(1000 * n), session=SESSION) for n in range(3)]
    assert tier.nbytes == sum(path.stat().st_size for path in final_files(tier.folder))
    for ticket in tickets:
        tier.drop(ticket)
        tier.check()
    assert tier.nbytes == 0
    assert names(tier.folder) == []


def test_what_exceeds_the_budget_is_refused_and_changes_nothing(tmp_path):
    tier = DiskTier(tmp_path, budget=3000)
    kept = tier.put(document(), storages(1000), session=SESSION)
    before = tier.nbytes
    with pytest.raises(TierFullError, match=r"disk\.budget") as caught:
        tier.put(document(), storages(2500), session=SESSION)
    assert caught.value.room == 3000 - before
    assert tier.nbytes == before
    assert len(names(tier.folder)) == 1
    tier.put(document(), storages(3000 - before - kept.nbytes + 1000), session=SESSION)
    assert tier.nbytes == 3000, "the last byte can be used"


def test_a_ticket_is_good_once_and_for_one_tier(tier, tmp_path):
    other = DiskTier(tmp_path / "parked", budget=1 << 20)
    ticket = tier.put(document(), storages(10), session=SESSION)
    for ask in (other.get, other.drop):
        with pytest.raises(KeyError):
            ask(ticket)
    tier.drop(ticket)
    for ask in (tier.get, tier.drop):
        with pytest.raises(KeyError):
            ask(ticket)
    other.close()


def test_files_are_their_owners_alone_and_names_tell_nothing(tier, tmp_path):
    old = os.umask(0)
    try:
        second = DiskTier(tmp_path / "deep" / "parked", budget=1 << 20)
        ticket = second.put(document(), storages(10), session=SESSION)
    finally:
        os.umask(old)
    assert SESSION not in second.folder + ticket.name
    (path,) = final_files(second.folder)
    modes = [
        stat.S_IMODE(each.stat().st_mode)
        for each in (tmp_path / "deep" / "parked", Path(second.folder), path)
    ]
    assert modes == [0o700, 0o700, 0o600]
    second.close()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(TierFaultError, match=r"others can write there.*disk\.path"):
        DiskTier(tmp_path, budget=1)
    assert names(tmp_path) == []


def test_a_path_that_is_a_file_is_a_typed_error(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(TierFaultError, match="open the disk tier"):
        DiskTier(tmp_path / "x", budget=1)


def test_closing_removes_everything_and_a_closed_tier_says_so(tier, tmp_path):
    ticket = tier.put(document(), storages(10), session=SESSION)
    tier.close()
    assert names(tmp_path / "parked") == []
    assert tier.nbytes == 0
    with pytest.raises(TierFaultError, match="closed"):
        tier.put(document(), storages(10), session=SESSION)
    with pytest.raises(TierFaultError, match="closed"):
        tier.get(ticket)


def test_a_forked_child_cannot_touch_its_parents_files(tier):
    ticket = tier.put(document(), storages(10), session=SESSION)
    child = os.fork()
    if not child:
        status = 1
        try:
            with pytest.raises(TierFaultError, match="forked from"):
                tier.get(ticket)
            assert not tier.begin(ticket)
            tier.drop(ticket)
            tier.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(tier.get(ticket), storages(10))
    tier.check()


def test_a_document_that_the_format_cannot_hold_is_refused(tier, monkeypatch):
    monkeypatch.setattr(file_format, "LONGEST_HEADER", 100)
    with pytest.raises(TierFaultError, match="keep large values in tensors"):
        tier.put(document(), [], session=SESSION)
    assert tier.nbytes == 0


def test_a_folder_that_is_removed_while_in_use_is_a_typed_error(tier):
    ticket = tier.put(document(), storages(10), session=SESSION)
    shutil.rmtree(tier.folder)
    for ask in (lambda: tier.get(ticket), lambda: tier.put(document(), storages(10), session=SESSION)):
        with pytest.raises(TierFaultError, match="removed it while it was in use") as caught:
            ask()
        assert tier.folder in str(caught.value)
    assert tier.nbytes == ticket.nbytes, "what is claimed is claimed until it is dropped"
    tier.drop(ticket)
    assert tier.nbytes == 0
    tier.close()

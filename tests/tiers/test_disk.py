"""One file of the disk tier: what comes back, who may read it, and that no wrong byte ever comes back."""

import json
import os
import shutil
import stat
import struct
from pathlib import Path

import pytest
import torch
from codec import addresses, alike, trees
from files import SESSION, document, final_files, names, read_by_library, same, storages
from hypothesis import given
from hypothesis import strategies as st
from profiles import sized

from vllm_omni_session_state import rebuild, skeleton
from vllm_omni_session_state.errors import BadFileError, TierFaultError, TierFullError
from vllm_omni_session_state.pack import pack, unpack
from vllm_omni_session_state.tiers import session_file
from vllm_omni_session_state.tiers.disk import DiskTier, read_file


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
    packed = pack(tree, take=lambda _: True)
    written = skeleton.write(packed.skeleton, packed.storages)
    ticket = shared_tier.put(written.document, [*packed.storages, *written.extra], session=SESSION)
    contents = shared_tier.get(ticket)
    back = unpack(rebuild.read(contents.document, contents.storages), contents.storages)
    assert alike(unpack(packed.skeleton, packed.storages), back, {})
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
            for ask in (tier.get, tier.drop):
                with pytest.raises(TierFaultError, match="forked from"):
                    ask(ticket)
            tier.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(tier.get(ticket), storages(10))
    tier.check()


def offsets(raw):
    """Every class of place in a file, with an offset of that class."""
    (length,) = struct.unpack("<Q", raw[:8])
    end = 8 + length
    places = {
        "length, low": 0,
        "length, high": 7,
        "first brace": 8,
        "name of the metadata": 12,
        "checksum of the header": raw.index(b'"checksum":"') + 13,
        "identity": raw.index(SESSION.encode()) + 3,
        "checksums of the storages": raw.index(b'"checksums":"') + 14,
        "skeleton": raw.index(b'"skeleton":"') + 30,
        "entry of a storage": raw.index(b'"data_offsets"') + 3,
        "offset of a storage": raw.index(b'"data_offsets":[') + 16,
        "padding or last brace": end - 1,
        "data, first": end,
        "data, middle": (end + len(raw)) // 2,
        "data, border": end + 300,
        "data, last": len(raw) - 1,
    }
    return places | {f"offset {place}": place for place in range(0, len(raw), 7)}


def test_one_changed_byte_anywhere_is_found(tier):
    wanted = storages(300, 200)
    ticket = tier.put(document(), wanted, session=SESSION)
    (path,) = final_files(tier.folder)
    raw = path.read_bytes()
    for place, offset in offsets(raw).items():
        for flip in (0x01, 0x80, 0xFF):
            path.write_bytes(raw[:offset] + bytes([raw[offset] ^ flip]) + raw[offset + 1 :])
            with pytest.raises(BadFileError) as caught:
                tier.get(ticket)
            assert str(path) in str(caught.value), place
            assert "close the session" in str(caught.value)
            with pytest.raises(BadFileError):
                read_file(path)
    path.write_bytes(raw)
    assert same(tier.get(ticket), wanted), "the ticket is as good as before"


def test_a_file_that_ends_early_or_late_is_found(tier):
    wanted = storages(300, 200)
    ticket = tier.put(document(), wanted, session=SESSION)
    (path,) = final_files(tier.folder)
    raw = path.read_bytes()
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    for length in {
        0,
        1,
        7,
        8,
        9,
        30,
        header - 1,
        header,
        header + 1,
        header + 300,
        len(raw) - 1,
        *range(0, 900, 11),
    }:
        path.write_bytes(raw[:length])
        for read in (lambda: tier.get(ticket), lambda: read_file(path)):
            with pytest.raises(BadFileError):
                read()
    path.write_bytes(raw + b"x")
    with pytest.raises(BadFileError):
        tier.get(ticket)
    path.write_bytes(raw)
    assert same(tier.get(ticket), wanted)


def test_a_file_that_shrinks_while_it_is_read_is_found(tier, monkeypatch):
    ticket = tier.put(document(), storages(300), session=SESSION)
    (path,) = final_files(tier.folder)
    real = os.fstat(os.open(path, os.O_RDONLY))
    path.write_bytes(path.read_bytes()[:-100])
    monkeypatch.setattr("vllm_omni_session_state.tiers.folder.System.fstat", staticmethod(lambda fd: real))
    with pytest.raises(BadFileError, match="ends 100 bytes early"):
        tier.get(ticket)


def test_the_file_of_another_session_is_refused(tier):
    mine = tier.put(document(), storages(10), session=SESSION)
    theirs = tier.put(document(), storages(10), session="0" * 32)
    Path(tier.folder, theirs.name).replace(Path(tier.folder, mine.name))
    with pytest.raises(BadFileError, match="of another session"):
        tier.get(mine)


def test_another_file_of_the_same_session_is_refused(tier):
    old = tier.put(document(1), storages(10, seed=1), session=SESSION)
    new = tier.put(document(2), storages(10, seed=2), session=SESSION)
    Path(tier.folder, old.name).replace(Path(tier.folder, new.name))
    with pytest.raises(BadFileError, match="another file than was written"):
        tier.get(new)


@pytest.mark.parametrize("what", ["link", "folder", "pipe", "nothing"])
def test_what_stands_in_a_files_place_is_not_followed(tier, tmp_path, what):
    ticket = tier.put(document(), storages(10), session=SESSION)
    (path,) = final_files(tier.folder)
    path.rename(tmp_path / "real")
    if what == "link":
        path.symlink_to(tmp_path / "real")
    elif what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    with pytest.raises(TierFaultError, match="read a parked session"):
        tier.get(ticket)
    if what != "folder":
        tier.drop(ticket)
        assert tier.nbytes == 0
        assert (tmp_path / "real").exists(), "what a link leads to is not ours"
    else:
        with pytest.raises(TierFaultError, match="remove a parked session"):
            tier.drop(ticket)
        path.rmdir()


def test_a_file_of_another_format_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"storage.0": torch.ones(3)}, tmp_path / "x", metadata={"format": "pt"})
    with pytest.raises(BadFileError, match="not a session's file"):
        read_file(tmp_path / "x")


def lying(change):
    """A file of which the header's checksum is right and something else is not."""
    head = session_file.compose(document(), [memoryview(bytes(10)), memoryview(bytes(6))], session=SESSION)
    header = json.loads(head[8:])
    change(header)
    header["__metadata__"]["checksum"] = "0" * 8
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw = struct.pack("<Q", len(raw)) + raw
    checksum = b"%08x" % session_file.zlib.crc32(raw)
    return raw.replace(b'"checksum":"00000000"', b'"checksum":"' + checksum + b'"', 1) + bytes(16)


LIES = {
    "another format": lambda header: header["__metadata__"].update(format="pt"),
    "another version": lambda header: header["__metadata__"].update(version="2"),
    "no identity": lambda header: header["__metadata__"].pop("session"),
    "a checksum too few": lambda header: header["__metadata__"].update(checksums="00000000"),
    "no checksums": lambda header: header["__metadata__"].update(checksums=None),
    "a skeleton that is no JSON": lambda header: header["__metadata__"].update(skeleton="{"),
    "a skeleton without end": lambda header: header["__metadata__"].update(skeleton="[" * 100_000),
    "another element type": lambda header: header["storage.0"].update(dtype="F32"),
    "a gap": lambda header: header["storage.1"].update(data_offsets=[11, 16], shape=[5]),
    "an overlap": lambda header: header["storage.1"].update(data_offsets=[5, 16], shape=[11]),
    "a negative size": lambda header: header["storage.0"].update(data_offsets=[0, -1], shape=[-1]),
    "a huge size": lambda header: header["storage.1"].update(data_offsets=[10, 2**60], shape=[2**60 - 10]),
    "a size in words": lambda header: header["storage.1"].update(data_offsets=[10, "16"]),
    "another name": lambda header: header.update({"x": header.pop("storage.1")}),
    "one more entry": lambda header: header.update(x=1),
    "one fewer entry": lambda header: header.pop("storage.1"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_under_a_right_checksum_is_refused(tmp_path, lie):
    path = tmp_path / "x"
    path.write_bytes(lying(LIES[lie]))
    with pytest.raises(BadFileError, match="header is of another kind"):
        read_file(path)


def test_it_is_the_lie_for_which_such_a_file_is_refused(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(lying(lambda header: None))
    assert [storage.tolist() for storage in read_file(path).storages] == [[0] * 10, [0] * 6]
    path.write_bytes(lying(lambda header: header["__metadata__"].update(checksums="00000001 00000001")))
    with pytest.raises(BadFileError, match=r"storage\.0 is damaged"):
        read_file(path)


def test_a_document_that_the_format_cannot_hold_is_refused(tier, monkeypatch):
    monkeypatch.setattr(session_file, "LONGEST_HEADER", 100)
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

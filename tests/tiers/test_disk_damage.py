"""A session's file in other hands: damaged, cut, swapped, linked or lying, no wrong byte ever comes back."""

import json
import os
import struct
import zlib
from pathlib import Path

import msgspec
import pytest
import torch
from files import SESSION, document, final_files, same, storages, summed

from vllm_omni_session_state.base.errors import BadFileError, TierFaultError
from vllm_omni_session_state.offload import file_format
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.file_format import read_file


@pytest.fixture
def tier(tmp_path):
    made = DiskTier(tmp_path / "parked", budget=1 << 20)
    yield made
    made.close()


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
        "checksums of the storages": raw.index(b'checksums\\":[') + 14,
        "sizes of the storages": raw.index(b'sizes\\":[') + 10,
        "values": raw.index(b'nodes\\":') + 12,
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
    monkeypatch.setattr(
        "vllm_omni_session_state.offload.file_system.System.fstat", staticmethod(lambda fd: real)
    )
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
def test_what_stands_in_a_files_place_is_not_followed(tier, tmp_path, what, caplog):
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
        tier.drop(ticket)
        assert "cannot remove" in caplog.text
        assert tier.nbytes == ticket.nbytes, "it counts until it is gone"
        path.rmdir()
        tier.put(document(), storages(10), session=SESSION)
        tier.check()


def test_a_file_of_another_format_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"storage.0": torch.ones(3)}, tmp_path / "x", metadata={"format": "pt"})
    with pytest.raises(BadFileError, match="not a session's file"):
        read_file(tmp_path / "x")


def lying(change):
    """A file of which the header's checksum is right and something else is not."""
    head, _ = file_format.compose(document(), [memoryview(bytes(10)), memoryview(bytes(6))], session=SESSION)
    header = json.loads(head[8:])
    told = header["__metadata__"]
    manifest = json.loads(told["manifest"])
    change(header, manifest)
    told["checksum"] = "0" * 8
    if told.get("manifest"):
        told["manifest"] = msgspec.json.encode(manifest).decode()
    header = msgspec.json.encode(header)
    header += b" " * (-len(header) % 8)
    raw = struct.pack("<Q", len(header)) + header
    checksum = b"%08x" % zlib.crc32(raw)
    return raw.replace(b'"checksum":"00000000"', b'"checksum":"' + checksum + b'"', 1) + bytes(16)


def entry(number, **words):
    return lambda header, _: header[f"storage.{number}"].update(words)


def told(**words):
    return lambda header, _: header["__metadata__"].update(words)


def says(**words):
    return lambda _, manifest: manifest.update(words)


LIES = {
    "another format": told(format="pt"),
    "another version": told(version="1"),
    "one more word": told(more=""),
    "no manifest": told(manifest=None),
    "a manifest that is no JSON": lambda header, _: header["__metadata__"].update(manifest="") or None,
    "no identity": lambda _, manifest: manifest.pop("session"),
    "an identity that is none": says(session=5),
    "a checksum too few": says(checksums=[0]),
    "a checksum too many": says(checksums=[0, 0, 0]),
    "no checksums": says(checksums=None),
    "a checksum that is none": says(checksums=[0, 2**32]),
    "something more in the manifest": says(more=1),
    "a tree that is none": says(tree="{"),
    "a tree without end": says(tree=json.loads("[" * 900 + "]" * 900)),
    "another element type": entry(0, dtype="F32"),
    "a gap": entry(1, data_offsets=[11, 16], shape=[5]),
    "an overlap": entry(1, data_offsets=[5, 16], shape=[11]),
    "a negative size": entry(0, data_offsets=[0, -1], shape=[-1]),
    "a huge size": entry(1, data_offsets=[10, 2**60], shape=[2**60 - 10]),
    "a size in words": entry(1, data_offsets=[10, "16"]),
    "another size in the manifest": says(sizes=[6, 10]),
    "a negative size in the manifest": says(sizes=[17, -1]),
    "a huge size in the manifest": says(sizes=[10, 2**62]),
    "one size fewer in the manifest": says(sizes=[16]),
    "another name": lambda header, _: header.update({"x": header.pop("storage.1")}),
    "another order": lambda header, _: header.update({"storage.0": header.pop("storage.0")}),
    "one more entry": lambda header, _: header.update(x=1),
    "one fewer entry": lambda header, _: header.pop("storage.1"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_under_a_right_checksum_is_refused(tmp_path, lie):
    path = tmp_path / "x"
    path.write_bytes(lying(LIES[lie]))
    with pytest.raises(BadFileError, match="header is of another kind"):
        read_file(path)


@pytest.mark.parametrize("sizes", [[10, 5], [10, 7], [10, 2**62], []], ids=str)
def test_a_file_of_another_length_than_its_sizes_say_is_refused_before_any_memory_is_taken(
    tmp_path, sizes, monkeypatch
):
    """All of the header is what would be written for these sizes."""
    told = {
        "session": SESSION,
        "sizes": sizes,
        "checksums": [0] * len(sizes),
        "tree": {"nodes": [], "root": None},
    }
    path = tmp_path / "x"
    path.write_bytes(summed(json.dumps(told), sizes) + bytes(16))
    monkeypatch.setattr(file_format, "host_storages", pytest.fail)
    with pytest.raises(BadFileError, match=r"bytes where \d+ should be"):
        read_file(path)


def test_it_is_the_lie_for_which_such_a_file_is_refused(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(lying(lambda *_: None))
    assert [storage.tolist() for storage in read_file(path).storages] == [[0] * 10, [0] * 6]
    path.write_bytes(lying(says(checksums=[1, 1])))
    with pytest.raises(BadFileError, match=r"storage\.0 is damaged"):
        read_file(path)

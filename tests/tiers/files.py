"""Sessions to put into files, and whether what came back is what was put."""

from __future__ import annotations

import json
import os
import secrets
import zlib
from pathlib import Path

import msgspec
import safetensors
import torch

from vllm_omni_session_state.base.ids import fingerprint
from vllm_omni_session_state.offload import file_format, schema
from vllm_omni_session_state.offload.file_format import Manifest
from vllm_omni_session_state.offload.file_system import close_folder
from vllm_omni_session_state.offload.memory import views_of

SESSION = fingerprint("robot").hex()


def storages(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).untyped_storage()
        for size in sizes
    ]


def document(number=0):
    return schema.Tree([schema.List([schema.Int(f"{number:x}"), "ü"])], 0)


def file_of(path, tree, wanted):
    """A file of any JSON in its values' place, under checksums that are right."""
    views = views_of(wanted)
    sizes, sums = [view.nbytes for view in views], [zlib.crc32(view) for view in views]
    manifest = json.dumps({"session": SESSION, "sizes": sizes, "checksums": sums, "tree": tree})
    path.write_bytes(summed(manifest, sizes) + b"".join(views))
    return path


def summed(manifest, sizes, **words):
    """Length and header of a file with that manifest, under a checksum that is right."""
    told = {"checksum": "0" * 8, "format": file_format.FORMAT, "version": file_format.VERSION} | words
    head = file_format._blank(file_format._Metadata(**told, manifest=manifest), sizes)
    return file_format._with_checksum(head, b"%08x" % zlib.crc32(head))


def same(contents, wanted, number=0):
    got = [raw(storage) for storage in contents.storages]
    return contents.tree == document(number) and got == [raw(storage) for storage in wanted]


def raw(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def read_by_library(path):
    """A file as the safetensors library reads it: its values' tree and lists of bytes."""
    with safetensors.safe_open(path, "pt") as opened:
        names = sorted(opened.keys(), key=lambda name: int(name.split(".")[1]))
        found = [opened.get_tensor(name).tolist() for name in names]
        return msgspec.json.decode(opened.metadata()["manifest"], type=Manifest).tree, found


def final_files(folder):
    return sorted(Path(folder).glob("*.safetensors"))


def names(folder):
    """What is in a folder."""
    return sorted(path.name for path in Path(folder).iterdir())


def leave_kept(top, number, *sizes, age=0):
    """A folder of files as a worker of that number leaves it, with ``keep``; the larger the age the older."""
    folder = Path(top) / f"kept-{number}-{secrets.token_hex(16)}"
    folder.mkdir()
    for index, size in enumerate(sizes):
        file = folder / f"{index}.safetensors"
        file.write_bytes(bytes(size))
        os.utime(file, ns=(10**18 - age, 10**18 - age))
    return folder.name


def die(tier):
    """What becomes of a tier whose process is killed: its locks go, its files stay."""
    close_folder(tier._folder.fd)
    close_folder(tier._folder._top_fd)


def nbytes_below(top):
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in Path(top).rglob("*") if path.is_file())

"""Sessions to put into files, and whether what came back is what was put."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

import safetensors
import torch

from vllm_omni_session_state.base.ids import fingerprint
from vllm_omni_session_state.offload.file_system import close_folder

SESSION = fingerprint("robot").hex()


def storages(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).untyped_storage()
        for size in sizes
    ]


def document(number=0):
    return {"version": 1, "storages": 0, "nodes": [["list", [["int", f"{number:x}"], "ü"]]], "root": 0}


def same(contents, wanted, number=0):
    got = [raw(storage) for storage in contents.storages]
    return contents.document == document(number) and got == [raw(storage) for storage in wanted]


def raw(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def read_by_library(path):
    """A file as the safetensors library reads it: document and lists of bytes."""
    with safetensors.safe_open(path, "pt") as opened:
        names = sorted(opened.keys(), key=lambda name: int(name.split(".")[1]))
        found = [opened.get_tensor(name).tolist() for name in names]
        return json.loads(opened.metadata()["skeleton"]), found


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

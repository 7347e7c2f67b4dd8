"""Sessions to put into files, and whether what came back is what was put."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors
import torch

from vllm_omni_session_state.ids import fingerprint

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

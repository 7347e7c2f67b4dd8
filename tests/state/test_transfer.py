"""Slabs: every bit is in them, in huge pages or small ones, and no memory is a ``MemoryError``."""

import mmap
from pathlib import Path

import pytest
import torch

from vllm_omni_session_state.offload import copy

SIZES = (3 << 20, 1, 700, 5 << 20)


def storages():
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=draw).untyped_storage() for size in SIZES
    ]


def content(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def no_memory(*_, **__):
    raise RuntimeError("cannot allocate memory")


@pytest.mark.parametrize("huge_pages", [True, False])
def test_a_large_slab_holds_every_bit_with_huge_pages_and_without(monkeypatch, huge_pages):
    if not huge_pages:  # as on a system that has none
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    originals = storages()
    slab = copy.to_slab(originals)
    assert slab.nbytes == copy.slab_nbytes(SIZES) > sum(SIZES)
    assert slab.untyped_storage().nbytes() == slab.nbytes, "it is charged for what it takes"
    back = copy.from_slab(slab, SIZES, [torch.device("cpu")] * len(SIZES))
    assert all(torch.equal(content(a), content(b)) for a, b in zip(back, originals, strict=True))
    assert not {storage.data_ptr() for storage in back} & {storage.data_ptr() for storage in originals}


def test_a_slab_for_which_the_machine_has_no_memory_is_a_memory_error(monkeypatch):
    originals = storages()
    monkeypatch.setattr(torch, "empty", no_memory)
    with pytest.raises(MemoryError, match=f"no host memory for {copy.slab_nbytes(SIZES)} bytes"):
        copy.to_slab(originals)


def test_the_memory_of_a_slab_goes_back_when_nobody_holds_it():
    def mapped():
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    before = mapped()
    slab = copy.to_slab([torch.zeros(64 << 20, dtype=torch.uint8).untyped_storage()])
    assert mapped() - before >= 64 << 20
    del slab
    assert mapped() - before < 8 << 20

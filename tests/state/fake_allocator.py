"""A fake of torch's ``CachingHostAllocator``: its rule and its figures, over ordinary memory."""

import weakref

import pytest
import torch

from vllm_omni_session_state.offload import copy, page_locked


class _Memory(bytearray):
    """Tells when nobody holds it any more."""


class FakeAllocator:
    """Rounds each block up to a power of two, and keeps one that is let go of for the next of its size.

    Attributes:
        allocated: Bytes that are page-locked: in use and cached, as in ``torch.cuda.host_memory_stats()``.
        active: Of these, in use.
        peak: The most that were ever allocated at once.
        made: Blocks that were page-locked anew.
    """

    def __init__(self):
        self.allocated = self.active = self.peak = self.made = 0
        self._free = {}  # size of a block -> how many

    def allocate(self, nbytes):
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        size = 1
        while size < nbytes:
            size *= 2
        if self._free.get(size):
            self._free[size] -= 1
        else:
            self.allocated += size
            self.made += 1
        self.peak = max(self.peak, self.allocated)
        self.active += size
        memory = _Memory(nbytes)
        weakref.finalize(memory, self._let_go, size)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def give_back(self):
        self.allocated -= sum(size * count for size, count in self._free.items())
        self._free.clear()

    def _let_go(self, size):
        self.active -= size
        self._free[size] = self._free.get(size, 0) + 1


def installed(monkeypatch):
    """A fake in the place of torch's, as if every session lay on an accelerator."""
    fake = FakeAllocator()
    monkeypatch.setattr(page_locked, "allocate", fake.allocate)
    monkeypatch.setattr(page_locked, "give_back", fake.give_back)
    monkeypatch.setattr(page_locked, "is_used", lambda: True)
    monkeypatch.setattr(copy, "on_accelerator", lambda _: True)
    return fake


@pytest.fixture
def fake(monkeypatch):
    """See ``installed()``."""
    return installed(monkeypatch)

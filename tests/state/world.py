"""What the values of one test case share, and which memory of it is alive.

The memory is made here and remembered by weak references, so that this is told without asking the product.
"""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef


class MyBuffer(bytearray):
    """A bytearray that takes weak references."""


class World:
    """What the values of one case share: a tensor, an array, a buffer, a list, a leaf."""

    def __init__(self):
        self.memory = []  # (where its owner is, by a weak reference; first byte; bytes)
        self.tensor = self.note(torch.arange(16, dtype=torch.float32))
        self.complex = self.note(torch.arange(8).to(torch.complex64) * (1 + 2j))
        self.leaf = self.note(torch.ones(8, requires_grad=True))
        self.array = self.note(np.arange(24, dtype=np.int16).reshape(4, 6).copy())
        self.buffer = self.note(MyBuffer(b"0123456789abcdef"))
        self.list = [self.note(torch.full((5,), 3, dtype=torch.uint8)), 7]
        self.dict = {"a": self.note(torch.full((6,), 4, dtype=torch.int16)), "list": self.list}

    def note(self, value):
        """Remember the memory that was made for a value."""
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            self.memory.append((StorageWeakRef(storage).expired, storage.data_ptr(), storage.nbytes()))
            return value
        if isinstance(value, np.ndarray):
            start = value.ctypes.data
        else:
            start = ctypes.addressof(ctypes.c_char.from_buffer(value))
        reference = weakref.ref(value)
        self.memory.append((lambda: reference() is None, start, memoryview(value).nbytes))
        return value

    def fresh(self, *shape, dtype=torch.float32):
        return self.note(torch.ones(shape, dtype=dtype))

    def let_go(self):
        """Hold no value any more."""
        self.tensor = self.complex = self.leaf = self.array = self.buffer = self.list = self.dict = None

    def alive(self):
        """The bytes of what was made that is still there, each once."""
        spans = sorted(
            (start, start + nbytes) for gone, start, nbytes in self.memory if nbytes and not gone()
        )
        total = reached = 0
        for start, stop in spans:
            total += max(0, stop - max(start, reached))
            reached = max(reached, stop)
        return total

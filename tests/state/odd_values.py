"""Values of every kind that a model may hold, made over a few that they share: see ``world.py``."""

from __future__ import annotations

import array
import collections
import functools
import io
import mmap
import tempfile
import types
import weakref
from dataclasses import dataclass

import numpy as np
import torch

from vllm_omni_session_state.accounting.append_list import AppendTrackedList

Pair = collections.namedtuple("Pair", "left right")  # noqa: PYI024 - what a model may hold


@dataclass
class Record:
    held: object


@dataclass(frozen=True, slots=True)
class Slotted:
    held: object


class Stranger:
    """A class that nobody knows."""

    def __init__(self, held):
        self.held = held

    def method(self):
        return self.held


class MyDict(dict):
    """A subclass is another type."""


class MyList(list):
    """Likewise."""


class MyArray(np.ndarray):
    """Likewise."""


class MyTensor(torch.Tensor):
    """Likewise."""


class Wrapper(torch.Tensor):
    """A tensor without memory of its own over one that has some."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def times_ten(grad):
    return grad * 10


def set_to(value, **attributes):
    for name, held in attributes.items():
        setattr(value, name, held)
    return value


def cut(w, nbytes):
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(nbytes)
    return w.note(tensor)


def hooked(w, method="register_hook"):
    leaf = w.fresh(4).requires_grad_()
    getattr(leaf, method)(times_ten)
    return leaf


def with_gradient(w):
    leaf = w.fresh(4).requires_grad_()
    leaf.grad = w.fresh(4)
    return leaf


def with_gradients_of(w, dtype):
    leaf = w.fresh(4).requires_grad_()
    leaf.grad_dtype = dtype
    return leaf


def inference(w, **options):
    with torch.inference_mode():
        return w.note(torch.ones(4, **options))


def numpyed(w):
    tensor = w.fresh(7)
    tensor.numpy()
    return tensor


def loaded(w):
    file = io.BytesIO()
    torch.save(torch.ones(9), file)
    file.seek(0)
    return w.note(torch.load(file))


def mapped(w):
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(64)
        return w.note(torch.from_file(file.name, shared=True, size=16))


def mapped_array():
    with tempfile.NamedTemporaryFile() as file:
        return np.memmap(file.name, np.uint8, "w+", shape=(40,))


def sparse(w):
    return torch.sparse_coo_tensor(w.note(torch.tensor([[0, 2]])), w.fresh(2), (4,))


def csr(w):
    rows, columns = w.note(torch.tensor([0, 1, 2])), w.note(torch.tensor([0, 1]))
    return torch.sparse_csr_tensor(rows, columns, w.fresh(2), (2, 2))


def deep(tip, levels=150):
    for _ in range(levels):
        tip = [tip]
    return tip


def knot(w):
    made = [w.list]
    made.append(made)
    return made


def tuple_in_itself(w):
    inner = [w.list]
    made = (inner,)
    inner.append(made)
    return made


def objects_of(*values):
    made = np.empty(len(values), object)
    for place, value in enumerate(values):
        made[place] = value
    return made


def frozen(made):
    made.flags.writeable = False
    return made


def closed_over(held):
    return lambda: held


def quantized(w):
    return w.note(torch.quantize_per_tensor(torch.ones(6), 0.1, 3, torch.qint8))


TENSORS = {
    "tensor": lambda w: w.tensor,
    "view": lambda w: w.tensor[2:9],
    "strided": lambda w: w.tensor.view(4, 4).t()[1:],
    "expanded": lambda w: w.tensor[:1].expand(3, 4),
    "zero-dimensional": lambda w: w.tensor[3],
    "no elements of a storage": lambda w: w.tensor[3:3],
    "bfloat16": lambda w: w.fresh(3, dtype=torch.bfloat16),
    "complex": lambda w: w.complex,
    "real part": lambda w: w.complex.real,
    "of one inference": inference,
    "of one inference, wants gradients": lambda w: inference(w, requires_grad=True),
    "no elements": lambda w: torch.empty(0),
    "no elements in three dimensions": lambda w: torch.empty(2, 0, 3),
    "leaf": lambda w: w.leaf,
    "detached leaf": lambda w: w.leaf.detach(),
    "leaf with a gradient": with_gradient,
    "leaf with a hook": hooked,
    "leaf with a hook for afterwards": lambda w: hooked(w, "register_post_accumulate_grad_hook"),
    "leaf with gradients of another type": lambda w: with_gradients_of(w, torch.bfloat16),
    "graph": lambda w: w.note(w.leaf * 2),
    "with attributes": lambda w: set_to(w.fresh(3), note=w.list),
    "conjugated": lambda w: w.complex.conj(),
    "negated": lambda w: w.complex.conj().imag,
    "zeros without memory": lambda w: torch._efficientzerotensor(3),
    "emptied": lambda w: cut(w, 0),
    "cut": lambda w: cut(w, 12),
    "with room": lambda w: cut(w, 200),
    "shared memory": lambda w: w.note(torch.ones(4).share_memory_()),
    "seen by numpy": numpyed,
    "loaded": loaded,
    "file": mapped,
    "over the array": lambda w: torch.from_numpy(w.array),
    "over a part of the array": lambda w: torch.from_numpy(w.array[1:3]),
    "over a part beside it": lambda w: torch.from_numpy(w.array[2:]),
    "over the buffer": lambda w: torch.frombuffer(w.buffer, dtype=torch.uint8),
    "over a part of the buffer": lambda w: torch.frombuffer(w.buffer, dtype=torch.int16, offset=4),
    "over an array of its own": lambda w: torch.from_numpy(w.note(np.ones(11))),
    "over the tensor's head": lambda w: torch.from_numpy(w.tensor.numpy()[:5]),
    "by dlpack": lambda w: torch.from_dlpack(w.tensor),
    "parameter": lambda w: torch.nn.Parameter(w.fresh(4)),
    "parameter over the tensor": lambda w: torch.nn.Parameter(w.tensor),
    "subclass": lambda w: w.tensor.as_subclass(MyTensor),
    "wrapper": lambda w: Wrapper(w.tensor),
    "sparse": sparse,
    "sparse rows": csr,
    "quantized": quantized,
    "meta": lambda w: torch.empty(3, device="meta"),
    "storage": lambda w: w.tensor.untyped_storage(),
}

ARRAYS = {
    "array": lambda w: w.array,
    "array view": lambda w: w.array[1:, ::2],
    "array backwards": lambda w: w.array[::-1],
    "array of no elements": lambda w: w.array[:0],
    "array transposed": lambda w: w.note(np.asfortranarray(np.ones((3, 4)))),
    "array of one": lambda w: w.note(np.array(5.0)),
    "array stretched": lambda w: np.broadcast_to(w.array[:1, :1], (3, 4)),
    "array strided": lambda w: np.lib.stride_tricks.as_strided(w.array[1:], (2, 2), (2, 2)),
    "array of text": lambda w: w.note(np.array(["ab", "c"])),
    "array not to be written": lambda w: frozen(w.note(np.ones(3))),
    "array over bytes": lambda w: np.frombuffer(b"01234567", np.uint8),
    "array over the buffer": lambda w: np.frombuffer(w.buffer, np.uint8, offset=4),
    "array over the tensor": lambda w: w.tensor.numpy(),
    "array over a part of the tensor": lambda w: w.tensor.numpy()[3:7],
    "array in a file": lambda w: mapped_array(),
    "array subclass": lambda w: w.array.view(MyArray),
    "array masked": lambda w: np.ma.array(w.array[0], copy=False),
    "array of objects": lambda w: w.note(objects_of(w.list, w.tensor)),
    "array of fields": lambda w: w.note(np.zeros(3, [("a", "i4"), ("b", "f8")])),
    "scalar of fields": lambda w: w.note(np.zeros(1, [("a", "i4")]))[0],
    "scalar": lambda w: np.float32(0.1),
    "memoryview": lambda w: memoryview(w.array),
    "buffer": lambda w: w.buffer,
    "array.array": lambda w: w.note(array.array("d", [1, 2])),
    "mmap": lambda w: w.note(mmap.mmap(-1, 32)),
}

CONTAINERS = {
    "list": lambda w: w.list,
    "dict": lambda w: w.dict,
    "tuple of the list": lambda w: (w.list, w.tensor),
    "ordered": lambda w: collections.OrderedDict(a=w.list),
    "ordered with an attribute": lambda w: set_to(collections.OrderedDict(a=w.list), note=w.tensor),
    "ring": lambda w: collections.deque([w.list, w.tensor], maxlen=3),
    "holds itself": knot,
    "tuple that holds itself": tuple_in_itself,
    "deep": lambda w: deep(w.list),
    "deep tensor": lambda w: deep(w.tensor),
    "default": lambda w: collections.defaultdict(list, a=w.list),
    "dict subclass": lambda w: MyDict(a=w.list),
    "list subclass": lambda w: MyList([w.list]),
    "chunks": lambda w: AppendTrackedList([w.tensor, w.list]),
    "named tuple": lambda w: Pair(w.list, w.tensor),
    "dataclass": lambda w: Record(w.list),
    "dataclass with slots": lambda w: Slotted(w.tensor),
    "set": lambda w: {w.tensor},
    "frozen set": lambda w: frozenset({w.tensor}),
    "namespace": lambda w: types.SimpleNamespace(held=w.list),
    "proxy": lambda w: types.MappingProxyType(w.dict),
    "user's dict": lambda w: collections.UserDict(a=w.list),
    "user's list": lambda w: collections.UserList([w.tensor]),
    "chain": lambda w: collections.ChainMap(w.dict),
    "keyed by a tensor": lambda w: {w.tensor: w.list},
    "keyed by a tuple with a tensor": lambda w: {(1, w.tensor): 2},
}

OPAQUE = {
    "stranger with the list": lambda w: Stranger(w.list),
    "stranger with the tensor": lambda w: Stranger([w.tensor, w.leaf]),
    "closure": lambda w: closed_over(w.list),
    "method of the list": lambda w: w.list.append,
    "method of a stranger": lambda w: Stranger(w.dict).method,
    "partial": lambda w: functools.partial(print, w.list, held=w.tensor),
    "iterator": lambda w: iter(w.list),
    "generator": lambda w: (item for item in w.list),
    "weak": lambda w: [weakref.ref(w.tensor), w.tensor],
    "module": lambda w: torch.nn.ParameterList([w.leaf]),
    "object": lambda w: object(),
    "random": lambda w: torch.Generator(),
    "type": lambda w: Stranger,
    "function": lambda w: times_ten,
}
"""What is inside of these is not counted: they are nobody's bytes."""

ATOMS = {
    "None": lambda w: None,
    "text": lambda w: "aé\ud800",
    "bytes": lambda w: b"1234567",
    "number": lambda w: 2**90,
    "not a number": lambda w: float("nan"),
    "dtype": lambda w: torch.bfloat16,
    "size": lambda w: torch.Size([2, 3]),
}

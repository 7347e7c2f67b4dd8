"""A description of a value that is equal for two of them if nobody can tell them apart.

Bits, kinds, properties, which names lead to one object, and which tensors and arrays lie in one memory and
where in it. It holds nothing, and changes nothing: ``Tensor.numpy()`` would.
"""

from __future__ import annotations

import array
import collections
import ctypes
import functools
import mmap
import types
import weakref

import numpy as np
import torch

ATOMS = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size)
BY_THEIR_ATTRIBUTES = (collections.UserDict, collections.UserList, types.SimpleNamespace)
SEQUENCES = (list, tuple, collections.deque, set, frozenset)


class Picture:
    """The description of one value, while it is made."""

    def __init__(self):
        self.met = {}
        self.held = []  # so that no identity is used twice meanwhile
        self.extents = []

    def of(self, value):
        if isinstance(value, ATOMS):
            return (type(value).__name__, value)
        if isinstance(value, float | complex | np.generic) and not isinstance(value, np.void):
            return (type(value).__name__, np.array(value).tobytes())
        if id(value) in self.met:
            return ("again", self.met[id(value)])
        self.met[id(value)] = len(self.met)
        self.held.append(value)
        kinds = (kind for kind in KINDS if isinstance(value, kind))
        return (type(value).__qualname__, *KINDS[next(kinds, object)](self, value))

    def tensor(self, value):
        about = [value.layout, value.dtype, value.device, tuple(value.shape), value.requires_grad]
        about += [value.is_leaf, value.is_inference(), value.is_conj(), value.is_neg()]
        about += [value._is_zerotensor(), self.of(vars(value)), self.of(value._backward_hooks or None)]
        if value.is_leaf:
            about.append(value.grad_dtype if value.requires_grad else None)
            about += [self.of(value._post_accumulate_grad_hooks), self.of(value.grad)]
        else:
            nodes = [node for node, _ in value.grad_fn.next_functions]
            about += [self.of(getattr(node, "variable", None)) for node in nodes]
        if value.layout is torch.sparse_coo:
            return [*about, self.of(value._indices()), self.of(value._values())]
        if value.layout is torch.sparse_csr:
            return [*about, self.of(value.crow_indices()), self.of(value.values())]
        if value.is_quantized:
            about += [value.q_scale(), value.q_zero_point()]
        try:
            storage = value.untyped_storage()
            start, nbytes = storage.data_ptr(), storage.nbytes()
        except RuntimeError:
            return about
        about += [value.stride(), value.storage_offset(), nbytes, storage.resizable(), storage.is_shared()]
        bits = ctypes.string_at(start, nbytes) if start and nbytes else b""
        return [*about, bits, self.memory(start, nbytes)]

    def storage(self, value):
        return [self.memory(value.data_ptr(), value.nbytes())]

    def array(self, value):
        about = [value.dtype.str, value.shape, value.strides, value.flags.writeable, value.flags.owndata]
        owner = value
        while isinstance(base := base_of(owner), np.ndarray):
            owner = base
        if value.size:
            about.append(self.memory(owner.ctypes.data, owner.nbytes, at=value.ctypes.data))
        if value.dtype.hasobject:
            return [*about, [self.of(item) for item in value.ravel().tolist()]]
        return [*about, value.tobytes(), self.of(getattr(value, "__dict__", None))]

    def buffer(self, value):
        start = ctypes.addressof(ctypes.c_char.from_buffer(value))
        return [bytes(value), self.memory(start, memoryview(value).nbytes)]

    def mapping(self, value):
        items = [(self.of(key), self.of(item)) for key, item in value.items()]
        made = repr(getattr(value, "default_factory", None))
        return [items, made, self.of(getattr(value, "__dict__", None))]

    def sequence(self, value):
        return [[self.of(item) for item in value], getattr(value, "maxlen", None)]

    def attributes(self, value):
        return [self.of(vars(value))]

    def function(self, value):
        return [id(value), [self.of(cell.cell_contents) for cell in value.__closure__ or ()]]

    def other(self, value):
        """An object: it must be the very same one, with what it holds."""
        if type(value).__module__ == "odd_values" and not isinstance(value, type):
            return [self.of(value.held)]
        return [id(value)]

    def memory(self, start, nbytes, at=None):
        """A place in memory, by its number."""
        if not start or not nbytes:
            return None
        self.extents.append((start, start + nbytes, start if at is None else at))
        return len(self.extents)

    def places(self):
        """Of each piece of memory: which block of all that overlap it is in, and where in it."""
        blocks = []
        for start, stop, _ in sorted(self.extents):
            if blocks and start < blocks[-1][1]:
                blocks[-1][1] = max(stop, blocks[-1][1])
            else:
                blocks.append([start, stop])
        numbers, found = {}, []
        for start, stop, at in self.extents:
            block = next(block for block in blocks if block[0] <= start < block[1])
            number = numbers.setdefault(block[0], len(numbers))
            found.append((number, start - block[0], stop - start, at - start))
        return found


KINDS = {
    torch.Tensor: Picture.tensor,
    torch.UntypedStorage: Picture.storage,
    np.ndarray: Picture.array,
    np.void: lambda _, value: [value.tobytes()],
    (bytearray, mmap.mmap, array.array): Picture.buffer,
    memoryview: lambda self, value: [value.tobytes(), self.of(value.obj)],
    BY_THEIR_ATTRIBUTES: Picture.attributes,
    collections.ChainMap: lambda self, value: [self.of(value.maps)],
    (dict, types.MappingProxyType): Picture.mapping,
    SEQUENCES: Picture.sequence,
    weakref.ref: lambda self, value: [id(value), self.of(value())],
    types.FunctionType: Picture.function,
    (types.BuiltinMethodType, types.MethodType): lambda self, value: [id(value), self.of(value.__self__)],
    functools.partial: lambda self, value: [id(value), self.of(value.args), self.of(value.keywords)],
    object: Picture.other,
}


def base_of(array):
    """What has the memory of an array, through the views that NumPy makes of strides."""
    return array.base.base if type(array.base).__name__ == "DummyArray" else array.base


def picture(value):
    """A description of ``value``."""
    taking = Picture()
    described = taking.of(value)
    return described, taking.places()


def of_session(session):
    """A description of all that a session holds."""
    objects = {
        name: obj.export_payload() if obj.live is None else obj.live for name, obj in session.objects.items()
    }
    return picture({"attrs": session.attrs, "objects": objects})

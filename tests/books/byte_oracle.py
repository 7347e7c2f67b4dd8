"""An oracle for footprints: it makes the memory itself, so it knows which allocations each value keeps alive.

It never looks into a finished value. Addresses are taken once, from the fresh allocation, through ctypes
or ``data_ptr``; what a view or a container keeps alive is written down when it is made.
"""

from __future__ import annotations

import array
import collections
import ctypes
import itertools
import mmap
import types
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from vllm_omni_session_state.accounting.allocations import Allocation

pinned_starts: set[int] = set()
"""Start addresses of the storages that this process pretends are page-locked."""


_different = itertools.count(1)


@dataclass
class Record:
    held: object


@dataclass(frozen=True, slots=True)
class SlottedRecord:
    held: object
    more: object = None


Pair = collections.namedtuple("Pair", "left right")  # noqa: PYI024  # the untyped kind is to be walked too


class TaggedArray(np.ndarray):
    """A NumPy subclass without behaviour."""


class TaggedTensor(torch.Tensor):
    """A torch subclass without behaviour."""


class NotedBytes(bytes):
    """Bytes that can carry attributes."""


class TaggedDict(dict):
    """A dict whose methods fail: what it holds is in it all the same."""

    def __iter__(self):
        raise RuntimeError("no iteration")

    def __len__(self):
        return 10**12

    values = keys = items = __getitem__ = __iter__


class Box:
    """A class that the walk knows only because a test registers it."""

    def __init__(self, held):
        self.held = held


class Stranger:
    """A class that nobody registers."""

    def __init__(self, held):
        self.held = held


@dataclass
class Node:
    value: object
    own: frozenset[Allocation]  # what it keeps alive by itself
    children: list[Node] = field(default_factory=list)

    def __repr__(self):
        nbytes = sum(each.nbytes for each in self.own)
        return f"{type(self.value).__name__}[{nbytes} B, {len(self.children)} children]"


def span(device: str, start: int, nbytes: int) -> frozenset[Allocation]:
    return frozenset({Allocation(device, start, nbytes)} if nbytes else ())


def reach(roots: list[Node]) -> set[Allocation]:
    """All that is reachable from ``roots`` over the children that were written down; see ``apart``."""
    todo, seen, found = list(roots), set(), set()
    while todo:
        node = todo.pop()
        if id(node) not in seen:
            seen.add(id(node))
            found |= node.own
            todo += node.children
    return apart(found)


def apart(found: set[Allocation]) -> set[Allocation]:
    """Without what lies within another one: that is a part of which torch does not know the owner."""
    return {each for each in found if not any(within(each, other) for other in found - {each})}


def within(part: Allocation, whole: Allocation) -> bool:
    inside = whole.start <= part.start and part.start + part.nbytes <= whole.start + whole.nbytes
    return part.device == whole.device and inside


def per_device(found: set[Allocation]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in found:
        sums[each.device] = sums.get(each.device, 0) + each.nbytes
    return sums


def allocation(tensor, device="cpu"):
    """That of a whole, contiguous tensor that owns its storage."""
    return Allocation(device, tensor.data_ptr(), tensor.numel() * tensor.element_size())


def allocations(*tensors):
    return tuple(sorted(map(allocation, tensors)))


def array_allocation(owner):
    return Allocation("cpu", owner.ctypes.data, owner.nbytes)


def torch_leaf(draw) -> Node:
    """A value over a fresh torch storage of 4 to 64 bytes."""
    block = torch.zeros(4 * draw(st.integers(1, 16)), dtype=torch.uint8)
    start, nbytes = block.data_ptr(), len(block)
    device = "cpu"
    if draw(st.booleans()):
        pinned_starts.add(start)
        device = "pinned"
    a = draw(st.integers(0, nbytes - 1))
    b = draw(st.integers(a + 1, nbytes))
    forms = [
        lambda: block,
        lambda: block[a:b],
        lambda: block[::2],
        lambda: block[:1].expand(7),
        lambda: block.view(torch.float32).view(1, -1).t(),
        lambda: torch.nn.Parameter(block.view(torch.float32)),
        lambda: block[a:b].as_subclass(TaggedTensor),
        block.untyped_storage,
        block.numpy,
        lambda: block.numpy()[a:b],
        lambda: block.numpy()[::-1],
        lambda: block[a:b].numpy().view(TaggedArray),
        lambda: np.frombuffer(block.numpy(), np.uint8, count=b - a, offset=a),
        lambda: memoryview(block.numpy()[a:b]),
        lambda: torch.from_numpy(block.numpy()[a:b]),
    ]
    which = draw(st.integers(0, len(forms) - 1))
    value = forms[which]()
    if which == len(forms) - 1:  # a part of a foreign buffer; the pretence knows only where the whole begins
        return Node(value, span(device if a == 0 else "cpu", start + a, b - a))
    return Node(value, span(device, start, nbytes))


def numpy_leaf(draw) -> Node:
    """A value over a fresh NumPy allocation of 4 to 64 bytes."""
    block = np.zeros(4 * draw(st.integers(1, 16)), np.uint8)
    start, nbytes = block.ctypes.data, block.size
    a = draw(st.integers(0, nbytes - 1))
    b = draw(st.integers(a + 1, nbytes))
    whole = span("cpu", start, nbytes)
    part = span("cpu", start + a, b - a)
    every_second = span("cpu", start + a, 2 * ((b - a - 1) // 2) + 1)
    forms = [
        lambda: (block, whole),
        lambda: (block[a:b], whole),
        lambda: (block[a:b][::-2], whole),
        lambda: (np.broadcast_to(block[:1], (9, 3)), whole),
        lambda: (as_strided(block[a:], (3, 3), (0, 0)), whole),
        lambda: (sliding_window_view(block[:4], 2), whole),
        lambda: (block.view([("x", "u1"), ("y", "u1")])[::-1]["y"], whole),
        lambda: (block.view([("x", "u1"), ("y", "u1")])[0], whole),
        lambda: (block.reshape(2, -1).T, whole),
        lambda: (block[a:b].view(TaggedArray), whole),
        lambda: (np.ma.array(block[a:b], copy=False), whole),
        lambda: (memoryview(block)[a:b], whole),
        lambda: (memoryview(block[::-1]), whole),
        lambda: (np.asarray(memoryview(block)[a:b]), whole),
        lambda: (torch.from_numpy(block), whole),
        lambda: (torch.from_numpy(block[a:b]), part),
        lambda: (torch.from_numpy(block[a:b:2]), every_second),
        lambda: (torch.from_numpy(block[a:b]).numpy()[:0], part),
    ]
    value, own = draw(st.sampled_from(forms))()
    return Node(value, own)


def buffer_leaf(draw) -> Node:
    """A value over fresh bytes, a bytearray, an array or a memory map."""
    nbytes = 8 * draw(st.integers(1, 8))
    kind = draw(st.sampled_from(["bytes", "noted", "bytearray", "array", "mmap"]))
    if kind in {"bytes", "noted"}:
        content = next(_different).to_bytes(nbytes, "little")
        block = content if kind == "bytes" else NotedBytes(content)
        start = ctypes.cast(ctypes.c_char_p(block), ctypes.c_void_p).value
    else:
        block = {
            "bytearray": lambda: bytearray(nbytes),
            "array": lambda: array.array("d", [0.0] * (nbytes // 8)),
            "mmap": lambda: mmap.mmap(-1, nbytes),
        }[kind]()
        start = ctypes.addressof(ctypes.c_char.from_buffer(block))
    a = draw(st.integers(0, nbytes - 1))
    whole = span("cpu", start, nbytes)
    forms = [
        lambda: (block, whole),
        lambda: (memoryview(block), whole),
        lambda: (memoryview(block).cast("B")[a:], whole),
        lambda: (memoryview(block).cast("B")[::-3], whole),
        lambda: (np.frombuffer(block, np.uint8, offset=a), whole),
        lambda: (np.frombuffer(memoryview(block).cast("B")[a:], np.uint8)[::2], whole),
        lambda: (np.frombuffer(block, "u4").view(TaggedArray), whole),
    ]
    if kind in {"bytearray", "array", "mmap"}:
        forms.append(
            lambda: (torch.frombuffer(block, dtype=torch.uint8, offset=a), span("cpu", start + a, nbytes - a))
        )
    value, own = draw(st.sampled_from(forms))()
    return Node(value, own)


def empty_leaf(draw) -> Node:
    """A value that holds no memory a session is charged for."""
    value = draw(
        st.sampled_from(
            [
                lambda: None,
                lambda: 3,
                lambda: "text",
                lambda: np.float32(1),
                lambda: np.dtype("f4"),
                lambda: torch.float16,
                lambda: b"",
                lambda: np.empty((0, 3)),
                lambda: torch.empty(0),
                lambda: torch.zeros(5, device="meta"),
                lambda: torch.nn.Linear(3, 3),
                lambda: len,
                lambda: Stranger(torch.zeros(3)),
            ]
        )
    )()
    return Node(value, frozenset())


def object_array(values):
    made = np.empty((1, len(values)), object)
    for index, value in enumerate(values):
        made[0, index] = value
    return made


def object_record(values):
    made = np.zeros(len(values), [("n", "i4"), ("held", "O")])
    for index, value in enumerate(values):
        made[index]["held"] = value
    return made


def containers(draw, children: list[Node]) -> Node:
    """One new value that holds ``children``, of any kind that can."""
    values = [child.value for child in children]
    array_own: frozenset[Allocation] = frozenset()
    forms = {
        "list": lambda: list(values),
        "tuple": lambda: tuple(values),
        "deque": lambda: collections.deque(values, maxlen=len(values)),
        "dict": lambda: dict(enumerate(values)),
        "OrderedDict": lambda: collections.OrderedDict((str(i), v) for i, v in enumerate(values)),
        "defaultdict": lambda: collections.defaultdict(list, enumerate(values)),
        "TaggedDict": lambda: TaggedDict(enumerate(values)),
        "UserDict": lambda: collections.UserDict({str(i): v for i, v in enumerate(values)}),
        "UserList": lambda: collections.UserList(values),
        "ChainMap": lambda: collections.ChainMap(*({"k": v} for v in values)),
        "proxy": lambda: types.MappingProxyType(dict(enumerate(values))),
        "values": {i: v for i, v in enumerate(values)}.values,  # noqa: C416
        "namespace": lambda: types.SimpleNamespace(**{f"v{i}": v for i, v in enumerate(values)}),
        "Record": lambda: Record(values),
        "SlottedRecord": lambda: SlottedRecord(values[0] if values else None, tuple(values[1:])),
        "Pair": lambda: Pair(values, 0),
        "slice": lambda: slice(values, None),
        "Box": lambda: Box(values),
        "array": lambda: object_array(values),
        "array view": lambda: object_array(values)[:, :0],
        "record array": lambda: object_record(values),
        "tagged array": lambda: object_array(values).view(TaggedArray),
    }
    if all(
        isinstance(value, (torch.Tensor, bytes, Stranger)) for value in values
    ):  # equal ones are the same one
        forms["set"] = lambda: set(values)
        forms["frozenset"] = lambda: frozenset(values)
        forms["keys"] = lambda: dict.fromkeys(values, 0)
    kind = draw(st.sampled_from(sorted(forms)))
    value = forms[kind]()
    if "array" in kind and values:
        start = value.ctypes.data
        array_own = span("cpu", start, len(values) * (12 if kind == "record array" else 8))
    return Node(value, array_own, list(children))


def tie_knot(holder: Node, held: Node) -> None:
    """Put ``held`` into ``holder`` if it can still take something: so cycles come about."""
    value, name = holder.value, f"knot {len(holder.children)}"
    if type(value) is list:
        value.append(held.value)
    elif type(value) in {dict, collections.OrderedDict}:
        value[name] = held.value
    elif type(value) in {Record, TaggedArray, TaggedTensor, NotedBytes, torch.Tensor}:
        setattr(value, name, held.value)
    else:
        return
    holder.children.append(held)


@st.composite
def worlds(draw):
    """Some nodes over shared memory: leaves, containers of earlier nodes, and a few knots."""
    kinds = st.sampled_from([torch_leaf, numpy_leaf, buffer_leaf, empty_leaf])
    pinned_starts.clear()
    nodes = [draw(kinds)(draw) for _ in range(draw(st.integers(1, 6)))]
    for _ in range(draw(st.integers(0, 8))):
        picks = draw(st.lists(st.integers(0, len(nodes) - 1), max_size=4))
        nodes.append(containers(draw, [nodes[i] for i in picks]))
    for _ in range(draw(st.integers(0, 3))):
        holder, held = draw(st.tuples(*[st.integers(0, len(nodes) - 1)] * 2))
        tie_knot(nodes[holder], nodes[held])
    return nodes

"""Trees of every kind that a file can hold, and whether one is what another was."""

from __future__ import annotations

from collections import OrderedDict, deque

import msgspec
import numpy as np
import torch
from hypothesis import strategies as st

from vllm_omni_session_state.offload.pack import pack_whole
from vllm_omni_session_state.offload.schema import Tree
from vllm_omni_session_state.offload.unpack import prove, unpack

ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers() | st.integers(-(2**200), 2**200),
    st.floats() | st.sampled_from([-0.0, float("nan"), float("inf")]),
    st.complex_numbers(),
    st.text(st.characters(), max_size=4) | st.sampled_from(["\ud83d\ude00", "\ud800", "é"]),
    st.binary(max_size=4),
    st.sampled_from([torch.bfloat16, torch.float8_e5m2, torch.device("cuda", 1), torch.device("cpu")]),
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    st.sampled_from(
        [
            np.float32(0.1),
            np.int8(-3),
            np.bool_(1),
            np.str_("a\0"),
            np.str_(""),
            np.bytes_(b"b\0"),
            np.datetime64("2020-01"),
            np.datetime64("NaT"),
            np.complex64(1j),
            np.void(b"ab"),
            np.longdouble(1) / 3,
        ]
    ),
)
_HASHED = ATOMS.filter(lambda value: not isinstance(value, np.void))
KEYS = _HASHED | st.tuples(_HASHED, _HASHED)
ARRAY_TYPES = ["u1", "<i2", ">f4", "<f8", "?", "<c16", "<M8[ms]", "<U2", "S3", "V5", "<f2"]


@st.composite
def arrays(draw):
    """A few arrays, some of them views of one memory, one of them read-only."""
    base = np.arange(48, dtype=np.uint8).repeat(16)[: 24 * 16]
    dtype = np.dtype(draw(st.sampled_from(ARRAY_TYPES)))
    base = np.frombuffer(bytes(base[: 24 * dtype.itemsize] % 2), dtype).reshape(2, 3, 4)
    if draw(st.booleans()):
        base = torch.tensor(list(base.tobytes()), dtype=torch.uint8).numpy().view(dtype).reshape(2, 3, 4)
    if draw(st.booleans()):
        base = base.copy(order=draw(st.sampled_from("CF")))
    views = [
        base,
        base[:, 1:],
        base.T,
        base[1, 2],
        base[::-1],
        base[:, :0],
        base[..., ::-2],
        base[0, 0, :1].copy(),
    ]
    views.append(np.broadcast_to(base[0, 0], (2, 4)))
    chosen = [
        views[index] for index in draw(st.lists(st.sampled_from(range(len(views))), min_size=1, max_size=3))
    ]
    if draw(st.booleans()):
        frozen = np.zeros((), dtype)
        frozen.flags.writeable = False
        chosen.append(frozen)
    return chosen


@st.composite
def tensors(draw):
    """A few tensors over fewer storages, empty ones among them."""
    made = [torch.empty(draw(st.sampled_from([(0,), (2, 0)])), dtype=torch.float16)]
    for _ in range(draw(st.integers(1, 2))):
        dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex64]))
        with torch.inference_mode(draw(st.booleans())):
            base = torch.arange(24).to(dtype).reshape(2, 3, 4)
            views = [base, base[:, 1:], base.transpose(0, 2), base[1, 2], base.expand(2, 2, 3, 4)]
            if draw(st.booleans()) and dtype is torch.float32:
                views = [base.requires_grad_(True)]
        made += [views[i] for i in draw(st.lists(st.sampled_from(range(len(views))), min_size=1, max_size=3))]
    return made


@st.composite
def trees(draw):
    """Nested containers over all of it; some are shared between places, and one may hold itself."""
    leaves = ATOMS | st.sampled_from(draw(tensors())) | st.sampled_from(draw(arrays()))
    knot = [draw(leaves)]
    if draw(st.booleans()):
        knot.append((knot,))
    nested = st.recursive(
        leaves | st.just(knot),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(KEYS, inner, max_size=3)
            | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
            | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=draw(st.none() | st.just(3))))
        ),
        max_leaves=8,
    )
    return draw(nested)


def through_text(tree):
    """A tree packed, written as text, read, and put together over copies of its memory."""
    packed = pack_whole(tree)
    prove(packed)
    storages = [storage.clone() for storage in packed.storages]
    return unpack(msgspec.json.decode(msgspec.json.encode(packed.tree), type=Tree), storages)


def alike(a, b, met):  # noqa: PLR0911 - a kind, a line
    """Equal in kind, container, identity structure and every bit; ``met`` pairs what was met."""
    if type(a) is not type(b):
        return False
    if id(a) in met:
        return met[id(a)] is b
    if isinstance(a, torch.Tensor | np.ndarray | dict | list | deque) or (isinstance(a, tuple) and a):
        met[id(a)] = b
    if isinstance(a, torch.Tensor):
        return (
            (a.dtype, a.device, a.shape, a.stride()) == (b.dtype, b.device, b.shape, b.stride())
            and a.storage_offset() == b.storage_offset()
            and (a.requires_grad, a.is_inference()) == (b.requires_grad, b.is_inference())
            and a.untyped_storage().tolist() == b.untyped_storage().tolist()
        )
    if isinstance(a, np.ndarray):
        same = (a.dtype, a.shape, a.strides, a.flags.writeable) == (
            b.dtype,
            b.shape,
            b.strides,
            b.flags.writeable,
        )
        return same and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            alike(x, y, met) and alike(a[x], b[y], met) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, list | tuple | deque):
        bound = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return bound and len(a) == len(b) and all(alike(x, y, met) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.generic):
        return (a.dtype, a.flags.writeable, a.tobytes()) == (b.dtype, b.flags.writeable, b.tobytes())
    return np.array([a]).tobytes() == np.array([b]).tobytes() if isinstance(a, float | complex) else a == b


def addresses(tree):
    """Which tensors and arrays of a tree share memory, and where in it each begins."""
    found, stack, seen = [], [tree], set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            found.append((item.untyped_storage().data_ptr(), item.data_ptr()))
        elif isinstance(item, np.ndarray) and item.size:
            owner = item
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            found.append((owner.ctypes.data, item.ctypes.data))
        elif isinstance(item, dict | list | tuple | deque) and id(item) not in seen:
            seen.add(id(item))
            stack.extend(item.values() if isinstance(item, dict) else item)
    first = {}
    return [(first.setdefault(memory, len(first)), start - memory) for memory, start in found]

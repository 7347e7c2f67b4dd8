"""What comes back is what left: any nest of aliased tensors, taken apart and put together again."""

from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import sized

from vllm_omni_session_state.offload import copy
from vllm_omni_session_state.offload.pack import pack
from vllm_omni_session_state.offload.schema import Dict, List, Tensor, Tree
from vllm_omni_session_state.offload.unpack import unpack

DTYPES = st.sampled_from(
    [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64]
)


@st.composite
def tensors(draw):
    """A few tensors over fewer storages: views, strides, inference tensors, leaves that want gradients."""
    made = []
    for _ in range(draw(st.integers(1, 3))):
        inference = draw(st.booleans())
        dtype = draw(DTYPES)
        with torch.inference_mode(inference):
            base = (torch.arange(24) % 2).to(dtype).reshape(2, 3, 4)
            views = [
                base,
                base[:, 1:],
                base.transpose(0, 2),
                base[1, 2],
                base[:, :, ::2],
                base.expand(2, 2, 3, 4),
            ]
        chosen = draw(st.lists(st.sampled_from(range(len(views))), min_size=1, max_size=4))
        made += [views[index] for index in chosen]
        if draw(st.booleans()):
            with torch.inference_mode(inference):
                made.append(torch.ones(3, requires_grad=True))
    return made


@st.composite
def trees(draw):
    """Nested containers over those tensors, some of them shared between places."""
    leaves = st.sampled_from(draw(tensors())) | st.none() | st.integers() | st.text(max_size=3)
    shared = [draw(leaves)]
    nested = st.recursive(
        leaves | st.just(shared),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(OrderedDict)
            | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=4))
        ),
        max_leaves=8,
    )
    return draw(nested)


def moved(storages):
    """The same bytes in other storages, by way of a slab; the old ones are overwritten."""
    slab = copy.to_slab(storages)
    sizes = [storage.nbytes() for storage in storages]
    new = copy.from_slab(slab, sizes, [torch.device("cpu")] * len(sizes))
    for storage in storages:
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xEE)
    return new


def alike(a, b, seen):
    """Equal in kind, container, identity structure and every bit; ``seen`` pairs what was met."""
    if type(a) is not type(b):
        return False
    if id(a) in seen:
        return seen[id(a)] is b
    if isinstance(a, torch.Tensor):
        seen[id(a)] = b
        return (
            a.dtype == b.dtype
            and (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())
            and (a.requires_grad, a.is_inference()) == (b.requires_grad, b.is_inference())
            and a.untyped_storage().tolist() == b.untyped_storage().tolist()
        )
    if isinstance(a, dict):
        seen[id(a)] = b
        return list(a) == list(b) and all(alike(a[key], b[key], seen) for key in a)
    if isinstance(a, list | tuple | deque):
        seen[id(a)] = b
        same_bound = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return same_bound and len(a) == len(b) and all(alike(x, y, seen) for x, y in zip(a, b, strict=True))
    return a == b


def storage_pattern(tree):
    """Which tensors of a tree share a storage, as indices in the order of their first meeting."""
    pattern, stack, first, seen = [], [tree], {}, set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            pattern.append(first.setdefault(item.untyped_storage().data_ptr(), len(first)))
        elif isinstance(item, dict | list | tuple | deque) and id(item) not in seen:
            seen.add(id(item))
            stack.extend(item.values() if isinstance(item, dict) else item)
    return pattern


@given(trees())
@sized(2000)
def test_what_comes_back_is_what_left(tree):
    packed = pack(tree)
    twin = unpack(packed.tree, [storage.clone() for storage in packed.storages])
    back = unpack(packed.tree, moved(packed.storages))
    assert alike(twin, back, {})
    assert storage_pattern(tree) == storage_pattern(back)


def test_nothing_of_the_original_is_kept_alive_by_the_nodes():
    tensor = torch.ones(4)
    packed = pack({"x": [tensor]})
    slot = Tensor(0, "float32", 0, (4,), (1,), requires_grad=False, inference=False, resizable=True)
    assert packed.tree == Tree([Dict(["x", 1]), List([2]), slot], 0)
    assert len(packed.storages) == 1


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, requires_grad=True) * 2,
        torch.eye(2).to_sparse(),
        torch.empty(3, device="meta"),
        torch.nn.Parameter(torch.ones(2)),
        np.ones(3),
        {torch.ones(1)},
        object(),
        torch.empty(0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_taken_apart_stays_whole(value):
    packed = pack({"x": value})
    assert packed.storages == []
    assert unpack(packed.tree, [])["x"] is value


def test_an_inference_tensor_that_wants_gradients_comes_back_as_it_was():
    with torch.inference_mode():
        tensor = torch.ones(2, requires_grad=True)
    packed = pack([tensor])
    (back,) = unpack(packed.tree, packed.storages)
    assert (back.is_inference(), back.requires_grad) == (True, True)


def test_a_list_that_holds_itself_comes_back_holding_itself():
    knot = [torch.ones(2)]
    knot.append(knot)
    packed = pack(knot)
    back = unpack(packed.tree, packed.storages)
    assert back[1] is back
    assert torch.equal(back[0], knot[0])


def test_a_nest_of_any_depth_is_taken():
    deep = torch.ones(1)
    for _ in range(5000):
        deep = [deep]
    packed = pack(deep)
    unpack(packed.tree, packed.storages)

"""Values whose own methods lie, fail, never end or compute: the walk asks none of them."""

from __future__ import annotations

import collections
import types
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import sized

from vllm_omni_session_state.accounting.footprint import footprint, owned_allocations


class Lying(Sequence):
    """A sequence that never ends and fails when it is asked."""

    def __init__(self, held):
        self.held = held

    def __len__(self):
        return 10**18

    def __getitem__(self, index):
        raise RuntimeError("read in vain")


class Endless(Lying):
    def __getitem__(self, index):
        return torch.zeros(1)


class Lazy(Mapping):
    """A mapping that makes its values when they are asked for."""

    def __init__(self, held):
        self.held = held
        self.asked = 0

    def __len__(self):
        return 3

    def __iter__(self):
        self.asked += 1
        return iter("abc")

    def __getitem__(self, key):
        self.asked += 1
        return torch.zeros(1000)


class Failing(dict):
    """A dict all of whose methods and attributes fail."""

    def __getattribute__(self, name):
        raise RuntimeError(name)

    def __iter__(self):
        raise RuntimeError("no iteration")

    __len__ = __hash__ = __eq__ = __bool__ = __repr__ = __getitem__ = __iter__


@pytest.mark.parametrize("kind", [Lying, Endless, Lazy])
def test_a_container_is_never_asked_so_it_can_neither_lie_nor_fail_nor_compute(kind):
    tensor = torch.zeros(4)
    value = kind([tensor])
    found = footprint(value)
    assert found.nbytes == 16
    assert not found.opaque
    assert getattr(value, "asked", 0) == 0


def test_a_dict_whose_every_method_fails_counts_what_is_in_it():
    value = Failing()
    dict.__setitem__(value, "k", torch.zeros(4))
    assert footprint([value]).nbytes == 16


def test_an_instance_whose_class_is_a_lie_is_taken_for_what_it_is():
    class Impostor:
        @property
        def __class__(self):
            return torch.Tensor

        @property
        def untyped_storage(self):
            raise RuntimeError("looked")

    found = footprint(Impostor(), torch.zeros(4))
    assert found.nbytes == 16
    assert len(found.opaque) == 1


def test_a_class_whose_metaclass_fails_is_reported_all_the_same():
    class Meta(type):
        def __hash__(cls):
            raise RuntimeError("no hash")

        def __getattribute__(cls, name):
            raise RuntimeError(name)

    class Odd(metaclass=Meta):
        pass

    found = footprint([Odd(), torch.zeros(4)])
    assert found.nbytes == 16
    assert len(found.opaque) == 1


class BrokenFlatten(torch.Tensor):
    """A wrapper that cannot name its parts."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        raise RuntimeError("not now")

    @classmethod
    def __torch_dispatch__(cls, *args, **kwargs):
        raise RuntimeError("nothing may be computed on it")

    __torch_function__ = __torch_dispatch__


class LyingStorage(torch.Tensor):
    """A tensor that answers everything with nonsense."""

    def untyped_storage(self):
        return "nonsense"

    layout = property(lambda self: 1 / 0)
    is_quantized = grad_fn = is_leaf = layout


def test_a_tensor_subclass_that_fails_is_reported_and_its_attributes_are_counted():
    found = footprint(BrokenFlatten(torch.zeros(4)))
    assert found.nbytes == 16
    assert found.opaque == {f"{__name__}.BrokenFlatten"}
    lying = torch.zeros(4).as_subclass(LyingStorage)
    assert footprint(lying).opaque == {f"{__name__}.LyingStorage"}


class LyingArray(np.ndarray):
    base = property(lambda self: 1 / 0)
    dtype = nbytes = flags = shape = strides = base
    __array_interface__ = property(lambda self: {"data": ("nonsense", 1)})

    def __array__(self, *args, **kwargs):
        raise RuntimeError("no array")

    def ravel(self, *args):
        raise RuntimeError("no ravel")


def test_an_array_subclass_that_lies_is_seen_as_the_array_it_is():
    owner = np.zeros(10)
    assert footprint(owner[2:3].view(LyingArray)).nbytes == 80
    holder = np.array([[torch.zeros(4)], None], dtype=object)
    assert footprint(holder.view(LyingArray)).nbytes == 16 + 16


def failing(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@st.composite
def hostile_classes(draw):
    """A subclass of some known kind, with some methods and properties that raise or talk nonsense."""
    base = draw(
        st.sampled_from(
            [
                object,
                dict,
                list,
                tuple,
                set,
                frozenset,
                collections.deque,
                collections.OrderedDict,
                int,
                str,
                bytes,
                bytearray,
                np.ndarray,
                torch.Tensor,
                Mapping,
                Sequence,
                types.SimpleNamespace,
                collections.UserDict,
            ]
        )
    )
    names = [
        "__len__",
        "__iter__",
        "__getitem__",
        "__getattr__",
        "__hash__",
        "__eq__",
        "__bool__",
        "__contains__",
    ]
    names += [
        "__class__",
        "__dict__",
        "values",
        "keys",
        "items",
        "__array_interface__",
        "__array__",
        "__buffer__",
    ]
    names += [
        "untyped_storage",
        "layout",
        "is_pinned",
        "device",
        "grad",
        "is_leaf",
        "grad_fn",
        "__tensor_flatten__",
    ]
    names += [
        "base",
        "dtype",
        "__getattribute__",
        "__dataclass_fields__",
        "__reduce_ex__",
        "__torch_function__",
    ]
    body = {}
    for name in draw(st.lists(st.sampled_from(names), max_size=6, unique=True)):
        outcome = draw(st.sampled_from(["raise", "property raises", "nonsense", "attribute"]))
        fail = failing(draw(st.sampled_from([RuntimeError, AttributeError, MemoryError, StopIteration])))
        body[name] = {
            "raise": fail,
            "property raises": property(fail),
            "nonsense": lambda *args, **kwargs: ("nonsense", -1),
            "attribute": "nonsense",
        }[outcome]
    if base in {Mapping, Sequence}:
        body |= {name: body.get(name, lambda *args: 0) for name in ("__len__", "__iter__", "__getitem__")}
    return base, body


@sized(2_000)
@given(hostile_classes())
def test_no_class_that_overrides_what_it_likes_makes_the_walk_raise(case):
    base, body = case
    try:
        kind = type("Hostile", (base,), body)
        if base is torch.Tensor:
            value = torch.Tensor._make_subclass(kind, torch.zeros(2))
        elif base is np.ndarray:
            value = np.ndarray.__new__(kind, (2,))
        else:
            value = base.__new__(kind)
    except Exception:  # noqa: BLE001  # such a class cannot even be made
        return
    kept = torch.zeros(4)
    found = footprint(value, [value], {"value": value, "kept": kept})
    assert kept.data_ptr() in {region.start for region in found.allocations}
    owned_allocations(value)

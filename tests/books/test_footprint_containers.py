"""Which containers are opened, which types can be registered, and what is plain."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from byte_oracle import allocations

from vllm_omni_session_state.accounting import footprint as footprint_module
from vllm_omni_session_state.accounting.footprint import footprint, register_children


@pytest.fixture
def registered():
    """Forget what a test registers."""
    before = dict(footprint_module._registered)
    yield register_children
    footprint_module._registered.clear()
    footprint_module._registered.update(before)


Point = namedtuple("Point", "x y")  # noqa: PYI024


@dataclass
class Plain:
    x: object


@dataclass(frozen=True, slots=True)
class Slotted:
    x: object


@pytest.mark.parametrize(
    "wrap",
    [
        lambda v: [v],
        lambda v: (v,),
        lambda v: {"k": v},
        lambda v: {v: 0},
        lambda v: {v},
        lambda v: frozenset({v}),
        lambda v: deque([v], maxlen=2),
        lambda v: OrderedDict(k=v),
        lambda v: OrderedDict({v: 0}),
        lambda v: defaultdict(list, k=v),
        lambda v: UserDict(k=v),
        lambda v: {"k": v}.values(),
        lambda v: {v: 1}.keys(),
        lambda v: Point(0, v),
        Plain,
        Slotted,
        lambda v: Plain([{"k": (Slotted(v), deque([v]))}]),
        lambda v: torch.return_types.max((v, v)),
        lambda v: torch.nn.utils.rnn.PackedSequence(v, torch.empty(0)),
    ],
)
def test_every_container_kind_is_opened(wrap):
    tensor = torch.zeros(4)
    assert footprint(wrap(tensor)).allocations == allocations(tensor)
    assert not footprint(wrap(tensor)).opaque


def test_a_registered_type_is_opened_and_its_subclasses_too(registered):
    class Frames:
        def __init__(self, frames):
            self.frames = frames

    class MoreFrames(Frames):
        pass

    tensor = torch.zeros(4)
    assert footprint(MoreFrames([tensor])).nbytes == 0
    registered(Frames, lambda value: iter(value.frames))
    assert footprint(Frames([tensor]), MoreFrames([tensor])).allocations == allocations(tensor)
    registered(MoreFrames, lambda value: ())
    assert footprint(MoreFrames([tensor])).nbytes == 0
    assert not footprint(MoreFrames([tensor])).opaque


def test_a_registration_can_close_a_dataclass_or_open_a_module(registered):
    registered(Plain, lambda value: ())
    assert footprint(Plain(torch.zeros(4))).nbytes == 0
    registered(torch.nn.Linear, lambda value: value.parameters())
    assert footprint(torch.nn.Linear(2, 3)).nbytes == 9 * 4


@pytest.mark.parametrize("kind", [list, dict, torch.Tensor, np.ndarray, int])
def test_a_builtin_kind_cannot_be_registered(kind):
    with pytest.raises(ValueError, match=f"{kind.__qualname__} is a builtin kind"):
        register_children(kind, lambda value: ())
    with pytest.raises(TypeError, match="takes a class"):
        register_children("list", lambda value: ())


def test_plain_values_hold_nothing_and_are_not_worth_a_report():
    import datetime as dt
    import enum
    import pathlib
    import weakref

    colour = enum.Enum("colour", "RED")
    plain = [
        1,
        2.0,
        3j,
        "s",
        True,
        None,
        ...,
        range(10**9),
        torch.float16,
        torch.device("cpu"),
        torch.Size([2]),
    ]
    plain += [np.float32(1), np.str_("s"), np.dtype("f4"), colour.RED, dt.timedelta(1), pathlib.Path("x")]
    plain += [weakref.ref(Plain), torch.strided, b"", np.bool_(0)]
    found = footprint(plain, *plain)
    assert found.nbytes == 0
    assert not found.opaque


def test_the_walk_keeps_nothing_alive_and_makes_no_garbage():
    values = [torch.zeros(4), {"k": [np.zeros(3)]}, (torch.eye(2).to_sparse(),)]
    counts = [sys.getrefcount(value) for value in values]
    footprint(*values)  # what torch makes at a first time is not the walk's
    garbage = []
    gc.disable()
    try:
        for _ in range(3):  # another thread's may come once between
            gc.collect()
            for _ in range(50):
                footprint(*values)
            garbage.append(gc.collect())
        assert [sys.getrefcount(value) for value in values] == counts
        assert min(garbage) == 0, garbage
    finally:
        gc.enable()

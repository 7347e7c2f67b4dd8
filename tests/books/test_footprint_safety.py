"""No value makes the walk raise, none makes it count what is not a session's, and none is walked for ever."""

from __future__ import annotations

import collections
import functools
import io
import threading
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import count, sized

from vllm_omni_session_state.accounting.footprint import footprint, owned_allocations, register_children


class Pipeline:
    """Stands for vLLM-Omni's pipeline: an instance that leads to all the weights there are."""

    def __init__(self):
        self.transformer = torch.nn.Linear(64, 64)
        self.vae = {"encoder": torch.zeros(1000)}


def closure(held):
    return lambda: held


def generator(held):
    yield held


@pytest.mark.parametrize(
    "make",
    [
        Pipeline,
        lambda: torch.nn.Linear(64, 64),
        lambda: torch.nn.ModuleList([torch.nn.Linear(8, 8)]),
        lambda: torch.nn.ParameterList([torch.zeros(8)]),
        lambda: Pipeline().transformer.forward,
        lambda: functools.partial(torch.add, torch.zeros(8)),
        lambda: closure(torch.zeros(8)),
        lambda: Pipeline,
        lambda: torch,
        threading.Lock,
        threading.Thread,
        lambda: generator(torch.zeros(8)),
        lambda: iter([torch.zeros(8)]),
        lambda: io.BytesIO(b"x" * 50),
        lambda: mock.MagicMock(spec=torch.Tensor),
        object,
        torch.Generator,
    ],
)
def test_the_walk_stops_at_opaque_kinds_counts_nothing_of_them_and_names_them(make):
    value = make()
    kind = type(value)
    kept = torch.zeros(4)
    found = footprint({"kept": kept, "pipeline": value, "again": [value]})
    assert found.nbytes == 16
    assert found.opaque == {f"{kind.__module__}.{kind.__qualname__}"}


def test_a_module_stays_closed_also_where_it_is_a_container_or_a_dataclass():
    @dataclass(eq=False)
    class Both(torch.nn.Module):
        note: object

    class Layers(torch.nn.ModuleList, collections.abc.Sequence):
        pass

    made = Both.__new__(Both)
    torch.nn.Module.__init__(made)
    made.layer = torch.nn.Linear(8, 8)
    assert footprint(made, Layers([torch.nn.Linear(8, 8)])).nbytes == 0
    assert len(footprint(made, Layers()).opaque) == 2


def test_one_reference_to_the_pipeline_never_counts_the_weights():
    @dataclass
    class State:
        latents: list
        pipeline: object
        modules: tuple

    pipeline = Pipeline()
    state = State([torch.zeros(8)], pipeline, (pipeline.transformer, pipeline.transformer.forward))
    assert footprint(state, {"self": pipeline}).nbytes == 32


@pytest.mark.parametrize(
    "wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: collections.UserList([v])]
)
def test_a_nest_of_a_hundred_thousand_is_no_recursion(wrap):
    tensor = torch.zeros(4)
    value = tensor
    for _ in range(100_000):
        value = wrap(value)
    assert footprint(value).nbytes == 16
    while value is not tensor:  # CPython itself recurses when it drops such a nest of instances
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]


def test_a_shared_nest_is_walked_once_and_not_once_per_path():
    tensor = torch.zeros(4)
    value = tensor
    for _ in range(200):
        value = [value, {"k": value}, (value, value)]  # 4 to the 200th paths
    value[1]["k"].append(value)
    assert footprint(value).nbytes == 16


def test_what_is_closed_or_released_or_not_there_is_no_crash():
    import mmap

    closed = mmap.mmap(-1, 100)
    closed.close()
    view = memoryview(bytearray(10))
    view.release()
    unset = collections.namedtuple("Empty", "")()  # noqa: PYI024
    found = footprint(closed, view, unset, torch.from_numpy(np.empty(0)), memoryview(b""), np.empty((0, 4)).T)
    assert found.nbytes == 0
    assert found.opaque == {"mmap.mmap", "builtins.memoryview"}


def test_a_registered_function_that_fails_makes_its_type_opaque():
    class Broken:
        pass

    register_children(Broken, lambda value: value.nothing_there)
    found = footprint(Broken(), [torch.zeros(4)])
    assert found.nbytes == 16
    assert len(found.opaque) == 1


def test_a_dict_that_grows_in_another_thread_is_counted_at_one_instant():
    grown, stop = {}, threading.Event()

    def grow():
        index = 0
        while not stop.is_set():
            grown[index % 1000, index] = index
            if index % 3000 == 0:
                grown.clear()
            index += 1

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for _ in range(count(400)):
            found = footprint({"grown": grown, "kept": torch.zeros(4)})
            assert found.nbytes == 16
            assert not found.opaque
    finally:
        stop.set()
        thread.join()


def test_two_pipelines_are_named_once_by_type():
    assert footprint([Pipeline(), Pipeline(), [Pipeline()]]).opaque == {f"{__name__}.Pipeline"}


def test_owned_allocations_name_the_owner_and_not_the_view():
    tensor, owner, text = torch.zeros(10), np.zeros(10), b"x" * 10
    found = owned_allocations([tensor[2:], tensor.numpy()[1:]], owner[3:], memoryview(text))
    assert {type(holder) for holder, _ in found} == {torch.UntypedStorage, np.ndarray, bytes}
    assert all(holder is owner for holder, _ in found if isinstance(holder, np.ndarray))
    assert {each.nbytes for _, each in found} == {40, 80, 10}


@sized(1_000)
@given(
    st.recursive(
        st.sampled_from(["tensor", "module", 1, None, "text"]), lambda inner: st.lists(inner, max_size=4)
    )
)
def test_opaque_is_reported_if_and_only_if_something_opaque_is_in_the_value(tree):
    def build(node):
        if isinstance(node, list):
            return tuple(map(build, node))
        return {"tensor": torch.zeros(1), "module": torch.nn.Identity()}.get(node, node)

    flat = repr(tree)
    found = footprint(build(tree))
    assert found.nbytes == 4 * flat.count("'tensor'")
    assert bool(found.opaque) == ("'module'" in flat)

"""What comes out of a document is what went in, bit for bit; what cannot go in is named; lies are refused."""

import copy
import json
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from codec import addresses, alike, through_text, trees
from hypothesis import given
from hypothesis import strategies as st
from profiles import sized

from vllm_omni_session_state.base.errors import BadFileError, NotWritableError
from vllm_omni_session_state.offload import decode, tree_spec
from vllm_omni_session_state.offload.pack import Whole, pack, unpack
from vllm_omni_session_state.offload.slots import TensorSlot


@given(trees())
@sized(4000)
def test_what_is_read_is_what_was_written(tree):
    packed = pack(tree)
    twin = unpack(packed.skeleton, packed.storages)
    back = through_text(tree)
    assert alike(twin, back, {})
    assert addresses(tree) == addresses(back)


def test_arrays_that_share_memory_share_it_again():
    base = np.arange(10)
    back = through_text([base, base[2:5]])
    back[0][3] = 99
    assert back[1].tolist() == [2, 99, 4]


def test_a_nest_of_any_depth_is_written():
    deep, tip = 5, [5]
    for _ in range(5000):
        deep = [deep]
    back = through_text({"deep": deep, "tip": tip})
    for _ in range(5000):
        (back,) = back["deep"] if isinstance(back, dict) else back
    assert back == 5


Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - what a model may hold


class Sub(dict):
    """A subclass is another type."""


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (object(), "not on the list"),
        (Pair(1, 2), "not on the list"),
        (Sub(), "not on the list"),
        ({1, 2}, "not on the list"),
        (print, "not on the list"),
        (torch.nn.Parameter(torch.ones(1)), "not on the list"),
        (torch.ones(1, requires_grad=True) * 2, "a graph"),
        (torch.eye(2).to_sparse(), "not all that it is made of"),
        (torch.empty(2, device="meta"), "no memory on meta"),
        (np.array([object()]), "objects or fields"),
        (np.zeros(2, [("a", "i4")]), "objects or fields"),
        (np.zeros(1, [("a", "i4")])[0], "not on the list"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_written_is_named_with_its_place(value, why):
    packed = pack({"attrs": {"foo": [0, 1, 2, (value,)]}})
    with pytest.raises(NotWritableError, match=why) as caught:
        tree_spec.write(packed.skeleton, packed.storages)
    assert caught.value.path == "attrs.foo[3][0]"
    assert type(value).__qualname__ in caught.value.kind
    assert "register_kind" in str(caught.value)


def test_a_file_mapped_into_memory_is_not_written(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.uint8, "w+", shape=(4,))
    with pytest.raises(NotWritableError, match="a buffer or a file has it"):
        tree_spec.write(mapped[1:].view(np.ndarray), [])


def test_an_array_over_a_tensors_memory_is_over_it_again():
    tensor = torch.ones(4)
    back = through_text([tensor, tensor.numpy()[1:]])
    back[0][2] = 7
    assert back[1].tolist() == [1, 7, 1]


def test_memory_that_is_anothers_is_refused_rather_than_parted_from_it():
    array, buffer = np.ones(4), bytearray(8)
    for value in (
        torch.from_numpy(array),
        torch.frombuffer(buffer, dtype=torch.uint8),
        np.frombuffer(buffer),
    ):
        packed = pack([value])
        with pytest.raises(NotWritableError, match="or a file has it"):
            tree_spec.write(packed.skeleton, packed.storages)


def test_a_key_of_too_many_values_is_refused_in_writing():
    with pytest.raises(NotWritableError, match="a key of more than"):
        tree_spec.write({tuple(range(tree_spec.KEY_WEIGHT + 1)): 1}, [])


@dataclass
class Clock:
    """A type of a model's own."""

    ticks: int
    table: torch.Tensor


@pytest.fixture
def clock():
    tree_spec.register_kind(
        Clock,
        "test.clock",
        to_tree=lambda c: {"ticks": c.ticks, "table": c.table},
        from_tree=lambda t: Clock(**t),
    )
    yield Clock(3, torch.arange(6)[2:])
    tree_spec.registered.clear()


def test_a_registered_type_comes_back_and_stays_shared(clock):
    back = through_text({"a": clock, "b": [clock]})
    assert back["a"] is back["b"][0]
    assert back["a"].ticks == 3
    assert back["a"].table.tolist() == [2, 3, 4, 5]
    assert back["a"].table.storage_offset() == 2


def test_what_a_registered_value_shares_with_the_rest_is_refused_rather_than_parted(clock):
    clock.ticks = shared = [1]
    with pytest.raises(NotWritableError, match="shares it with the rest") as caught:
        tree_spec.write({"attrs": {"s": shared, "clock": clock}}, [])
    assert caught.value.path == "attrs.clock.ticks"


def test_a_type_that_nobody_registered_here_is_refused(clock):
    written = tree_spec.write([clock], [])
    tree_spec.registered.clear()
    with pytest.raises(BadFileError, match="not registered"):
        decode.read(written.document, written.extra)


def test_adapters_that_raise_are_typed_errors(clock):
    tree_spec.register_kind(Clock, "test.clock", to_tree=lambda c: c.table, from_tree=lambda t: 1 / 0)
    written = tree_spec.write([clock], [])
    with pytest.raises(BadFileError, match="ZeroDivisionError"):
        decode.read(written.document, written.extra)
    tree_spec.register_kind(Clock, "test.clock", to_tree=lambda c: 1 / 0, from_tree=Clock)
    with pytest.raises(NotWritableError, match="ZeroDivisionError"):
        tree_spec.write([clock], [])


def test_values_that_stand_in_each_other_without_end_are_refused():
    tree_spec.register_kind(Clock, "test.clock", to_tree=lambda c: Clock(c.ticks + 1, None), from_tree=Clock)
    try:
        with pytest.raises(NotWritableError, match="stand in each other"):
            tree_spec.write(Clock(0, None), [])
    finally:
        tree_spec.registered.clear()


def test_a_name_means_one_type_and_kinds_of_the_list_stay_as_they_are(clock):
    for kind, name in (
        (Pair, "test.clock"),
        (Clock, "test.other"),
        (dict, "d"),
        (int, "i"),
        (np.float32, "f"),
    ):
        with pytest.raises(ValueError, match="another"):
            tree_spec.register_kind(kind, name, to_tree=list, from_tree=list)
    with pytest.raises(TypeError, match="takes a class"):
        tree_spec.register_kind("Pair", "p", to_tree=list, from_tree=list)


SLOT = ["slot", [], 0, "float32", 0, [4], [1], False, False, True]
ARRAY = ["array", [], 1, "<f4", 0, [4], [4], True, "own"]


def changed(node, position, value):
    return [*node[:position], value, *node[position + 1 :]]


@pytest.mark.parametrize(
    "node",
    [
        ["set", []],
        ["slot", []],
        ["list", {}],
        ["list", [9]],
        ["list", [-1]],
        ["list", [["int", "0x1"]]],
        ["list", [["float", "00"]]],
        ["list", [["eval", "1"]]],
        ["list", [1.5]],
        ["list", [["dtype", "load"]]],
        ["list", [["device", "no such", None]]],
        ["list", [["scalar", "O8", "AAAAAAAAAAA="]]],
        ["list", [["scalar", "<f4", "AA=="]]],
        ["list", [["size", [1.5]]]],
        ["list", [["bytes", "?"]]],
        ["list", [["bytes", None]]],
        ["list", [["str", 5]]],
        ["list", [["int", None]]],
        ["list", [["float"]]],
        ["tuple", [0]],
        ["whole", []],
        ["deque", [None], -1],
        ["deque", [None, None], 1],
        ["dict", [None]],
        ["dict", ["a", 1, "a", 2]],
        ["odict", [0, None]],
        changed(SLOT, 2, 1),
        changed(SLOT, 2, -1),
        changed(SLOT, 2, True),
        changed(SLOT, 3, "float33"),
        changed(SLOT, 4, 1),
        changed(SLOT, 4, -1),
        changed(SLOT, 5, [5]),
        changed(SLOT, 5, [-4]),
        changed(SLOT, 5, [4, 4]),
        changed(SLOT, 6, [2]),
        changed(SLOT, 6, [-1]),
        changed(SLOT, 7, 1),
        changed(SLOT, 9, None),
        changed(changed(SLOT, 3, "int32"), 7, True),
        changed(changed(SLOT, 5, [2**62, 2**62]), 6, [0, 0]),
        changed(ARRAY, 2, 0),
        changed(ARRAY, 2, 2),
        changed(ARRAY, 3, "|O"),
        changed(ARRAY, 3, "O"),
        changed(ARRAY, 3, ["f4"]),
        changed(ARRAY, 4, 1),
        changed(ARRAY, 5, [5]),
        changed(ARRAY, 6, [-4]),
        changed(ARRAY, 6, [8]),
        changed(ARRAY, 7, None),
        changed(ARRAY, 8, "mine"),
        ["tensor", [], 0, *SLOT[3:], "cpu", None],
        ["tensor", [], 1, *SLOT[3:], "cuda", 0],
        ["registered", [], "nobody", {"nodes": [], "root": None}],
    ],
    ids=str,
)
def test_a_document_that_lies_is_refused(node):
    storages = [torch.zeros(16, dtype=torch.uint8).untyped_storage() for _ in range(2)]
    document = {"version": 1, "storages": 1, "nodes": [["list", []], SLOT, ARRAY], "root": 0}
    decode.read(copy.deepcopy(document), storages)  # it is the node that makes the lie
    document["nodes"][0] = node
    with pytest.raises(BadFileError):
        decode.read(document, storages)


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"storages": 3}, {"storages": None}, {"nodes": 5}, {"root": 7}, {"root": {}}],
    ids=str,
)
def test_a_document_with_another_head_is_refused(change):
    storages = [torch.zeros(16, dtype=torch.uint8).untyped_storage()] * 2
    document = {"version": 1, "storages": 1, "nodes": [SLOT], "root": 0}
    with pytest.raises(BadFileError):
        decode.read({**document, **change}, storages)
    for none in (None, [], "x"):
        with pytest.raises(BadFileError):
            decode.read(none, storages)


def test_a_nest_that_could_not_be_put_together_is_refused():
    nodes = [["list", [number + 1]] for number in range(300)] + [["list", []]]
    with pytest.raises(BadFileError, match="deep"):
        decode.read({"version": 1, "storages": 0, "nodes": nodes, "root": 0}, [])


def test_a_key_that_would_take_for_ever_to_hash_is_refused():
    nodes = [["tuple", [None]], *(["tuple", [n, n]] for n in range(100)), ["dict", [100, None]]]
    with pytest.raises(BadFileError, match="too large"):
        decode.read({"version": 1, "storages": 0, "nodes": nodes, "root": 101}, [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from([2**70, 0.5, "a", "slot", "float32"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)


@given(trees(), st.data())
@sized(4000)
def test_no_change_of_a_document_raises_anything_else_or_reads_outside(tree, data):
    packed = pack(tree)
    written = tree_spec.write(packed.skeleton, packed.storages)
    storages = [*packed.storages, *written.extra]
    document = json.loads(json.dumps(written.document))
    target, key = document, data.draw(st.sampled_from(sorted(document)))
    while isinstance(target[key], list | dict) and target[key] and data.draw(st.integers(0, 4)):
        target = target[key]
        key = data.draw(st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target))))
    target[key] = data.draw(JSON)
    try:
        back = decode.read(document, storages)
    except BadFileError:
        return
    unpack(back, storages)  # what was not refused can be put together


def test_a_slot_is_shared_where_the_tensor_was():
    tensor = torch.ones(2)
    packed = pack([tensor, [tensor]])
    written = tree_spec.write(packed.skeleton, packed.storages)
    back = decode.read(written.document, packed.storages)
    assert isinstance(back[0], TensorSlot)
    assert back[0] is back[1][0]


def test_a_whole_value_is_whole_again():
    back = decode.read(tree_spec.write([Whole([1, [2]])], []).document, [])
    assert isinstance(back[0], Whole)
    assert back[0].value == [1, [2]]


@pytest.mark.parametrize("number", [10**5000, -(7**9000)], ids=["+", "-"])
def test_an_integer_may_have_more_digits_than_the_interpreter_prints(number):
    assert (through_text([number])[0] == number) is True

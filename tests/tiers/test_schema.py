"""What comes out of a document is what went in, bit for bit; what cannot go in is named; lies are refused."""

import json
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
from codec import addresses, alike, through_text, trees
from files import SESSION, file_of, summed
from hypothesis import given
from hypothesis import strategies as st
from profiles import sized

from vllm_omni_session_state.base.errors import BadFileError, NotWritableError
from vllm_omni_session_state.offload import registered, unpack
from vllm_omni_session_state.offload.file_format import read_file
from vllm_omni_session_state.offload.pack import pack_whole


def read(path, tree, storages):
    """What a file of that JSON brings back."""
    contents = read_file(file_of(path / "x", tree, storages))
    return unpack.unpack(contents.tree, contents.storages)


@given(trees())
@sized(4000)
def test_what_is_read_is_what_was_written(tree):
    back = through_text(tree)
    assert alike(tree, back, {})
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
    with pytest.raises(NotWritableError, match=why) as caught:
        pack_whole({"attrs": {"foo": [0, 1, 2, (value,)]}})
    assert caught.value.path == "attrs.foo[3][0]"
    assert type(value).__qualname__ in caught.value.kind
    assert "register_kind" in str(caught.value)


def test_a_file_mapped_into_memory_is_not_written(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.uint8, "w+", shape=(4,))
    with pytest.raises(NotWritableError, match="a buffer or a file has it"):
        pack_whole(mapped[1:].view(np.ndarray))


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
        with pytest.raises(NotWritableError, match="or a file has it"):
            pack_whole([value])


def test_a_key_of_too_many_values_is_refused_in_writing():
    most = tuple(range(unpack.KEY_WEIGHT - 1))
    unpack.prove(pack_whole({most: 1}))
    with pytest.raises(NotWritableError, match="a dict's key is too large"):
        unpack.prove(pack_whole({(*most, 1): 1}))


@dataclass
class Clock:
    """A type of a model's own."""

    ticks: int
    table: torch.Tensor


@pytest.fixture
def clock():
    registered.register_kind(
        Clock,
        "test.clock",
        to_tree=lambda c: {"ticks": c.ticks, "table": c.table},
        from_tree=lambda t: Clock(**t),
    )
    yield Clock(3, torch.arange(6)[2:])
    registered.registered.clear()


def test_a_registered_type_comes_back_and_stays_shared(clock):
    back = through_text({"a": clock, "b": [clock]})
    assert back["a"] is back["b"][0]
    assert back["a"].ticks == 3
    assert back["a"].table.tolist() == [2, 3, 4, 5]
    assert back["a"].table.storage_offset() == 2


def test_what_a_registered_value_shares_with_the_rest_is_refused_rather_than_parted(clock):
    clock.ticks = shared = [1]
    with pytest.raises(NotWritableError, match="shares it with the rest") as caught:
        pack_whole({"attrs": {"s": shared, "clock": clock}})
    assert caught.value.path == "attrs.clock.ticks"


def test_a_type_that_nobody_registered_here_is_refused(clock):
    packed = pack_whole([clock])
    registered.registered.clear()
    with pytest.raises(BadFileError, match="not registered"):
        unpack.unpack(packed.tree, packed.storages)


def test_adapters_that_raise_are_typed_errors(clock):
    registered.register_kind(Clock, "test.clock", to_tree=lambda c: c.table, from_tree=lambda t: 1 / 0)
    packed = pack_whole([clock])
    with pytest.raises(BadFileError, match="ZeroDivisionError"):
        unpack.unpack(packed.tree, packed.storages)
    registered.register_kind(Clock, "test.clock", to_tree=lambda c: 1 / 0, from_tree=Clock)
    with pytest.raises(NotWritableError, match="ZeroDivisionError"):
        pack_whole([clock])


def test_values_that_stand_in_each_other_without_end_are_refused():
    registered.register_kind(Clock, "test.clock", to_tree=lambda c: Clock(c.ticks + 1, None), from_tree=Clock)
    try:
        with pytest.raises(NotWritableError, match="stand in each other"):
            pack_whole(Clock(0, None))
    finally:
        registered.registered.clear()


def test_a_name_means_one_type_and_kinds_of_the_list_stay_as_they_are(clock):
    for kind, name in (
        (Pair, "test.clock"),
        (Clock, "test.other"),
        (dict, "d"),
        (int, "i"),
        (np.float32, "f"),
    ):
        with pytest.raises(ValueError, match="another"):
            registered.register_kind(kind, name, to_tree=list, from_tree=list)
    with pytest.raises(TypeError, match="takes a class"):
        registered.register_kind("Pair", "p", to_tree=list, from_tree=list)


TENSOR = ["tensor", 0, "float32", 0, [4], [1], False, False, True]
ARRAY = ["array", 1, "<f4", 0, [4], [4], True, "own"]


def changed(node, position, value):
    return [*node[:position], value, *node[position + 1 :]]


@pytest.mark.parametrize(
    "node",
    [
        ["set", []],
        ["stay", 1],
        ["tensor", []],
        ["list", [], None],
        ["list"],
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
        ["list", [["int", "1\n"]]],
        ["list", [["float", "AAAAAAAAAAA= "]]],
        ["list", [["float", "AAAAAAAAAA=="]]],
        ["list", [["complex", "AAAAAAAAAAA="]]],
        ["list", [["str", "/w=="]]],
        ["list", [["leaf", None]]],
        ["list", [["float"]]],
        ["tuple", [0]],
        ["tuple", [3]],
        ["deque", [None], -1],
        ["deque", [None], True],
        ["deque", [None], 2**63],
        ["deque", [None, None], 1],
        ["dict", [None]],
        ["dict", ["a", True, "a", False]],
        ["odict", [0, None]],
        ["leaf", 9],
        changed(TENSOR, 1, 2),
        changed(TENSOR, 1, -1),
        changed(TENSOR, 1, True),
        changed(TENSOR, 2, "float33"),
        changed(TENSOR, 2, "Tensor"),
        changed(TENSOR, 3, 1),
        changed(TENSOR, 3, -1),
        changed(TENSOR, 4, [5]),
        changed(TENSOR, 4, [-4]),
        changed(TENSOR, 4, [4, 4]),
        changed(TENSOR, 5, [2]),
        changed(TENSOR, 5, [-1]),
        changed(TENSOR, 6, 1),
        changed(TENSOR, 8, None),
        changed(changed(TENSOR, 2, "int32"), 6, True),
        changed(changed(TENSOR, 4, [2**62, 2**62]), 5, [0, 0]),
        changed(changed(TENSOR, 4, [1] * 65), 5, [0] * 65),
        changed(ARRAY, 1, 2),
        changed(ARRAY, 1, -1),
        changed(ARRAY, 2, "|O"),
        changed(ARRAY, 2, "|O8"),
        changed(ARRAY, 2, "O"),
        changed(ARRAY, 2, "<M8[no]"),
        changed(ARRAY, 2, ["f4"]),
        changed(ARRAY, 3, 1),
        changed(ARRAY, 4, [5]),
        changed(ARRAY, 4, [2**62, 2**62]),
        changed(ARRAY, 5, [-4]),
        changed(ARRAY, 5, [8]),
        changed(ARRAY, 6, None),
        changed(ARRAY, 7, "mine"),
        changed(changed(ARRAY, 4, [2**40]), 5, [0]),
        ["registered", "nobody", {"nodes": [], "root": None}],
        ["registered", "nobody", {"nodes": []}],
    ],
    ids=str,
)
def test_values_that_lie_are_refused(tmp_path, node):
    storages = [torch.zeros(16, dtype=torch.uint8).untyped_storage() for _ in range(2)]
    tree = {"nodes": [["list", [1, 2]], TENSOR, ARRAY, ["tuple", [0]]], "root": 0}
    read(tmp_path, tree, storages)  # it is the node that makes the lie
    tree["nodes"][0] = node
    with pytest.raises(BadFileError):
        read(tmp_path, tree, storages)


@pytest.mark.parametrize(
    "tree",
    [
        *(None, [], "x", {}),
        {"nodes": 5, "root": 0},
        {"nodes": [TENSOR], "root": 7},
        {"nodes": [TENSOR], "root": {}},
        {"nodes": [TENSOR]},
        {"nodes": [TENSOR], "root": 0, "more": 0},
    ],
    ids=str,
)
def test_what_is_no_tree_is_refused(tmp_path, tree):
    storages = [torch.zeros(16, dtype=torch.uint8).untyped_storage()]
    read(tmp_path, {"nodes": [TENSOR], "root": 0}, storages)
    with pytest.raises(BadFileError):
        read(tmp_path, tree, storages)


def test_registered_values_that_stand_in_each_other_without_end_are_refused_in_reading(clock, tmp_path):
    tree = {"nodes": [], "root": None}
    for _ in range(registered.MOST_DEEP + 1):
        tree = {"nodes": [["registered", "test.clock", tree]], "root": 0}
    with pytest.raises(BadFileError, match="too deep"):
        read(tmp_path, tree, [])


def test_values_that_stand_in_each_other_beyond_all_measure_are_refused(tmp_path):
    deep = '{"nodes":[["registered","x",' * 3000 + "null" + ']],"root":0}' * 3000
    head = f'{{"session":"{SESSION}","sizes":[],"checksums":[],"tree":'
    (tmp_path / "x").write_bytes(summed(f"{head}{deep}}}", []))
    with pytest.raises(BadFileError, match="RecursionError"):
        read_file(tmp_path / "x")


def test_an_array_that_says_it_has_more_memory_than_the_file_gets_none(tmp_path):
    """Copied as its own it would take a gigabyte for one byte."""
    tree = {"nodes": [["array", 0, "|u1", 0, [2**30], [0], True, "own"]], "root": 0}
    with pytest.raises(BadFileError, match="does not fill the memory"):
        read(tmp_path, tree, [torch.zeros(1, dtype=torch.uint8).untyped_storage()])


def test_a_nest_of_any_depth_is_read(tmp_path):
    for kind in ("list", "tuple"):
        nodes = [[kind, [number + 1]] for number in range(5000)] + [[kind, []]]
        back = read(tmp_path, {"nodes": nodes, "root": 0}, [])
        for _ in range(5000):
            (back,) = back
        assert not back


@pytest.mark.parametrize("nodes", [[["tuple", [0]]], [["tuple", [1]], ["tuple", [None, 0]]]], ids=str)
def test_a_tuple_that_could_not_be_made_is_refused(tmp_path, nodes):
    with pytest.raises(BadFileError, match="hold each other"):
        read(tmp_path, {"nodes": nodes, "root": 0}, [])


def test_a_key_that_would_take_for_ever_to_hash_is_refused(tmp_path):
    nodes = [["tuple", [None]], *(["tuple", [n, n]] for n in range(100)), ["dict", [100, None]]]
    with pytest.raises(BadFileError, match="too large"):
        read(tmp_path, {"nodes": nodes, "root": 101}, [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from([2**70, 0.5, "a", "tensor", "float32"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)


@given(trees(), st.data())
@sized(4000)
def test_no_change_of_a_tree_raises_anything_else_or_reads_outside(tmp_path_factory, tree, data):
    packed = pack_whole(tree)
    written = json.loads(msgspec.json.encode(packed.tree))
    target, key = written, data.draw(st.sampled_from(sorted(written)))
    while isinstance(target[key], list | dict) and target[key] and data.draw(st.integers(0, 4)):
        target = target[key]
        key = data.draw(st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target))))
    target[key] = data.draw(JSON)
    try:
        read(tmp_path_factory.getbasetemp(), written, packed.storages)
    except BadFileError:
        return


def test_a_tensor_is_one_node_wherever_it_is():
    tensor = torch.ones(2)
    back = through_text([tensor, [tensor]])
    assert back[0] is back[1][0]


def test_a_file_is_complete_in_itself(tmp_path):
    """Another process, which never saw the session, finds every value in it."""
    tensor = torch.arange(6, dtype=torch.float16)
    tree = {"attrs": {"a": [tensor, tensor[2:]], "n": -0.0, "s": "\ud800"}, "objects": {"b": np.arange(3)}}
    packed = pack_whole(tree)
    path = file_of(tmp_path / "x", json.loads(msgspec.json.encode(packed.tree)), packed.storages)
    script = (
        "import sys, torch\n"
        "from vllm_omni_session_state.offload.file_format import read_file\n"
        "from vllm_omni_session_state.offload.unpack import unpack\n"
        "found = read_file(sys.argv[1])\n"
        "tree = unpack(found.tree, found.storages)\n"
        "(whole, part), n, s = tree['attrs'].values()\n"
        "part[0] = 9\n"
        "print(whole.tolist(), part.dtype, n, ascii(s), tree['objects']['b'].tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == (
        "[0.0, 1.0, 9.0, 3.0, 4.0, 5.0] torch.float16 -0.0 '\\ud800' [0, 1, 2]"
    )


@pytest.mark.parametrize("number", [10**5000, -(7**9000)], ids=["+", "-"])
def test_an_integer_may_have_more_digits_than_the_interpreter_prints(number):
    assert (through_text([number])[0] == number) is True

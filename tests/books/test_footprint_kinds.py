"""One test per kind of value: what memory it keeps alive, taken from how it was made."""

from __future__ import annotations

import array
import gc
import mmap
import sys
import warnings
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from vllm_omni_session_state import footprint as footprint_module
from vllm_omni_session_state.footprint import footprint, register_children
from vllm_omni_session_state.regions import Region


def region(tensor, device="cpu"):
    """The region of a whole, contiguous tensor that owns its storage."""
    return Region(device, tensor.data_ptr(), tensor.numel() * tensor.element_size())


def regions(*tensors):
    return tuple(sorted(map(region, tensors)))


def array_region(owner):
    return Region("cpu", owner.ctypes.data, owner.nbytes)


@pytest.fixture
def registered():
    """Forget what a test registers."""
    before = dict(footprint_module._registered)
    yield register_children
    footprint_module._registered.clear()
    footprint_module._registered.update(before)


def test_a_narrow_view_counts_the_whole_storage_and_many_views_count_it_once():
    whole = torch.zeros(1000)
    assert footprint(whole[3:4], whole[::7], whole.view(10, 100).t()).regions == regions(whole)


def test_coo_counts_its_indices_and_its_values_coalesced_or_not():
    indices, values = torch.tensor([[0, 1, 1], [2, 0, 0]]), torch.tensor([3.0, 4.0, 5.0])
    sparse = torch.sparse_coo_tensor(indices, values, (2, 3))
    expected = tuple(sorted({region(sparse._indices()), region(sparse._values())}))
    assert footprint(sparse).regions == expected
    assert footprint(sparse).nbytes == 6 * 8 + 3 * 4
    assert footprint(sparse.coalesce()).nbytes == 4 * 8 + 2 * 4


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_compressed_sparse_counts_its_three_parts(layout, requires_grad):
    make = getattr(torch, f"sparse_{layout}_tensor")
    compressed, plain = torch.tensor([0, 1, 2]), torch.tensor([0, 1])
    values = torch.ones(2) if layout in {"csr", "csc"} else torch.ones(2, 2, 2)
    sparse = make(compressed, plain, values, requires_grad=requires_grad)
    found = footprint(sparse)
    assert found.nbytes == 3 * 8 + 2 * 8 + values.numel() * 4
    assert len(found.regions) == 3
    assert not found.opaque
    assert footprint(sparse, sparse.values(), sparse).nbytes == found.nbytes


def test_mkldnn_counts_its_buffer():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no mkldnn")
    assert footprint(torch.zeros(4, 8).to_mkldnn()).nbytes == 4 * 8 * 4


def test_quantized_counts_its_storage_and_the_scales_and_zero_points_of_its_channels():
    values = torch.randn(3, 4)
    by_tensor = torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)
    scales, zeros = torch.full((3,), 0.1, dtype=torch.double), torch.zeros(3, dtype=torch.long)
    by_channel = torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)
    assert footprint(by_tensor).nbytes == 12
    assert footprint(by_channel).nbytes == 12 + 3 * 8 + 3 * 8
    assert region(by_channel.q_per_channel_scales()) in footprint(by_channel).regions


def test_nested_counts_its_buffer_and_its_shape_tensors():
    parts = [torch.zeros(2, 3), torch.zeros(4, 3)]
    strided = torch.nested.nested_tensor(parts)
    shapes = [strided._nested_tensor_size(), strided._nested_tensor_strides()]
    shapes.append(strided._nested_tensor_storage_offsets())
    assert footprint(strided).nbytes == 18 * 4 + sum(t.numel() * 8 for t in shapes)
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert set(regions(jagged.values(), jagged.offsets())) <= set(footprint(jagged).regions)
    assert footprint(jagged, jagged.values()).nbytes == footprint(jagged).nbytes < 18 * 4 + 3 * 8 + 64


class Twin(torch.Tensor):
    """A wrapper subclass over two tensors, with no storage of its own."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @classmethod
    def __torch_dispatch__(cls, *args, **kwargs):
        raise RuntimeError("nothing may be computed on it")


class Hidden(Twin):
    """The same without the method that names its parts."""

    __tensor_flatten__ = None


def test_wrapper_subclasses_count_what_they_wrap():
    a, b = torch.zeros(5), torch.zeros(7)
    assert footprint(Twin(a, b[:2])).regions == regions(a, b)
    assert footprint(Twin(a, Twin(b, a))).regions == regions(a, b)
    del Hidden.__tensor_flatten__
    assert not hasattr(torch.Tensor, "__tensor_flatten__")


def test_a_wrapper_that_does_not_flatten_counts_its_attributes():
    class Bare(torch.Tensor):
        pass

    inner = torch.zeros(9)
    bare = torch.Tensor._make_wrapper_subclass(Bare, (9,), dtype=torch.float32)
    bare.inner = inner
    assert footprint(bare).regions == regions(inner)


def test_meta_and_fake_tensors_hold_nothing_and_are_told_apart_from_nothing_else():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = [torch.zeros(4), torch.zeros(3)]
    meta = [torch.zeros(10, device="meta"), torch.zeros(20, device="meta")]
    nothing = footprint(fake, meta, torch._efficientzerotensor(5), torch.empty(0))
    assert nothing.regions == ()
    assert nothing.nbytes_by_device() == {}
    assert not nothing.opaque


def test_a_gradient_and_an_attribute_hang_on_their_tensor():
    weight = torch.nn.Parameter(torch.zeros(8))
    (weight * 2).sum().backward()
    note = torch.zeros(3)
    weight.note = [note, weight]
    assert footprint(weight).regions == regions(weight, weight.grad, note)
    weight.requires_grad_(False)
    assert footprint(weight).regions == regions(weight, weight.grad, note)


def test_gradients_that_are_each_others_end_the_walk():
    a, b = torch.zeros(4), torch.zeros(4)
    a.grad, b.grad = b, a
    assert footprint(a).regions == regions(a, b)
    a.grad = b.grad = None


def test_an_autograd_graph_cannot_be_seen_and_is_reported_without_a_warning():
    weight = torch.zeros(4, requires_grad=True)
    result = (weight * 2).exp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = footprint(result)
    assert region(result) in found.regions
    assert any("ExpBackward" in name for name in found.opaque)


def test_inference_tensors_are_counted_outside_inference_mode():
    with torch.inference_mode():
        made = torch.zeros(6)
        sparse = torch.eye(3).to_sparse()
    assert footprint(made).regions == regions(made)
    assert footprint(sparse).nbytes == 3 * 16 + 3 * 4


def test_a_default_device_does_not_reach_into_the_walk():
    tensor = torch.zeros(4)
    with torch.device("meta"):
        assert footprint([tensor], tensor.to_sparse()).regions[:0] == ()
        assert region(tensor) in footprint([tensor]).regions


def test_storages_count_as_themselves():
    tensor = torch.zeros(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        typed = tensor.storage()
    assert footprint(typed).regions == footprint(tensor.untyped_storage()).regions == regions(tensor)


def test_pinned_memory_is_a_pool_of_its_own_also_through_numpy(monkeypatch):
    locked, pageable = torch.zeros(64), torch.zeros(32)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t: t.data_ptr() == locked.data_ptr())
    monkeypatch.setattr(torch.UntypedStorage, "is_pinned", lambda s: s.data_ptr() == locked.data_ptr())
    found = footprint(locked.numpy()[2:], locked, pageable)
    assert found.nbytes_by_device() == {"pinned": 256, "cpu": 128}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_each_accelerator_and_the_pinned_pool_are_named():
    on_device, locked = torch.zeros(16, device="cuda:0"), torch.zeros(8).pin_memory()
    found = footprint(on_device[:1], locked.numpy(), torch.zeros(4))
    assert found.nbytes_by_device() == {"cuda:0": 64, "pinned": 32, "cpu": 16}


def test_an_array_counts_the_allocation_behind_any_view():
    owner = np.zeros((10, 10))
    views = [
        owner[3, 4:5],
        owner[::-1, ::-2],
        owner.T,
        np.broadcast_to(owner[0, :1], (1000, 1000)),
        np.lib.stride_tricks.as_strided(owner, (5,), (0,)),
        np.lib.stride_tricks.sliding_window_view(owner[0], 3),
        owner.view([("x", "f8")])["x"],
        owner.reshape(-1).view(np.matrix),
        np.ma.array(owner, copy=False),
        owner[:0],
        memoryview(owner),
        np.asarray(memoryview(owner)[2:3]),
    ]
    for view in views:
        assert footprint(view).regions == (array_region(owner),)
    assert footprint(*views).nbytes == 800


def test_a_masked_array_counts_its_mask():
    masked = np.ma.array(np.zeros(8), mask=[True] * 8)
    assert footprint(masked).nbytes == 64 + 8


def test_an_owner_with_gaps_counts_from_its_lowest_to_its_highest_byte():
    strided = np.ndarray((3,), np.uint8, strides=(4,))
    assert footprint(strided).regions == (Region("cpu", strided.ctypes.data, 9),)
    foreign = np.frombuffer(torch.zeros(10).numpy(), np.uint8)[::-3]
    assert footprint(foreign).nbytes == 40


def test_an_array_over_a_tensor_counts_the_tensors_storage():
    tensor = torch.zeros(100)
    for view in (tensor.numpy(), tensor[5:6].numpy(), np.frombuffer(tensor.numpy(), "u1", 8, 4)):
        assert footprint(view).regions == regions(tensor)
        assert footprint(view, tensor).regions == regions(tensor)


def test_a_tensor_over_an_array_counts_once_with_it():
    owner = np.zeros(100, np.float32)
    part = torch.from_numpy(owner[10:20])
    assert footprint(part, owner).regions == (array_region(owner),)
    assert footprint([part, owner[50:]]).nbytes == 400


def test_python_cannot_see_past_a_tensor_over_a_part_of_a_foreign_buffer():
    """The limit: such a tensor keeps the whole buffer alive, and nothing in Python leads from it there."""
    owner = np.zeros(100, np.float32)
    assert footprint(torch.from_numpy(owner[10:20])).nbytes == 40  # 400 are kept alive
    assert footprint(torch.frombuffer(bytearray(64), dtype=torch.uint8, offset=60)).nbytes == 4
    capsule = np.from_dlpack(torch.zeros(16)[4:8])
    assert footprint(capsule).nbytes == 16
    assert footprint(capsule).opaque == {"builtins.PyCapsule"}


@pytest.mark.parametrize(
    "buffer",
    [b"x" * 64, bytearray(64), array.array("d", [0.0] * 8), mmap.mmap(-1, 64), memoryview(bytearray(64))],
    ids=lambda buffer: type(buffer).__name__,
)
def test_a_buffer_counts_its_payload_and_so_does_an_array_over_part_of_it(buffer):
    assert footprint(buffer).nbytes == 64
    whole = footprint(buffer).regions
    part = np.frombuffer(buffer, np.uint8, count=2, offset=5)
    assert footprint(part).regions == footprint(memoryview(buffer)).regions == whole
    assert footprint(np.frombuffer(memoryview(buffer).cast("B")[8:16], np.uint8)).regions == whole


def test_a_memory_map_counts_all_that_is_mapped(tmp_path):
    path = tmp_path / "frames"
    path.write_bytes(b"\0" * 300)
    mapped = np.memmap(path, np.uint8, mode="r")
    assert footprint(mapped[100:101]).nbytes == footprint(mapped).nbytes == 300
    assert footprint(mapped.view(np.ndarray)[:1]).nbytes == 300


def test_an_object_array_counts_its_pointers_and_its_elements():
    tensor = torch.zeros(4)
    holder = np.empty((2, 3), object)
    holder[1, 2] = [tensor]
    holder[0, 0] = holder
    for view in (holder, holder[:1, :1], holder.view(np.matrix), np.ma.array(holder, copy=False)):
        assert footprint(view).nbytes == 48 + 16
    records = np.zeros(2, [("n", "i4"), ("held", "O", (2,))])
    records[1]["held"][0] = tensor
    assert footprint(records["n"]).nbytes == records.nbytes + 16
    assert footprint(records[0]).nbytes == records.nbytes + 16


def test_strings_in_an_arena_are_reported():
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("NumPy 1")
    found = footprint(np.array(["x" * 100], dtype=np.dtypes.StringDType()))
    assert found.nbytes == 16
    assert any("StringDType" in name for name in found.opaque)


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
        lambda v: Plain(v),
        lambda v: Slotted(v),
        lambda v: Plain([{"k": (Slotted(v), deque([v]))}]),
        lambda v: torch.return_types.max((v, v)),
        lambda v: torch.nn.utils.rnn.PackedSequence(v, torch.empty(0)),
    ],
)
def test_every_container_kind_is_opened(wrap):
    tensor = torch.zeros(4)
    assert footprint(wrap(tensor)).regions == regions(tensor)
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
    assert footprint(Frames([tensor]), MoreFrames([tensor])).regions == regions(tensor)
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
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            footprint(*values)
        assert [sys.getrefcount(value) for value in values] == counts
        assert gc.collect() == 0
    finally:
        gc.enable()

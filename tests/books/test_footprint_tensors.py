"""What memory each kind of tensor keeps alive, taken from how it was made."""

from __future__ import annotations

import warnings

import pytest
import torch
from byte_oracle import allocation, allocations

from vllm_omni_session_state.accounting.footprint import footprint


def test_a_narrow_view_counts_the_whole_storage_and_many_views_count_it_once():
    whole = torch.zeros(1000)
    assert footprint(whole[3:4], whole[::7], whole.view(10, 100).t()).allocations == allocations(whole)


def test_coo_counts_its_indices_and_its_values_coalesced_or_not():
    indices, values = torch.tensor([[0, 1, 1], [2, 0, 0]]), torch.tensor([3.0, 4.0, 5.0])
    sparse = torch.sparse_coo_tensor(indices, values, (2, 3))
    expected = tuple(sorted({allocation(sparse._indices()), allocation(sparse._values())}))
    assert footprint(sparse).allocations == expected
    assert footprint(sparse).nbytes == 6 * 8 + 3 * 4
    merged = sparse.coalesce()  # narrows, on the storage of the unmerged
    assert footprint(merged).nbytes == merged._indices().untyped_storage().nbytes() + 3 * 4


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_compressed_sparse_counts_its_three_parts(layout, requires_grad):
    make = getattr(torch, f"sparse_{layout}_tensor")
    compressed, plain = torch.tensor([0, 1, 2]), torch.tensor([0, 1])
    values = torch.ones(2) if layout in {"csr", "csc"} else torch.ones(2, 2, 2)
    sparse = make(compressed, plain, values, requires_grad=requires_grad)
    found = footprint(sparse)
    assert found.nbytes == 3 * 8 + 2 * 8 + values.numel() * 4
    assert len(found.allocations) == 3
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
    assert allocation(by_channel.q_per_channel_scales()) in footprint(by_channel).allocations


def test_nested_counts_its_buffer_and_its_shape_tensors():
    parts = [torch.zeros(2, 3), torch.zeros(4, 3)]
    strided = torch.nested.nested_tensor(parts)
    shapes = [strided._nested_tensor_size(), strided._nested_tensor_strides()]
    shapes.append(strided._nested_tensor_storage_offsets())
    assert footprint(strided).nbytes == 18 * 4 + sum(t.numel() * 8 for t in shapes)
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert set(allocations(jagged.values(), jagged.offsets())) <= set(footprint(jagged).allocations)
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


def test_wrapper_subclasses_count_what_they_wrap():
    a, b = torch.zeros(5), torch.zeros(7)
    assert footprint(Twin(a, b[:2])).allocations == allocations(a, b)
    assert footprint(Twin(a, Twin(b, a))).allocations == allocations(a, b)


def test_a_wrapper_that_does_not_flatten_counts_its_attributes():
    class Bare(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *args, **kwargs):
            raise RuntimeError("nothing may be computed on it")

    inner = torch.zeros(9)
    bare = torch.Tensor._make_wrapper_subclass(Bare, (9,), dtype=torch.float32)
    bare.inner = inner
    assert footprint(bare).allocations == allocations(inner)


def test_meta_and_fake_tensors_hold_nothing_and_are_told_apart_from_nothing_else():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = [torch.zeros(4), torch.zeros(3)]
    meta = [torch.zeros(10, device="meta"), torch.zeros(20, device="meta")]
    nothing = footprint(fake, meta, torch._efficientzerotensor(5), torch.empty(0))
    assert nothing.allocations == ()
    assert nothing.nbytes_by_device() == {}
    assert not nothing.opaque


def test_a_gradient_and_an_attribute_hang_on_their_tensor():
    weight = torch.nn.Parameter(torch.zeros(8))
    (weight * 2).sum().backward()
    note = torch.zeros(3)
    weight.note = [note, weight]
    assert footprint(weight).allocations == allocations(weight, weight.grad, note)
    weight.requires_grad_(False)
    assert footprint(weight).allocations == allocations(weight, weight.grad, note)


def test_a_gradient_of_another_kind_is_looked_at_as_what_it_is():
    weight, a, b = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    weight.grad = Twin(a, b)
    assert footprint(weight).allocations == allocations(weight, a, b)


def test_gradients_that_are_each_others_end_the_walk():
    a, b = torch.zeros(4), torch.zeros(4)
    a.grad, b.grad = b, a
    assert footprint(a).allocations == allocations(a, b)
    a.grad = b.grad = None


def test_an_autograd_graph_cannot_be_seen_and_is_reported_without_a_warning():
    weight = torch.zeros(4, requires_grad=True)
    result = (weight * 2).exp()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = footprint(result)
    assert not said
    assert found.allocations == allocations(result)
    assert len(found.opaque) == 1
    assert "ExpBackward" in next(iter(found.opaque))


def test_inference_tensors_are_counted_outside_inference_mode():
    with torch.inference_mode():
        made = torch.zeros(6)
        sparse = torch.eye(3).to_sparse()
    assert footprint(made).allocations == allocations(made)
    assert footprint(sparse).nbytes == 3 * 16 + 3 * 4


def test_a_default_device_does_not_reach_into_the_walk():
    tensor = torch.zeros(4)
    with torch.device("meta"):
        assert allocation(tensor) in footprint([tensor]).allocations


def test_storages_count_as_themselves():
    tensor = torch.zeros(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        typed = tensor.storage()
    assert (
        footprint(typed).allocations == footprint(tensor.untyped_storage()).allocations == allocations(tensor)
    )


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

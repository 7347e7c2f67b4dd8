"""What memory each kind of array and buffer keeps alive, taken from how it was made."""

from __future__ import annotations

import array
import io
import mmap

import numpy as np
import pytest
import torch
from byte_oracle import allocations, array_allocation

from vllm_omni_session_state.accounting.allocations import Allocation
from vllm_omni_session_state.accounting.footprint import footprint


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
        assert footprint(view).allocations == (array_allocation(owner),)
    assert footprint(*views).nbytes == 800


def test_a_masked_array_counts_its_mask():
    masked = np.ma.array(np.zeros(8), mask=[True] * 8)
    assert footprint(masked).nbytes == 64 + 8


class Lender:
    """Lends out memory through NumPy's protocol, as if it lay anywhere."""

    def __init__(self, lent):
        self.lent = lent
        self.__array_interface__ = dict(lent.__array_interface__)


def test_an_owner_with_gaps_counts_from_its_lowest_to_its_highest_byte():
    owner = np.zeros(12, np.uint8)
    foreign = np.array(Lender(owner[8::-4]), copy=False)
    assert foreign.strides == (-4,)
    assert not isinstance(foreign.base, np.ndarray)
    assert footprint(foreign).allocations == (Allocation("cpu", owner.ctypes.data, 9),)
    assert footprint(foreign).opaque == {f"{__name__}.Lender"}
    upwards = np.array(Lender(owner[2::3]), copy=False)
    assert footprint(upwards).allocations == (Allocation("cpu", owner.ctypes.data + 2, 10),)


def test_a_view_of_a_buffer_whose_exporter_is_unknown_counts_its_own_extent():
    view = io.BytesIO(b"x" * 50).getbuffer()[10:]
    assert footprint(view).nbytes == 40
    assert footprint(view).opaque == {"_io._BytesIOBuffer"}
    assert footprint(view[::-2]).nbytes == 39


def test_an_array_over_a_tensor_counts_the_tensors_storage():
    tensor = torch.zeros(100)
    for view in (tensor.numpy(), tensor[5:6].numpy(), np.frombuffer(tensor.numpy(), "u1", 8, 4)):
        assert footprint(view).allocations == allocations(tensor)
        assert footprint(view, tensor).allocations == allocations(tensor)


def test_a_tensor_over_an_array_counts_once_with_it():
    owner = np.zeros(100, np.float32)
    part = torch.from_numpy(owner[10:20])
    assert footprint(part, owner).allocations == (array_allocation(owner),)
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
    whole = footprint(buffer).allocations
    part = np.frombuffer(buffer, np.uint8, count=2, offset=5)
    assert footprint(part).allocations == footprint(memoryview(buffer)).allocations == whole
    assert footprint(np.frombuffer(memoryview(buffer).cast("B")[8:16], np.uint8)).allocations == whole


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
    records["held"][1:, 0] = holder[1, 2:]
    for view in (records, records["n"], records[0]):
        assert footprint(view).nbytes == records.nbytes + 16


def test_strings_in_an_arena_are_reported():
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("NumPy 1")
    found = footprint(np.array(["x" * 100], dtype=np.dtypes.StringDType()))
    assert found.nbytes == 16
    assert any("StringDType" in name for name in found.opaque)

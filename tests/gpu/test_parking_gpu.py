"""What only a GPU shows of parking: memory that is freed, pinned slabs, copies behind queued kernels."""

import gc

import pytest
import torch

from vllm_omni_session_state import LatentBuffer, SessionStateManager
from vllm_omni_session_state.regions import PINNED
from vllm_omni_session_state.tiers.host import HostTier

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MIB = 1 << 20


def fill(session, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    with torch.inference_mode():
        base = torch.randn(8 * MIB, generator=generator, device="cuda", dtype=torch.bfloat16)
        session.attrs["base"] = base
        session.attrs["view"] = base[1024:4096].view(3, 1024)
        session.put("frames", LatentBuffer()).replace([base[:16].clone(), base.narrow(0, 5, 9)])


def copy_of(session):
    held = [session.attrs["base"], session.attrs["view"], *session.get("frames").container]
    return [tensor.detach().cpu() for tensor in held]


@pytest.fixture
def manager():
    gc.collect()
    torch.cuda.empty_cache()
    return SessionStateManager(max_sessions=1, tier=HostTier(budget=1 << 30))


def test_a_parked_session_frees_the_device_and_comes_back_bit_for_bit(manager):
    before = torch.cuda.memory_allocated()
    with manager.lease("a") as session:
        fill(session, 1)
        expected = copy_of(session)
    held = torch.cuda.memory_allocated() - before
    assert held >= 16 * MIB
    with manager.lease("b"):
        pass
    assert manager.peek("a").parked
    assert torch.cuda.memory_allocated() == before
    assert manager.cascade.host.nbytes >= held - 512
    with manager.lease("a") as session:
        assert all(map(torch.equal, copy_of(session), expected))
        assert session.attrs["base"].is_inference()
        assert session.attrs["view"].data_ptr() == session.attrs["base"].data_ptr() + 2048
        assert all(tensor.is_cuda for tensor in (session.attrs["base"], session.attrs["view"]))


def test_a_slab_is_pinned_and_counted_as_pinned(manager):
    with manager.lease("a") as session:
        fill(session, 2)
    manager.park("a")
    assert manager._table.seats["a"].parked.parcel.slab.is_pinned()
    assert manager.stats()[f"nbytes:{PINNED}"] == manager.cascade.host.nbytes


@pytest.mark.parametrize("times", [20])
def test_a_park_copies_what_the_queued_work_will_have_written(manager, times):
    """The forward's kernels may still be queued when a session is parked."""
    for seed in range(times):
        with manager.lease("a") as session:
            square = torch.randn(2048, 2048, device="cuda")
            expected = torch.full((4 * MIB,), float(seed), device="cuda")
            target = session.attrs["late"] = torch.zeros(4 * MIB, device="cuda")
            for _ in range(30):
                square = square @ square.softmax(-1)  # keeps the stream busy while the host runs ahead
            target.copy_(expected + square.sum() * 0)
            del target
        manager.park("a")
        with manager.lease("a") as session:
            assert torch.equal(session.attrs["late"], expected)
        manager.drop_session("a")


def test_no_room_on_the_device_leaves_the_session_parked(manager, monkeypatch):
    from vllm_omni_session_state.errors import SessionRestoreFailedError

    with manager.lease("a") as session:
        fill(session, 3)
        expected = copy_of(session)
    manager.park("a")
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(max(1e-6, (torch.cuda.memory_reserved() + 1) / total))
    torch.cuda.empty_cache()
    try:
        with pytest.raises(SessionRestoreFailedError, match="stays parked: no memory on cuda"):
            manager.prepare("a")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    with manager.lease("a") as session:
        assert all(map(torch.equal, copy_of(session), expected))

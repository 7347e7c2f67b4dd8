"""What only a GPU shows of parking: memory that is freed, page-locked slabs, copies behind queued kernels."""

import gc

import pytest
import torch

from vllm_omni_session_state import LatentBuffer, SessionStateManager
from vllm_omni_session_state.accounting.allocations import PINNED
from vllm_omni_session_state.offload import page_locked
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.host_tier import HostTier

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
    assert manager.offloader.host.nbytes >= held - 512
    with manager.lease("a") as session:
        assert all(map(torch.equal, copy_of(session), expected))
        assert session.attrs["base"].is_inference()
        assert session.attrs["view"].data_ptr() == session.attrs["base"].data_ptr() + 2048
        assert all(tensor.is_cuda for tensor in (session.attrs["base"], session.attrs["view"]))


def test_a_slab_is_pinned_and_counted_as_pinned(manager):
    with manager.lease("a") as session:
        fill(session, 2)
    manager.park("a")
    assert manager._table.entries["a"].gone_to.held.slab.is_pinned()
    assert manager.stats()[f"nbytes:{PINNED}"] == manager.offloader.host.nbytes


def allocator(figure):
    """A figure of torch's own allocator of page-locked memory, in use and cached."""
    return torch.cuda.host_memory_stats()[figure]


def storage(nbytes, fill=0):
    return torch.full((nbytes,), fill, dtype=torch.uint8, device="cuda").untyped_storage()


def content(storage):
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)


@pytest.fixture
def locked_before():
    """Bytes that are page-locked before a test, with nothing cached; whoever they are of."""
    torch.cuda.init()
    gc.collect()
    page_locked.give_back()
    return allocator("allocated_bytes.current")


@pytest.mark.usefixtures("locked_before")
def test_what_is_charged_is_what_torch_has_page_locked(manager):
    with manager.lease("a") as session:
        fill(session, 4)  # 16 MiB and a little: the next power of two is 32 MiB
    before = allocator("allocated_bytes.current")
    manager.park("a")
    assert allocator("allocated_bytes.current") - before == manager.offloader.host.nbytes == 32 * MIB


def test_blocks_that_stay_cached_are_within_the_budget_too(locked_before):
    tier = HostTier(budget=64 * MIB)
    kept = tier.put([storage(3 * MIB, 7)], live_nbytes=0)
    for nbytes in (5 * MIB, 17 * MIB, 9 * MIB, 30 * MIB, MIB, 50 * MIB - 1):
        if page_locked.taken_nbytes(nbytes) + tier.nbytes <= tier.budget:
            parcel = tier.put([storage(nbytes, 3)], live_nbytes=0)
            assert allocator("allocated_bytes.current") - locked_before <= tier.budget
            assert content(tier.get(parcel)[0]).eq(3).all()
            tier.drop(parcel)
            del parcel
        tier.trim(0)
        assert allocator("allocated_bytes.current") - locked_before <= tier.budget
    assert content(tier.get(kept)[0]).eq(7).all(), "what is in use is not given back"
    tier.trim(tier.budget)
    assert allocator("allocated_bytes.current") - locked_before == tier.nbytes


def test_a_block_of_the_same_size_is_not_page_locked_anew(locked_before):
    tier = HostTier(budget=64 * MIB)
    parcels = [tier.put([storage(30 * MIB)], live_nbytes=0)]
    made = allocator("num_host_alloc")
    for _ in range(5):
        tier.get(parcels[0])
        tier.drop(parcels.pop())
        parcels.append(tier.put([storage(31 * MIB)], live_nbytes=0))
    assert allocator("num_host_alloc") == made
    assert allocator("allocated_bytes.current") - locked_before <= tier.budget


def test_a_park_to_the_disk_page_locks_nothing(tmp_path, locked_before):
    disk = DiskTier(tmp_path, budget=1 << 30)
    manager = SessionStateManager(disk=disk)
    with manager.lease("a") as session:
        fill(session, 5)
        expected = copy_of(session)
    assert manager.park("a")
    with manager.lease("a") as session:
        assert all(map(torch.equal, copy_of(session), expected))
    assert allocator("allocated_bytes.current") == locked_before
    disk.close()


@pytest.mark.parametrize("times", [20])
def test_a_park_copies_what_the_queued_work_will_have_written(manager, times):
    """The forward's kernels may still be queued when a session is parked."""
    for seed in range(times):
        with manager.lease("a") as session:
            square = torch.randn(2048, 2048, device="cuda")
            expected = torch.full((4 * MIB,), float(seed), device="cuda")
            target = session.attrs["late"] = torch.zeros(4 * MIB, device="cuda")
            for _ in range(30):
                square = square @ square.softmax(-1)  # keeps the stream busy while vLLM-Omni runs ahead
            target.copy_(expected + square.sum() * 0)
            del target
        manager.park("a")
        with manager.lease("a") as session:
            assert torch.equal(session.attrs["late"], expected)
        manager.drop_session("a")


def test_no_room_on_the_device_leaves_the_session_parked(manager, monkeypatch):
    from vllm_omni_session_state.base.errors import SessionRestoreFailedError

    with manager.lease("a") as session:
        fill(session, 3)
        expected = copy_of(session)
    manager.park("a")
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(max(1e-6, (torch.cuda.memory_reserved() + 1) / total))
    torch.cuda.empty_cache()
    try:
        with pytest.raises(SessionRestoreFailedError, match="stays where it is: no memory on cuda"):
            manager.prepare("a")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    with manager.lease("a") as session:
        assert all(map(torch.equal, copy_of(session), expected))

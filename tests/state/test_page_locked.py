"""Page-locked memory is within ``host_budget``: blocks as they are rounded, and those that stay cached.

The allocator is a fake here; ``tests/gpu`` has torch's own.
"""

import pytest
import torch
from fake_allocator import fake, installed  # noqa: F401 - a fixture
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from profiles import sized
from tiered import FILE, SIZE, all_hold, begin, manager_of

from vllm_omni_session_state.base.errors import CannotParkError, TierFullError
from vllm_omni_session_state.offload import copy, page_locked
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.host_tier import HostTier

MIB = 1 << 20
LARGE = 1 << 30
SIZES = st.sampled_from([0, 1, 500, 512, 513, 1500, 3000])
SLAB = 1024  # what one session of `tiered` takes in host memory, rounded or not


def storage(nbytes, fill=0):
    return torch.full((nbytes,), fill, dtype=torch.uint8).untyped_storage()


@pytest.fixture(autouse=True)
def no_limits_of_the_operator(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def test_a_block_takes_the_next_power_of_two():
    taken = page_locked.taken_nbytes
    assert taken(1634 * MIB) == 2048 * MIB
    assert [taken(nbytes) for nbytes in (0, 1, 2, 3, 512, 513, MIB, MIB + 1)] == [
        *(0, 1, 2, 4, 512, 1024, MIB, 2 * MIB)
    ]
    assert page_locked.stays_cached(2048 * MIB)
    assert not page_locked.stays_cached(0)


@pytest.mark.parametrize(
    ("variables", "taken", "cached"),
    [
        ({"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:1024"}, 1634, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1, pinned_max_cached_size_mb : 1633,b:2"}, 1634, False),
        ({"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1000"}, 1634, True),
        ({"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1634"}, 2048, True),
        ({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "pinned_max_cached_size_mb:1"}, 2048, True),
    ],
)
def test_what_the_operator_told_torch_holds_here_too(monkeypatch, variables, taken, cached):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert page_locked.taken_nbytes(1634 * MIB) == taken * MIB
    assert page_locked.stays_cached(1634 * MIB) is cached


def test_a_session_is_charged_what_its_block_takes(fake):  # noqa: F811
    tier = HostTier(budget=4096)
    parcel = tier.put([storage(1000), storage(200)], live_nbytes=0)
    assert tier.nbytes == parcel.slab.nbytes == parcel.slab.untyped_storage().nbytes() == 2048
    assert fake.active == fake.allocated == 2048
    assert [len(part) for part in parcel.parts()] == [1000, 200]
    with pytest.raises(TierFullError) as refused:
        tier.put([storage(2049)], live_nbytes=0)
    assert (refused.value.wanted, refused.value.room) == (4096, 2048)
    tier.check()


def test_a_block_of_the_same_size_is_used_again_and_not_page_locked_anew(fake):  # noqa: F811
    tier = HostTier(budget=2048)
    parcels = [tier.put([storage(1000)], live_nbytes=0) for _ in range(2)]
    for _ in range(10):
        tier.drop(parcels.pop(0))
        parcels.append(tier.put([storage(900)], live_nbytes=0))
        tier.trim(0)
    assert (fake.made, fake.peak) == (2, 2048)


def test_blocks_of_other_sizes_are_given_back_before_the_budget_is_passed(fake):  # noqa: F811
    tier = HostTier(budget=4096)
    for nbytes in (1000, 2000, 500, 4000, 100, 3000):
        tier.drop(tier.put([storage(nbytes)], live_nbytes=0))
    assert fake.peak <= 4096
    live = 2048
    tier.put([storage(2000)], live_nbytes=live)
    assert fake.allocated + live <= 4096


def test_a_parcel_that_somebody_holds_after_its_drop_is_cached_only_when_it_is_let_go(fake):  # noqa: F811
    tier = HostTier(budget=4096)
    parcel, other = (tier.put([storage(2000)], live_nbytes=0) for _ in range(2))
    tier.drop(parcel)
    tier.drop(other)
    del other
    tier.trim(live_nbytes=4096)
    assert fake.allocated == 2048, "one is in use"
    del parcel
    tier.trim(live_nbytes=4096)
    assert fake.allocated == 0


def test_where_this_torch_cannot_give_back_nothing_breaks(monkeypatch):
    monkeypatch.delattr(torch._C, "_host_emptyCache", raising=False)
    monkeypatch.delattr(torch.accelerator, "empty_host_cache", raising=False)
    page_locked.give_back()
    asked = []
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: asked.append(1), raising=False)
    page_locked.give_back()
    assert asked == [1]


def test_what_goes_straight_to_a_file_is_never_page_locked(fake, tmp_path):  # noqa: F811
    disk = DiskTier(tmp_path, budget=4 * FILE)
    manager = manager_of(disk)
    begin(manager, "a", "b")
    assert manager.stats()["disk_sessions"] == 2
    all_hold(manager, "a", "b")
    assert fake.peak == 0
    disk.close()


def test_figures_of_bytes_are_of_what_is_taken(fake):  # noqa: F811
    manager = manager_of(None, host=LARGE)
    with manager.lease("a") as session:
        session.attrs["base"] = torch.zeros(1500, dtype=torch.uint8)
    stats = manager.stats()
    assert stats["host_parked_nbytes"] == stats["total_nbytes"] == fake.active == 2048
    all_bytes = [entry.parked_nbytes for entry in manager.listing()]
    assert all_bytes == [{"cpu": 2048}]


def test_sessions_that_change_places_at_a_full_budget_are_within_it_after_each_step(fake):  # noqa: F811
    manager = manager_of(None, host=3 * SLAB + 4 * 650, max_sessions=1)
    begin(manager, *"abcd")
    for name in "abcdabcdcabd":
        all_hold(manager, name)
        manager.capacity.enforce()
        assert fake.allocated == manager.stats()["host_parked_nbytes"] + cached_in(manager)
        assert (
            fake.allocated + manager.stats().get("tier_nbytes:host:live:cpu", 0)
            <= manager.offloader.host.budget
        )
    assert manager.stats()["parked_sessions"] >= 3


def test_two_that_change_places_beyond_the_budget_are_within_it_after_the_step(fake):  # noqa: F811
    """What goes down may come on top by what comes up right after; the block of that one stays cached."""
    tier = HostTier(budget=2048)
    there = [tier.put([storage(1000)], live_nbytes=0) for _ in range(2)]
    there.append(tier.put([storage(1000)], live_nbytes=-1024))
    tier.drop(there.pop(0))
    assert fake.allocated == 3072
    tier.trim(0)
    assert fake.allocated == tier.nbytes == 2048


def cached_in(manager):
    return manager.offloader.host._cached_nbytes


def test_a_step_is_followed_by_giving_back_what_the_budget_has_no_room_for(fake):  # noqa: F811
    manager = manager_of(None, host=LARGE, device=0)
    begin(manager, "a", "b")
    manager.capacity.device_budget = None
    all_hold(manager, "a", "b")
    assert fake.active == 0
    assert fake.allocated == 2 * SLAB, "they fit, and are there for the next park"
    manager.offloader.host.budget = SLAB
    all_hold(manager, "a")
    assert fake.allocated == 0


def test_ranks_agree_by_what_a_declared_session_takes(fake):  # noqa: F811
    """Else the ranks agree that one has room, and each of them is refused by its own memory."""
    declared = 10 * SIZE  # 10,000: takes 16,384
    manager = manager_of(None, host=2 * declared, device=0, exchange=lambda mine: [mine])
    begin(manager, "a")
    assert manager.peek("a").parked
    manager.capacity.device_budget = None
    begin(manager, "b")
    with pytest.raises(CannotParkError, match=f"{2 * declared - 16384} bytes left and 16384 are wanted"):
        manager.park("b")
    assert not manager.peek("b").parked
    all_hold(manager, "a", "b")


class PageLockedMachine(RuleBasedStateMachine):
    """A tier's life of any sizes: page-locked memory is never more than its budget, at no instant."""

    def __init__(self):
        super().__init__()
        self.patched = pytest.MonkeyPatch()

    @initialize(budget=st.integers(0, 9).map(lambda units: 700 * units))
    def begin(self, budget):
        self.fake = installed(self.patched)
        self.tier = HostTier(budget=budget)
        self.held = {}
        self.number = 0

    def teardown(self):
        self.patched.undo()

    @rule(
        sizes=st.lists(st.sampled_from([0, 1, 500, 512, 513, 1500, 3000]), max_size=3),
        live=st.integers(0, 900),
    )
    def put(self, sizes, live):
        aligned = sum(-(-size // 512) * 512 for size in sizes)
        wanted = next((1 << power for power in range(20) if 1 << power >= aligned), None) if aligned else 0
        fits = self.tier.nbytes + live + wanted <= self.tier.budget
        self.number += 1
        storages = [storage(size, self.number % 251) for size in sizes]
        try:
            parcel = self.tier.put(storages, live_nbytes=live)
        except TierFullError:
            assert not fits
            return
        assert fits
        assert self.fake.allocated + live <= self.tier.budget
        self.held[self.number] = parcel, sizes

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def get(self, data):
        number = data.draw(st.sampled_from(sorted(self.held)))
        parcel, sizes = self.held[number]
        found = [each.tolist() for each in self.tier.get(parcel)]
        assert found == [[number % 251] * size for size in sizes]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data):
        self.tier.drop(self.held.pop(data.draw(st.sampled_from(sorted(self.held))))[0])

    @rule(live=st.integers(0, 900))
    def trim(self, live):
        self.tier.trim(live)
        room = max(0, self.tier.budget - self.tier.nbytes - live)
        assert self.fake.allocated - self.fake.active <= room

    @invariant()
    def is_bounded(self):
        if not hasattr(self, "tier"):
            return
        self.tier.check()
        assert self.fake.active == self.tier.nbytes
        assert self.fake.allocated == self.tier.nbytes + self.tier._cached_nbytes
        assert self.fake.peak <= self.tier.budget


TestPageLockedMachine = PageLockedMachine.TestCase
TestPageLockedMachine.settings = sized(2000, stateful_step_count=40)


def test_a_slab_that_is_not_page_locked_takes_its_bytes_and_no_more():
    assert copy.slab_nbytes([1000, 200]) == 1024 + 512
    assert HostTier.charge(1000) == 1000

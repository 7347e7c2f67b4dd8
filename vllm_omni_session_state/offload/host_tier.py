"""The host tier: parked storages in slabs of host memory, bounded by a budget.

A slab is charged with what it takes: alignment included, and where it is page-locked what torch's allocator
rounds it up to. The tier owns its slabs; a parcel that is dropped gives its charge back once.

A page-locked block stays page-locked after its parcel: torch caches it for the next one of its size. So the
tier remembers those that it has let go of, and has torch give them back where they would not fit its budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from vllm_omni_session_state.base.errors import TierFullError
from vllm_omni_session_state.offload import copy, page_locked


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """A page-locked block that the tier has let go of: what it takes, and its memory, weakly."""

    nbytes: int
    memory: StorageWeakRef

    @property
    def free(self) -> bool:
        """Whether nobody holds it any more: the one that dropped the parcel may do so still."""
        return bool(self.memory.expired())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, eq=False)
class HostAllocation:
    """One parked session's storages.

    Attributes:
        slab: Their bytes.
        sizes: Bytes of each, in order.
        devices: Where each came from and goes back to.
    """

    slab: torch.Tensor
    sizes: tuple[int, ...]
    devices: tuple[torch.device, ...]

    def parts(self) -> list[torch.Tensor]:
        """Each storage's bytes, by reference: uint8, ``(size,)``."""
        return copy.parts(self.slab, self.sizes)


def allocation_of(storages: Sequence[torch.UntypedStorage], *, pinned: bool = False) -> HostAllocation:
    """Copies of storages in a new slab, which no tier has charged; ``MemoryError`` if there is no room.

    What only passes on its way to a file is better not page-locked: the block would stay so, counted nowhere.
    """
    slab = copy.to_slab(storages, pinned=pinned)
    sizes, devices = [each.nbytes() for each in storages], [each.device for each in storages]
    return HostAllocation(slab, tuple(sizes), tuple(devices))


class HostTier:
    """Parcels in host memory.

    Args:
        budget: Bytes of host memory that parcels and the sessions' own host values may take together.
    """

    def __init__(self, *, budget: int) -> None:
        self.budget = budget
        self._parcels: dict[int, tuple[int, bool]] = {}  # what each is charged, and whether it is page-locked
        self._cached: list[_Block] = []
        self.nbytes = 0

    def room(self, live_nbytes: int) -> int:
        """Bytes that are left beside ``live_nbytes``, what sessions hold in host memory themselves."""
        return self.budget - self.nbytes - live_nbytes

    @staticmethod
    def charge(nbytes: int) -> int:
        """What a session with so many bytes on the device is charged here, the same on all ranks."""
        return page_locked.taken_nbytes(nbytes) if page_locked.is_used() else nbytes

    def put(self, storages: Sequence[torch.UntypedStorage], *, live_nbytes: int) -> HostAllocation:
        """Copy storages in; the originals are unharmed.

        Raises:
            TierFullError: If the budget has no room; nothing has changed.
            MemoryError: If the machine has none; nothing has changed.
        """
        pinned = copy.on_accelerator(storages)
        wanted = copy.slab_nbytes([storage.nbytes() for storage in storages], pinned=pinned)
        room = self.room(live_nbytes)
        if wanted > room:
            raise TierFullError("host", wanted=wanted, room=room, setting="host_budget")
        again = self._free_block(wanted) if pinned else None
        if self._cached_nbytes - (0 if again is None else wanted) > room - wanted:
            self._give_back()
        parcel = allocation_of(storages, pinned=pinned)
        if again in self._cached:
            self._cached.remove(again)
        try:
            self._parcels[id(parcel)] = wanted, pinned
            self.nbytes += wanted
        except BaseException:  # the process is stopped
            self._parcels.pop(id(parcel), None)
            self._recount()
            raise
        return parcel

    def get(self, parcel: HostAllocation) -> list[torch.UntypedStorage]:
        """Copy a parcel's storages back to where they came from; the parcel stays until ``drop()``.

        Raises:
            MemoryError: If the device has no room; nothing has changed.
        """
        return copy.from_slab(parcel.slab, parcel.sizes, parcel.devices)

    def drop(self, parcel: HostAllocation) -> None:
        """Give a parcel's charge back; its memory goes with the parcel.

        Raises:
            KeyError: If it is not of this tier or was dropped already.
        """
        try:
            charged, pinned = self._parcels.pop(id(parcel))
            self.nbytes -= charged
        except BaseException:  # it is none of ours, or the process is stopped
            self._recount()
            raise
        if pinned and page_locked.stays_cached(charged):
            self._cached.append(_Block(charged, StorageWeakRef(parcel.slab.untyped_storage())))  # type: ignore[no-untyped-call]

    def trim(self, live_nbytes: int) -> None:
        """Have cached blocks given back where the budget has no room for them; argument as for ``room()``."""
        if self._cached_nbytes > max(0, self.room(live_nbytes)):
            self._give_back()

    def check(self) -> None:
        """Assert that the charge equals the parcels'. An expensive no-op."""
        kept = self.nbytes
        self._recount()
        assert kept == self.nbytes, "host tier charge"

    def _recount(self) -> None:
        self.nbytes = sum(charged for charged, _ in self._parcels.values())

    @property
    def _cached_nbytes(self) -> int:
        return sum(block.nbytes for block in self._cached)

    def _free_block(self, nbytes: int) -> _Block | None:
        """A cached block that torch hands out again for so many bytes."""
        return next((block for block in self._cached if block.nbytes == nbytes and block.free), None)

    def _give_back(self) -> None:
        held = [block for block in self._cached if not block.free]
        if len(held) < len(self._cached):
            page_locked.give_back()
            self._cached = held

"""The host tier: parked storages in slabs of host memory, bounded by a budget.

A slab is charged with what it reserves, alignment included. The tier owns its slabs; a parcel that is
dropped gives its charge back once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_omni_session_state import transfer
from vllm_omni_session_state.errors import TierFullError


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
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
        return transfer.parts(self.slab, self.sizes)


def parcel_of(storages: Sequence[torch.UntypedStorage]) -> Parcel:
    """Copies of storages in a new slab, which no tier has charged.

    Raises:
        MemoryError: If the machine has no room; nothing has changed.
    """
    sizes = tuple(storage.nbytes() for storage in storages)
    return Parcel(transfer.to_slab(storages), sizes, tuple(storage.device for storage in storages))


class HostTier:
    """Parcels in host memory.

    Args:
        budget: Bytes of host memory that parcels and the sessions' own host values may take together.
    """

    def __init__(self, *, budget: int) -> None:
        self.budget = budget
        self._parcels: dict[int, int] = {}
        self.nbytes = 0

    def room(self, live_nbytes: int) -> int:
        """Bytes that are left.

        Args:
            live_nbytes: What sessions hold in host memory beside the parcels.
        """
        return self.budget - self.nbytes - live_nbytes

    def put(self, storages: Sequence[torch.UntypedStorage], *, live_nbytes: int) -> Parcel:
        """Copy storages in; the originals are unharmed.

        Raises:
            TierFullError: If the budget has no room; nothing has changed.
            MemoryError: If the machine has none; nothing has changed.
        """
        wanted = transfer.slab_nbytes([storage.nbytes() for storage in storages])
        room = self.room(live_nbytes)
        if wanted > room:
            raise TierFullError("host", wanted=wanted, room=max(0, room), setting="host_budget")
        parcel = parcel_of(storages)
        self._parcels[id(parcel)] = wanted
        self.nbytes += wanted
        return parcel

    def get(self, parcel: Parcel) -> list[torch.UntypedStorage]:
        """Copy a parcel's storages back to where they came from; the parcel stays until ``drop()``.

        Raises:
            MemoryError: If the device has no room; nothing has changed.
        """
        return transfer.from_slab(parcel.slab, parcel.sizes, parcel.devices)

    def drop(self, parcel: Parcel) -> None:
        """Give a parcel's charge back; its memory goes with the parcel.

        Raises:
            KeyError: If it is not of this tier or was dropped already.
        """
        self.nbytes -= self._parcels.pop(id(parcel))

    def check(self) -> None:
        """Assert that the charge equals the parcels'. An expensive no-op."""
        assert self.nbytes == sum(self._parcels.values()), "host tier charge"

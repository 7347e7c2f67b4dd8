"""Memory regions: what a value keeps alive, as plain addresses.

A region is the extent of one allocation, not of the view that was looked at. Whoever counts regions
never needs the tensor again: two views of one storage yield the same region, so they count once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

HOST = "cpu"
"""The device name of pageable host memory."""

PINNED = "pinned"
"""The device name of page-locked host memory: host memory that the accelerator can read directly."""


class Region(NamedTuple):
    """One extent of memory.

    A named tuple and not a dataclass: the books make, hash and compare thousands of regions per
    request, and a tuple does all three in C.

    Attributes:
        device: The pool it lies in: ``"cpu"``, ``"pinned"``, ``"cuda:0"``, ...
        start: Address of its first byte within that device's address space.
        nbytes: Its length in bytes; never 0 (a value of no bytes has no region).
    """

    device: str
    start: int
    nbytes: int

    @property
    def stop(self) -> int:
        """Address one past the last byte."""
        return self.start + self.nbytes


def union(regions: Iterable[Region]) -> tuple[Region, ...]:
    """The same bytes as disjoint regions, sorted by device and address.

    Overlapping regions become one. Regions that only touch stay apart: they are two allocations, and
    each is charged and released as itself.

    Raises:
        ValueError: A region is of no or negative length, or starts below address 0.
    """
    merged: list[Region] = []
    device, stop = "", -1
    for region in sorted(regions):
        here, start, nbytes = region
        if nbytes <= 0 or start < 0:
            raise ValueError(f"{region} is no memory: leave a value of no bytes out of the regions")
        if here == device and start < stop:
            first = merged[-1].start
            stop = max(stop, start + nbytes)
            merged[-1] = Region(device, first, stop - first)
        else:
            merged.append(region)
            device, stop = here, start + nbytes
    return tuple(merged)


def nbytes_by_device(regions: Iterable[Region]) -> dict[str, int]:
    """Sum the lengths of disjoint ``regions`` per device, in bytes."""
    totals: dict[str, int] = {}
    for device, _, nbytes in regions:
        totals[device] = totals.get(device, 0) + nbytes
    return totals

"""Memory regions: what a value keeps alive, as plain addresses.

A region is the extent of one allocation, not of the view that was looked at. Whoever counts regions
never needs the tensor again: two views of one storage yield the same region, so they count once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

HOST = "cpu"
"""The device name of pageable host memory."""

PINNED = "pinned"
"""The device name of page-locked host memory: host memory that the accelerator can read directly."""

TIER = "tier_nbytes:"
"""Before ``<tier>:<kind>:<device>`` in the name of a figure: bytes of sessions, each of them in one tier."""


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


as_region: Callable[[tuple[str, int, int]], Region] = partial(tuple.__new__, Region)
"""The region of those three; in C, at half of what ``Region(...)`` costs."""


class Union(tuple[Region, ...]):
    """Disjoint regions, sorted by device and address, as ``union`` makes them."""

    __slots__ = ()


def union(regions: Iterable[tuple[str, int, int]]) -> Union:
    """The same bytes as disjoint regions, sorted by device and address.

    Overlapping regions become one. Regions that only touch stay apart: they are two allocations, and
    each is charged and released as itself.

    Args:
        regions: Regions, or their device, start and length.

    Raises:
        ValueError: A region is of no or negative length, or starts below address 0.
    """
    if type(regions) is Union:
        return regions
    ordered = sorted(regions)
    device, stop, apart = "", -1, True
    for here, start, nbytes in ordered:
        if nbytes <= 0 or start < 0:
            region = Region(here, start, nbytes)
            raise ValueError(f"{region} is no memory: leave a value of no bytes out of the regions")
        if start < stop and here == device:
            apart = False
            stop = max(stop, start + nbytes)
        else:
            device, stop = here, start + nbytes
    if not apart:
        return Union(_merged(ordered))
    made: Iterable[Any] = ordered
    return Union(made if ordered and type(ordered[0]) is Region else map(as_region, ordered))


def _merged(ordered: list[tuple[str, int, int]]) -> Iterator[Region]:
    device, first, length = ordered[0]
    for here, start, nbytes in ordered:
        if here == device and start < first + length:
            length = max(length, start + nbytes - first)
        else:
            yield Region(device, first, length)
            device, first, length = here, start, nbytes
    yield Region(device, first, length)


def nbytes_by_device(regions: Iterable[Region]) -> dict[str, int]:
    """Sum the lengths of disjoint ``regions`` per device, in bytes."""
    totals: dict[str, int] = {}
    for device, _, nbytes in regions:
        totals[device] = totals.get(device, 0) + nbytes
    return totals

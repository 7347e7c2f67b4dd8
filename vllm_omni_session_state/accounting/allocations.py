"""Allocations: the memory that values keep alive, and the unit that is counted.

An allocation is what its owner took, not the view that was looked at: two views of one storage are one
allocation, and count once. Whoever counts allocations never needs the tensor again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

HOST = "cpu"
"""The device name of pageable host memory."""

PINNED = "pinned"
"""The device name of page-locked host memory: host memory that the accelerator can read directly."""

TIER = "tier_nbytes:"
"""Before ``<tier>:<kind>:<device>`` in the name of a figure: bytes of sessions, each of them in one tier."""


class Allocation(NamedTuple):
    """One piece of memory. Equal ones are the same one.

    A named tuple and not a dataclass: thousands are made, hashed and compared per request, and a tuple
    does all three in C.

    Attributes:
        device: The pool it lies in: ``"cpu"``, ``"pinned"``, ``"cuda:0"``, ...
        start: Address of its first byte within that device's address space.
        nbytes: Its length in bytes; never 0 (a value of no bytes has no allocation).
    """

    device: str
    start: int
    nbytes: int


class Blocks(tuple[Allocation, ...]):
    """Blocks of an engine's pool, each one unit: its bytes over all layers, under its address in the first.

    So pool and block number tell one from another. They are parts of tensors that all sessions share, which
    is why the walk takes them as they are and follows no tensor.
    """

    __slots__ = ()


as_allocation: Callable[[tuple[str, int, int]], Allocation] = partial(tuple.__new__, Allocation)
"""The allocation of those three; in C, at half of what ``Allocation(...)`` costs."""


def distinct(spans: Iterable[tuple[str, int, int]]) -> tuple[Allocation, ...]:
    """Each once, sorted, without those that lie within another one."""
    kept: list[tuple[str, int, int]] = []
    device, last, stop = "", 0, 0
    for span in sorted(set(spans)):
        here, start, nbytes = span
        if here != device:
            device, stop = here, 0
        elif start + nbytes <= stop:
            continue
        elif start == last:
            kept.pop()  # the shorter of two that begin alike
        kept.append(span)
        last, stop = start, start + nbytes
    return tuple(map(as_allocation, kept))


def nbytes_by_device(allocations: Iterable[Allocation]) -> dict[str, int]:
    """Sum the lengths of ``allocations`` per device, in bytes."""
    totals: dict[str, int] = {}
    for device, _, nbytes in allocations:
        totals[device] = totals.get(device, 0) + nbytes
    return totals

"""One device's addresses: how many charged regions reach each byte of it.

Allocations lie apart, so nearly every region that is charged overlaps nothing, or is equal to one that is
charged already. Such a region is a *block*: one entry, found by one binary search. Regions that overlap in
part (a tensor over part of an array; a recycled address whose stale charge is still there) lie in the
*tangle*, which is cut at each of their edges. A block that a new region overlaps in part moves there, and
what overlaps nothing any more moves back.

It never sees an owner. An owner's own regions are disjoint, so the number of regions over a byte is the
number of its owners.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import pairwise

from vllm_omni_session_state.accounting.overlap_map import OverlapMap
from vllm_omni_session_state.accounting.sorted_list import CHUNK, NONE, SortedList


class IntervalCounter:
    """The charged regions of one device. Each is added once for each of its owners."""

    __slots__ = ("_again", "_order", "_shared", "_stops", "_tangle", "_total")

    def __init__(self) -> None:
        self._stops: dict[int, int] = {}  # each block's stop, by its start
        self._again: dict[int, int] = {}  # owners beyond the first of each shared block, by its start
        self._order = SortedList()  # the blocks' starts
        self._total = 0  # bytes of all blocks
        self._shared = 0  # bytes of the shared ones
        self._tangle = OverlapMap()

    @property
    def total(self) -> int:
        """Bytes that are covered at least once."""
        return self._total + self._tangle.total

    @property
    def shared(self) -> int:
        """Bytes that are covered at least twice."""
        return self._shared + self._tangle.shared

    def replace(self, old: Mapping[int, int], new: Mapping[int, int]) -> None:
        """Take the regions of ``old`` away and put those of ``new`` there; each by its start its stop."""
        same = {start for start in old.keys() & new.keys() if old[start] == new[start]}
        # First what goes: what comes may lie where that was, and would overlap it.
        self._take(old, same)
        self._put(new, same)

    # A block among others that goes or comes is handled in these two loops, for a call costs as much again;
    # ``remove`` and ``add`` know the rest.

    def _take(self, old: Mapping[int, int], same: AbstractSet[int]) -> None:
        stops, again, heads, chunks = self._stops, self._again, self._order.heads, self._order.chunks
        tangled, gone = self._tangle.cuts, 0
        for start, stop in old.items():
            if start in same:
                continue
            if not tangled and start not in again:
                chunk = chunks[bisect_right(heads, start) - 1]
                index = bisect_right(chunk, start) - 1
                if index:
                    del chunk[index], stops[start]
                    gone += stop - start
                    continue
            self.remove(start, stop)
        self._total -= gone

    def _put(self, new: Mapping[int, int], same: AbstractSet[int]) -> None:
        stops, heads, chunks = self._stops, self._order.heads, self._order.chunks
        tangled, come = self._tangle.cuts, 0
        for start, stop in new.items():
            if start in same:
                continue
            if start not in stops and heads and not tangled:
                at = bisect_right(heads, start)
                chunk = chunks[at - 1]
                index = bisect_right(chunk, start)
                if index and len(chunk) < CHUNK and stops[chunk[index - 1]] <= start:
                    if index < len(chunk):
                        apart = stop <= chunk[index]
                    else:
                        apart = at == len(heads) or stop <= heads[at]
                    if apart:
                        chunk.insert(index, start)
                        stops[start] = stop
                        come += stop - start
                        continue
            self.add(start, stop)
        self._total += come

    def add(self, start: int, stop: int) -> None:
        """Cover the bytes from ``start`` to ``stop`` once more."""
        stops = self._stops
        held = stops.get(start)
        if held == stop:
            again = self._again.get(start, 0)
            self._again[start] = again + 1
            if not again:
                self._shared += stop - start
            return
        if held is None:
            before, after = self._order.add(start)
            if (
                (before == NONE or stops[before] <= start)
                and (after == NONE or after >= stop)
                and not (self._tangle.cuts and self._tangle.reaches(start, stop))
            ):
                stops[start] = stop
                self._total += stop - start
                return
            self._order.remove(start)
        self._entangle(start, stop)

    def remove(self, start: int, stop: int) -> None:
        """Cover them once less; they were added as one region."""
        stops = self._stops
        if stops.get(start) != stop:
            self._tangle.remove(start, stop)
            for address, end, times in list(self._tangle.apart(start, stop)):
                for _ in range(times):
                    self._tangle.remove(address, end)
                for _ in range(times):
                    self.add(address, end)
        elif start in self._again:
            self._again[start] -= 1
            if not self._again[start]:
                del self._again[start]
                self._shared -= stop - start
        else:
            del stops[start]
            self._order.remove(start)
            self._total -= stop - start

    def stretches(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The pieces of a region that is there: address, length and owners of each."""
        if self._stops.get(start) == stop:
            yield start, stop - start, 1 + self._again.get(start, 0)
        else:
            yield from self._tangle.stretches(start, stop)

    def _entangle(self, start: int, stop: int) -> None:
        """Add a region to the tangle, with every block that it overlaps."""
        blocks = []
        for address in self._order.upward(start):
            if address >= stop:
                break
            if self._stops[address] > start:
                blocks.append(address)
        for address in blocks:
            end = self._stops.pop(address)
            self._order.remove(address)
            again = self._again.pop(address, 0)
            self._total -= end - address
            self._shared -= (end - address) * (again > 0)
            for _ in range(again + 1):
                self._tangle.add(address, end)
        self._tangle.add(start, stop)

    def check(self, regions: Iterable[tuple[int, int]]) -> None:
        """Assert that all figures equal a recount from nothing. Changes nothing, and is slow.

        Args:
            regions: Start and stop of each region that is there, once for each of its owners.
        """
        again: dict[int, int] = {}
        edges: list[tuple[int, int]] = []  # of the tangle's regions
        for start, stop in regions:
            if self._stops.get(start) == stop:
                again[start] = again.get(start, -1) + 1
            else:
                edges += [(start, 1), (stop, -1)]
        blocks = sorted(self._stops.items())
        assert again.keys() == self._stops.keys(), f"blocks {self._stops}, charged {again}"
        assert {at: times for at, times in again.items() if times} == self._again, (
            f"blocks charged {self._again}, recount {again}"
        )
        assert self._order.addresses() == [start for start, _ in blocks], "the order is not of the blocks"
        for (start, stop), (after, _) in pairwise(blocks):
            assert stop <= after, f"the blocks at {start} and {after} overlap"
        for start, stop in blocks:
            assert not self._tangle.reaches(start, stop), f"the tangle reaches into the block at {start}"
        total = sum(stop - start for start, stop in blocks)
        shared = sum(stop - start for start, stop in blocks if again[start])
        assert self._total == total, f"kept total {self._total}, recount {total}"
        assert self._shared == shared, f"kept shared {self._shared}, recount {shared}"
        self._tangle.check(sorted(edges))
        assert not list(self._tangle.apart(0, max(self._tangle.cuts, default=0))), "a block is in the tangle"

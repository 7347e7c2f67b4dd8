"""The tangle: regions that overlap in any way, and how many of them reach each byte.

Exact whatever overlaps, and dearer for it; what lies apart stays out of here.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_omni_session_state.accounting.sorted_list import NONE, SortedList


class _Cut:
    """One address at which a charged region begins or ends, linked to the cuts on either side."""

    __slots__ = ("after", "before", "cover", "edges")

    def __init__(self, before: int, after: int, cover: int) -> None:
        self.before = before
        self.after = after
        self.cover = cover  # regions over the bytes from here to the next cut
        self.edges = 0  # regions that begin or end here; at 0 the cut goes, so cuts never outgrow the regions


class OverlapMap:
    """Regions that overlap in any way: addresses, cut wherever one of them begins or ends.

    Between two neighbouring cuts every byte is covered by the same regions.
    """

    __slots__ = ("cuts", "order", "shared", "total")

    def __init__(self) -> None:
        self.cuts: dict[int, _Cut] = {}
        self.order = SortedList()
        self.total = 0  # bytes covered at least once
        self.shared = 0  # bytes covered at least twice

    def add(self, start: int, stop: int) -> None:
        """Cover the bytes from start to stop once more."""
        self._begin(start)
        self._begin(stop)
        while start != stop:
            cut = self.cuts[start]
            if cut.cover == 0:
                self.total += cut.after - start
            elif cut.cover == 1:
                self.shared += cut.after - start
            cut.cover += 1
            start = cut.after

    def remove(self, start: int, stop: int) -> None:
        """Cover them once less; they were added as one region."""
        here = start
        while here != stop:
            cut = self.cuts[here]
            cut.cover -= 1
            if cut.cover == 0:
                self.total -= cut.after - here
            elif cut.cover == 1:
                self.shared -= cut.after - here
            here = cut.after
        self._end(start)
        self._end(stop)

    def reaches(self, start: int, stop: int) -> bool:
        """Whether any byte from start to stop is covered."""
        for address in self.order.upward(start):
            if address >= stop:
                break
            if self.cuts[address].cover and self.cuts[address].after > start:
                return True
        return False

    def apart(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Regions from start to stop that overlap none but their equals: start, stop and number of each."""
        for address in self.order.upward(start):
            if address > stop:
                break
            cut = self.cuts[address]
            if cut.cover and self._crossing(address) == self._crossing(cut.after) == 0:
                yield address, cut.after, cut.cover

    def _crossing(self, address: int) -> int:
        """Regions that reach across a cut."""
        cut = self.cuts[address]
        before = self.cuts[cut.before].cover if cut.before != NONE else 0
        return (before + cut.cover - cut.edges) // 2

    def stretches(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The address, length and number of owners of each stretch between cuts, from start to stop."""
        while start != stop:
            cut = self.cuts[start]
            yield start, cut.after - start, cut.cover
            start = cut.after

    def check(self, edges: list[tuple[int, int]]) -> None:
        """Assert that all figures equal a recount.

        Args:
            edges: Of every region its start with 1 and its stop with -1, sorted.
        """
        cover = total = shared = here = 0
        covers: dict[int, int] = {}
        counts: dict[int, int] = {}
        for address, step in edges:
            total += (address - here) * (cover > 0)
            shared += (address - here) * (cover > 1)
            here, cover = address, cover + step
            covers[address] = cover
            counts[address] = counts.get(address, 0) + 1
        line = [NONE, *covers, NONE]
        links = {at: (line[i], line[i + 2]) for i, at in enumerate(covers)}
        assert self.order.addresses() == list(covers), f"{self.order.addresses()}, edges at {list(covers)}"
        cuts = self.cuts.items()
        assert {at: (cut.before, cut.after) for at, cut in cuts} == links, f"cuts are not linked as {links}"
        assert {at: cut.cover for at, cut in cuts} == covers, f"covers differ from {covers}"
        assert {at: cut.edges for at, cut in cuts} == counts, f"edges differ from {counts}"
        assert self.total == total, f"kept total {self.total}, recount {total}"
        assert self.shared == shared, f"kept shared {self.shared}, recount {shared}"

    def _begin(self, address: int) -> None:
        """Make the cut at ``address``, or share it."""
        cut = self.cuts.get(address)
        if cut is None:
            before, after = self.order.add(address)
            cover = 0
            if before != NONE:
                self.cuts[before].after = address
                cover = self.cuts[before].cover
            if after != NONE:
                self.cuts[after].before = address
            cut = self.cuts[address] = _Cut(before, after, cover)
        cut.edges += 1

    def _end(self, address: int) -> None:
        cut = self.cuts[address]
        cut.edges -= 1
        if not cut.edges:
            if cut.before != NONE:
                self.cuts[cut.before].after = cut.after
            if cut.after != NONE:
                self.cuts[cut.after].before = cut.before
            del self.cuts[address]
            self.order.remove(address)

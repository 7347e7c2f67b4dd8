"""What a session's growing lists reach, charged once and not walked again.

A list that is only appended to keeps what it holds, so what its leading items reach is charged for good,
and a settlement looks at what came behind them. The regions so far are a *pile*: disjoint, in the order of
their arrival, so that each ledger knows by a number how much of it has been charged. Once one of the lists
is changed in another way, is replaced or goes, its pile is left, and a new one begins with a walk of all.

Only plain tensors join: what they reach stays as it is. A list of something else is walked to its end each
time, from the first item that is no plain tensor on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from vllm_omni_session_state.accounting.append_list import AppendTrackedList, StablePrefix
from vllm_omni_session_state.accounting.footprint import NOTHING, Footprint, footprint
from vllm_omni_session_state.accounting.identity_cache import is_plain
from vllm_omni_session_state.accounting.regions import Region, Union, union
from vllm_omni_session_state.accounting.sorted_list import SortedList

SHORT = 16
"""Items of a list that costs less to walk each time than to keep account of."""


class RegionLog:
    """Disjoint regions in the order of their arrival; none ever leaves.

    Attributes:
        runs: Of each list how much the pile covers.
        log: The regions.
        nbytes_by_device: Their bytes.
    """

    __slots__ = ("_order", "_stops", "log", "nbytes_by_device", "runs")

    def __init__(self, runs: Sequence[StablePrefix] = ()) -> None:
        self.runs = runs
        self.log: list[Region] = []
        self.nbytes_by_device: dict[str, int] = {}
        self._stops: dict[str, dict[int, int]] = {}  # by device each region's stop, by its start
        self._order: dict[str, SortedList] = {}

    def add(self, regions: Iterable[Region]) -> None:
        """Put on the pile what of ``regions`` is not there yet."""
        for region in self.without(regions):
            device, start, nbytes = region
            if device not in self._order:
                self._order[device], self._stops[device] = SortedList(), {}
            self._order[device].add(start)
            self._stops[device][start] = start + nbytes
            self.log.append(region)
            self.nbytes_by_device[device] = self.nbytes_by_device.get(device, 0) + nbytes

    def without(self, regions: Iterable[Region]) -> Union:
        """The bytes of ``regions`` that are not on the pile."""
        apart: list[Region] = []
        for region in union(regions):
            device, start, nbytes = region
            if device in self._order:
                stops, order = self._stops[device], self._order[device]
                at = bisect_right(order.heads, start)
                chunk = order.chunks[at - 1 if at else 0]
                index = bisect_right(chunk, start)
                below = not index or stops[chunk[index - 1]] <= start
                if index < len(chunk):
                    above = chunk[index] >= start + nbytes
                else:
                    above = at == len(order.heads) or order.heads[at] >= start + nbytes
                if not (below and above):
                    apart += self._gaps(region)
                    continue
            apart.append(region)
        return Union(apart)

    def nbytes_with(self, regions: Iterable[Region]) -> int:
        """Bytes of the pile and of ``regions`` together."""
        there = sum(self.nbytes_by_device.values())
        return there + sum(region.nbytes for region in self.without(regions))

    def _gaps(self, region: Region) -> Iterator[Region]:
        device, here, _ = region
        stops = self._stops[device]
        for start in self._order[device].upward(here):
            if start >= region.stop:
                break
            if here < start:
                yield Region(device, here, start - here)
            here = max(here, stops[start])
        if here < region.stop:
            yield Region(device, here, region.stop - here)


@dataclass(frozen=True, slots=True)
class Appended:
    """What a walk of some growing lists found behind what their pile covers.

    Attributes:
        pile: Where it belongs.
        counts: How many leading items of each list the pile covers with it.
        found: What they reach.
        rest: Items that cannot join, to be walked each time.
    """

    pile: RegionLog
    counts: tuple[int, ...]
    found: Footprint
    rest: list[Any]

    def join(self) -> None:
        """Put it on the pile; twice is once, and an older walk takes nothing back. Wants the books' lock."""
        self.pile.add(self.found.regions)
        for run, count in zip(self.pile.runs, self.counts, strict=True):
            run.count = max(run.count, count)


def scan_appended(lists: Sequence[AppendTrackedList[Any]], pile: RegionLog | None) -> Appended:
    """Walk what is new in some growing lists.

    Args:
        lists: All of them; if they are not exactly those of ``pile``, as they were but for what was
            appended, everything in them is new.
        pile: That of the last walk.
    """
    runs = [each.run for each in lists]
    if pile is None or runs != pile.runs:
        pile = RegionLog([each.begin() for each in lists])
    joining: list[Any] = []
    rest: list[Any] = []
    counts: list[int] = []
    for each, run in zip(lists, pile.runs, strict=True):
        covered = run.count
        new = each[covered:]
        plain = list(takewhile(is_plain, new))
        joining += plain
        rest += new[len(plain) :]
        counts.append(covered + len(plain))
    return Appended(pile, tuple(counts), footprint(*joining) if joining else NOTHING, rest)

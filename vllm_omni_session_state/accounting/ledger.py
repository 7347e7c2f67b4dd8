"""The ledger: how many owners reach each allocation, and the bytes per device that follow.

It never sees a tensor: an owner is a number or a name, its charge a set of allocations. What several owners
reach counts once in the totals and leaves with the last of them. Allocations that overlap in part are two
(torch over a part of an array, of which another session holds the whole; a recycled address whose stale
charge is still there): each counts.

Totals are kept, never summed: reading them does not depend on the number of owners, and a charge costs as
much as what changed since the owner's last one. Of an ``AllocationLog`` that is what came to it.

Not locked: the caller holds the lock that guards its sessions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

from vllm_omni_session_state.accounting.allocations import Allocation, nbytes_by_device
from vllm_omni_session_state.accounting.append_list import AllocationLog

_NOTHING: frozenset[Allocation] = frozenset()


class Ledger:
    """Who is charged for which memory, and what all of them hold together."""

    __slots__ = ("_again", "_charges", "_logs", "_reached", "_shared", "_total")

    def __init__(self) -> None:
        self._charges: dict[Hashable, frozenset[Allocation]] = {}
        self._logs: dict[Hashable, tuple[AllocationLog, int]] = {}  # and how much of it is charged
        self._reached: set[Allocation] = set()
        self._again: dict[Allocation, int] = {}  # owners beyond the first of each that is shared
        self._total: dict[str, int] = {}
        self._shared: dict[str, int] = {}

    def owners(self) -> set[Hashable]:
        """Every owner with a charge."""
        return {*self._charges, *self._logs}

    def charge(
        self, owner: Hashable, allocations: Sequence[Allocation], log: AllocationLog | None = None
    ) -> None:
        """Charge ``owner`` for ``allocations``, in place of what it was charged for before.

        Args:
            owner: Its name.
            allocations: What it holds now; with none, and no log, it is no owner any more.
            log: Allocations that it holds as well. Once there are more in it, the owner is charged anew.
        """
        old, new = self._charges.get(owner, _NOTHING), frozenset(allocations)
        last, charged = self._logs.get(owner, (None, 0))
        if log is not None:
            new -= log.known
        gone, come = old - new, new - old
        if last is not None and last is not log:
            gone, charged = gone.union(last.order[:charged]), 0
        if log is not None:
            come = come.union(log.order[charged:])
        try:
            if new:
                self._charges[owner] = new
            else:
                self._charges.pop(owner, None)
            if log is not None:
                self._logs[owner] = log, len(log.order)
            else:
                self._logs.pop(owner, None)
            if gone:
                self._take(gone)
            if come:
                self._put(come)
        except BaseException:  # the process is stopped in the middle of it
            self._recount()
            raise

    def nbytes_by_device(self) -> dict[str, int]:
        """Bytes per device that any owner reaches; a device with none is absent."""
        return {device: count for device, count in self._total.items() if count}

    def shared_nbytes_by_device(self) -> dict[str, int]:
        """Bytes per device that two or more owners reach; a device with none is absent."""
        return {device: count for device, count in self._shared.items() if count}

    def freed_without(self, owners: Iterable[Hashable]) -> dict[str, int]:
        """Bytes per device that would go if all of ``owners`` did, which is less than the sum of theirs."""
        reached = Counter(chain.from_iterable(map(self._charge_of, set(owners))))
        gone = (each for each, times in reached.items() if times > self._again.get(each, 0))
        return nbytes_by_device(gone)

    def check(self) -> None:
        """Assert that the kept figures equal a recount from nothing. Changes nothing, and is slow."""
        counts = Counter(chain.from_iterable(map(self._charge_of, self.owners())))
        again = {each: times - 1 for each, times in counts.items() if times > 1}
        assert self._reached == counts.keys(), f"reached {self._reached}, recount {counts}"
        assert self._again == again, f"reached again {self._again}, recount {again}"
        total, shared = nbytes_by_device(counts), nbytes_by_device(again)
        assert self.nbytes_by_device() == total, f"kept total {self._total}, recount {total}"
        assert self.shared_nbytes_by_device() == shared, f"kept shared {self._shared}, recount {shared}"
        assert all(each.nbytes > 0 for each in counts), f"no memory is charged: {counts}"
        for owner, (log, charged) in self._logs.items():
            twice = self._charges.get(owner, _NOTHING).intersection(log.order[:charged])
            assert not twice, f"{owner!r} is charged twice for {twice}"

    def _charge_of(self, owner: Hashable) -> Iterator[Allocation]:
        """All that an owner is charged for, each once."""
        log, charged = self._logs.get(owner, (None, 0))
        return chain(self._charges.get(owner, ()), () if log is None else log.order[:charged])

    def _take(self, gone: AbstractSet[Allocation]) -> None:
        left = gone & self._again.keys()
        for each in left:
            self._again[each] -= 1
            if not self._again[each]:
                del self._again[each]
                self._shared[each.device] -= each.nbytes
        self._reached -= gone - left
        for device, count in nbytes_by_device(gone - left).items():
            self._total[device] -= count

    def _put(self, come: AbstractSet[Allocation]) -> None:
        there = come & self._reached
        for each in there:
            self._again[each] = self._again.get(each, 0) + 1
            if self._again[each] == 1:
                self._shared[each.device] = self._shared.get(each.device, 0) + each.nbytes
        self._reached |= come
        for device, count in nbytes_by_device(come - there).items():
            self._total[device] = self._total.get(device, 0) + count

    def _recount(self) -> None:
        self._reached, self._again, self._total, self._shared = set(), {}, {}, {}
        for owner in self.owners():
            self._put(frozenset(self._charge_of(owner)))

"""The ledger: bytes per device, from the regions that each owner is charged for.

It never sees a tensor: an owner is any hashable name, a charge is a set of regions. A byte that several
owners reach counts once in the totals and leaves with the last of them, also where their regions overlap
in part: a new tenant of a recycled address may be charged before the old one's stale charge is replaced.

**Groups.** One ledger is one group. Whoever wants table sessions, detached sessions and staged bytes
totalled apart keeps one ledger for each and moves an owner with ``detached.charge(owner,
table.regions(owner))`` and ``table.release(owner)``. A byte reached from two ledgers counts in both.

**Cost.** Totals are kept, never summed: reading them does not depend on the number of owners. A charge
costs as much as the owner's regions that changed since its last one, each found by a binary search. What
lies on a pile that only grows is charged once: of it a charge costs what came since the last one.

**Locking.** None here: the caller holds the lock that guards its sessions. Nothing blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_omni_session_state.accounting.interval_counter import IntervalCounter
from vllm_omni_session_state.accounting.regions import Region, nbytes_by_device, union

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from vllm_omni_session_state.accounting.append_tracking import RegionLog

_Spans = dict[str, dict[int, int]]  # by device the regions of one charge, disjoint and sorted: start -> stop


class UnknownOwnerError(KeyError):
    """An owner was named that has no charge.

    Attributes:
        owner: The name that was given.
    """

    def __init__(self, owner: Hashable) -> None:
        super().__init__(owner)
        self.owner = owner

    def __str__(self) -> str:
        return f"owner {self.owner!r} has no charge in this ledger: charge it first, and release it once"


class Ledger:
    """Who is charged for which memory, and what all of them hold together."""

    __slots__ = ("_charges", "_devices", "_piles")

    def __init__(self) -> None:
        self._charges: dict[Hashable, _Spans] = {}
        self._piles: dict[Hashable, tuple[RegionLog, int]] = {}  # and how many of its regions are charged
        self._devices: dict[str, IntervalCounter] = {}

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._charges

    def owners(self) -> tuple[Hashable, ...]:
        """Every owner with a charge, also an empty one, in the order of their first charges."""
        return tuple(self._charges)

    def charge(self, owner: Hashable, regions: Iterable[Region], pile: RegionLog | None = None) -> None:
        """Charge ``owner`` for ``regions``, in place of what it was charged for before.

        Args:
            owner: Its name; a charge of no regions is a charge too.
            regions: What it holds now; they may overlap, also what is on the pile.
            pile: Regions that it holds as well. Once there is more on it, the owner is charged anew.

        Raises:
            ValueError: A region is of no or negative length. Nothing has changed then.
        """
        new = _spans(union(regions) if pile is None else pile.without(regions))
        old = self._charges.get(owner, {})
        try:
            self._charges[owner] = new
            if pile is not None or owner in self._piles:
                old, new = self._with_piles(owner, old, new, pile)
            if new != old:
                self._replace(old, new)
        except BaseException:
            self._recount()
            raise

    def release(self, owner: Hashable) -> dict[str, int]:
        """Take back the whole charge of ``owner``.

        Returns:
            The bytes per device that left with it, which is what no other owner reaches.

        Raises:
            UnknownOwnerError: It has no charge, or has been released already.
        """
        freed = self.freed_without((owner,))
        gone = self._charge_of(owner)
        try:
            self._piles.pop(owner, None)
            del self._charges[owner]
            self._replace(gone, {})
        except BaseException:
            self._recount()
            raise
        return freed

    def regions(self, owner: Hashable) -> tuple[Region, ...]:
        """What ``owner`` is charged for: disjoint, sorted. Raises UnknownOwnerError."""
        return union(
            Region(name, start, stop - start)
            for name, spans in self._charge_of(owner).items()
            for start, stop in spans.items()
        )

    def owner_nbytes(self, owner: Hashable) -> dict[str, int]:
        """Bytes per device that ``owner`` reaches, shared ones included. Raises UnknownOwnerError.

        It adds up, and makes no region: this is asked after each step of a session.
        """
        own = self._charges.get(owner)
        if own is None:
            raise UnknownOwnerError(owner)
        found = {name: sum(spans.values()) - sum(spans) for name, spans in own.items() if spans}
        pile, charged = self._piles.get(owner, (None, 0))
        if pile is not None:
            whole = charged == len(pile.log)
            onto = pile.nbytes_by_device if whole else nbytes_by_device(pile.log[:charged])
            for name, count in onto.items():
                found[name] = found.get(name, 0) + count
        return found

    def nbytes_by_device(self) -> dict[str, int]:
        """Bytes per device that any owner reaches; a device with none is absent."""
        return {name: device.total for name, device in self._devices.items()}

    def shared_nbytes_by_device(self) -> dict[str, int]:
        """Bytes per device that two or more owners reach; a device with none is absent."""
        return {name: device.shared for name, device in self._devices.items() if device.shared}

    def freed_without(self, owners: Iterable[Hashable]) -> dict[str, int]:
        """How many bytes per device would go if all of ``owners`` went, which is less than the sum of theirs.

        Raises:
            UnknownOwnerError: One of them has no charge.
        """
        reached: dict[tuple[str, int], int] = {}
        freed: dict[str, int] = {}
        for owner in set(owners):
            for name, spans in self._charge_of(owner).items():
                for start, stop in spans.items():
                    for address, length, cover in self._devices[name].stretches(start, stop):
                        times = reached.get((name, address), 0) + 1
                        if times == cover:
                            freed[name] = freed.get(name, 0) + length
                        elif cover > 1:
                            reached[name, address] = times
        return freed

    def check(self) -> None:
        """Assert that the kept figures equal a recount from nothing. Changes nothing, and is slow."""
        charged: dict[str, list[tuple[int, int]]] = {}
        for owner in self._charges:
            devices = self._charge_of(owner)
            reached = sum(region.nbytes for region in self.regions(owner))
            charged_for = sum(stop - start for spans in devices.values() for start, stop in spans.items())
            assert reached == charged_for, f"the charge of {owner!r} is not disjoint: {devices}"
            for name, spans in devices.items():
                charged.setdefault(name, []).extend(spans.items())
        assert charged.keys() == self._devices.keys(), f"devices {set(self._devices)}, charged {set(charged)}"
        for name, device in self._devices.items():
            device.check(charged[name])

    def _charge_of(self, owner: Hashable) -> _Spans:
        """All that an owner is charged for, in no order."""
        try:
            own = self._charges[owner]
        except KeyError:
            raise UnknownOwnerError(owner) from None
        if owner not in self._piles:
            return own
        pile, charged = self._piles[owner]
        return _spans(pile.log[:charged], onto=own)

    def _with_piles(
        self, owner: Hashable, old: _Spans, new: _Spans, pile: RegionLog | None
    ) -> tuple[_Spans, _Spans]:
        """What goes and what comes, with what is different on the pile; notes the new one."""
        last, charged = self._piles.pop(owner, (None, 0))
        if pile is not None:
            self._piles[owner] = pile, len(pile.log)
            come = pile.log[charged if pile is last else 0 :]
            new = _spans(come, onto=new) if come else new
        if last is not None and last is not pile:
            old = _spans(last.log[:charged], onto=old)
        return old, new

    def _replace(self, old: _Spans, new: _Spans) -> None:
        for name in {**old, **new}:
            if name not in self._devices:
                self._devices[name] = IntervalCounter()
            device = self._devices[name]
            device.replace(old.get(name, {}), new.get(name, {}))
            if not device.total:
                del self._devices[name]

    def _recount(self) -> None:
        """Count what is charged from nothing: the process was stopped in the middle of a change."""
        self._devices = {}
        for owner in self._charges:
            for name, spans in self._charge_of(owner).items():
                self._devices.setdefault(name, IntervalCounter()).replace({}, spans)
        self._devices = {name: device for name, device in self._devices.items() if device.total}


def _spans(regions: Iterable[Region], *, onto: _Spans | None = None) -> _Spans:
    """Disjoint regions by device; with those of ``onto``, which is left as it is."""
    spans: _Spans = {} if onto is None else {name: dict(held) for name, held in onto.items()}
    for name, start, nbytes in regions:
        if name not in spans:
            spans[name] = {}
        spans[name][start] = start + nbytes
    return spans

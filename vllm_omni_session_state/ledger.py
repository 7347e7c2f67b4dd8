"""The ledger: bytes per device, from the regions that each owner is charged for.

It never sees a tensor: an owner is any hashable name, a charge is a set of regions. A byte that several
owners reach counts once in the totals and leaves with the last of them, also where their regions overlap
in part: a new tenant of a recycled address may be charged before the old one's stale charge is replaced.

**Groups.** One ledger is one group. Whoever wants table sessions, detached sessions and staged bytes
totalled apart keeps one ledger for each and moves an owner with ``detached.charge(owner,
table.regions(owner))`` and ``table.release(owner)``. A byte reached from two ledgers counts in both.

**Cost.** Totals are kept, never summed: reading them does not depend on the number of owners. A charge
costs as much as the owner's regions that changed since its last one, each found by a binary search.

**Locking.** None here: the caller holds the lock that guards its sessions. Nothing blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from vllm_omni_session_state.regions import Region, nbytes_by_device, union

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

_NONE = -1  # no address: there is no cut on that side
_CHUNK = 512  # addresses per chunk at most: one memory move of 4 KiB


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

    __slots__ = ("_charges", "_devices")

    def __init__(self) -> None:
        self._charges: dict[Hashable, tuple[Region, ...]] = {}
        self._devices: dict[str, _Device] = {}

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._charges

    def owners(self) -> tuple[Hashable, ...]:
        """Every owner with a charge, also an empty one, in the order of their first charges."""
        return tuple(self._charges)

    def charge(self, owner: Hashable, regions: Iterable[Region]) -> None:
        """Charge ``owner`` for ``regions``, in place of what it was charged for before.

        Args:
            owner: Its name; a charge of no regions is a charge too.
            regions: What it holds now; they may overlap.

        Raises:
            ValueError: A region is of no or negative length. Nothing has changed then.
        """
        new = union(regions)
        old = self._charges.get(owner, ())
        self._charges[owner] = new
        if new == old:
            return
        gone, come = set(old), set(new)
        for device, start, nbytes in come - gone:
            self._device(device).add(start, start + nbytes)
        for device, start, nbytes in gone - come:
            self._remove(device, start, start + nbytes)

    def release(self, owner: Hashable) -> dict[str, int]:
        """Take back the whole charge of ``owner``.

        Returns:
            The bytes per device that left with it, which is what no other owner reaches.

        Raises:
            UnknownOwnerError: It has no charge, or has been released already.
        """
        freed = self.freed_without((owner,))
        for device, start, nbytes in self._charges.pop(owner):
            self._remove(device, start, start + nbytes)
        return freed

    def regions(self, owner: Hashable) -> tuple[Region, ...]:
        """What ``owner`` is charged for: disjoint, sorted. Raises UnknownOwnerError."""
        try:
            return self._charges[owner]
        except KeyError:
            raise UnknownOwnerError(owner) from None

    def owner_nbytes(self, owner: Hashable) -> dict[str, int]:
        """Bytes per device that ``owner`` reaches, shared ones included. Raises UnknownOwnerError."""
        return nbytes_by_device(self.regions(owner))

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
            for name, start, nbytes in self.regions(owner):
                for address, length, cover in self._devices[name].stretches(start, start + nbytes):
                    times = reached.get((name, address), 0) + 1
                    if times == cover:
                        freed[name] = freed.get(name, 0) + length
                    elif cover > 1:
                        reached[name, address] = times
        return freed

    def check(self) -> None:
        """Assert that the kept figures equal a recount from nothing. Changes nothing, and is slow."""
        edges: dict[str, list[tuple[int, int]]] = {}
        for owner, regions in self._charges.items():
            assert regions == union(regions), f"the charge of {owner!r} is not disjoint and sorted: {regions}"
            for name, start, nbytes in regions:
                edges.setdefault(name, []).extend(((start, 1), (start + nbytes, -1)))
        assert edges.keys() == self._devices.keys(), f"devices {set(self._devices)}, charged {set(edges)}"
        for name, device in self._devices.items():
            device.check(name, sorted(edges[name]))

    def _device(self, name: str) -> _Device:
        device = self._devices.get(name)
        if device is None:
            device = self._devices[name] = _Device()
        return device

    def _remove(self, name: str, start: int, stop: int) -> None:
        device = self._devices[name]
        device.remove(start, stop)
        if not device.total:
            del self._devices[name]


class _Cut:
    """One address at which a charged region begins or ends, linked to the cuts on either side."""

    __slots__ = ("after", "before", "cover", "edges")

    def __init__(self, before: int, after: int, cover: int) -> None:
        self.before = before
        self.after = after
        self.cover = cover  # regions over the bytes from here to the next cut
        self.edges = 0  # regions that begin or end here; at 0 the cut goes, so cuts never outgrow the regions


class _Device:
    """One device's address space, cut wherever a charged region begins or ends.

    Between two neighbouring cuts every byte is covered by the same regions. An owner's own regions are
    disjoint, so the number of regions over a byte is the number of its owners.
    """

    __slots__ = ("cuts", "order", "shared", "total")

    def __init__(self) -> None:
        self.cuts: dict[int, _Cut] = {}
        self.order = _Order()
        self.total = 0  # bytes covered at least once
        self.shared = 0  # bytes covered at least twice

    def add(self, start: int, stop: int) -> None:
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

    def stretches(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The address, length and number of owners of each stretch between cuts, from start to stop."""
        while start != stop:
            cut = self.cuts[start]
            yield start, cut.after - start, cut.cover
            start = cut.after

    def check(self, name: str, edges: list[tuple[int, int]]) -> None:
        cover = total = shared = here = 0
        covers: dict[int, int] = {}
        counts: dict[int, int] = {}
        for address, step in edges:
            total += (address - here) * (cover > 0)
            shared += (address - here) * (cover > 1)
            here, cover = address, cover + step
            covers[address] = cover
            counts[address] = counts.get(address, 0) + 1
        line = [_NONE, *covers, _NONE]
        links = {at: (line[i], line[i + 2]) for i, at in enumerate(covers)}
        assert self.order.addresses() == list(covers), (
            f"{name}: {self.order.addresses()}, edges at {list(covers)}"
        )
        assert {at: (cut.before, cut.after) for at, cut in self.cuts.items()} == links, (
            f"{name}: links {links}"
        )
        assert {at: cut.cover for at, cut in self.cuts.items()} == covers, (
            f"{name}: covers differ from {covers}"
        )
        assert {at: cut.edges for at, cut in self.cuts.items()} == counts, (
            f"{name}: edges differ from {counts}"
        )
        assert self.total == total, f"{name}: kept total {self.total}, recount {total}"
        assert self.shared == shared, f"{name}: kept shared {self.shared}, recount {shared}"

    def _begin(self, address: int) -> None:
        """Make the cut at ``address``, or share it."""
        cut = self.cuts.get(address)
        if cut is None:
            before, after = self.order.add(address)
            cover = 0
            if before != _NONE:
                self.cuts[before].after = address
                cover = self.cuts[before].cover
            if after != _NONE:
                self.cuts[after].before = address
            cut = self.cuts[address] = _Cut(before, after, cover)
        cut.edges += 1

    def _end(self, address: int) -> None:
        cut = self.cuts[address]
        cut.edges -= 1
        if not cut.edges:
            if cut.before != _NONE:
                self.cuts[cut.before].after = cut.after
            if cut.after != _NONE:
                self.cuts[cut.after].before = cut.before
            del self.cuts[address]
            self.order.remove(address)


class _Order:
    """Ascending addresses, in chunks: an insertion moves one chunk, however many addresses there are."""

    __slots__ = ("chunks", "heads")

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []
        self.heads: list[int] = []  # the first address of each chunk

    def addresses(self) -> list[int]:
        assert self.heads == [chunk[0] for chunk in self.chunks], "a chunk does not begin with its head"
        return [address for chunk in self.chunks for address in chunk]

    def add(self, address: int) -> tuple[int, int]:
        """Insert an address that is not there; its neighbours, ``_NONE`` where there is none."""
        if not self.chunks:
            self.chunks.append([address])
            self.heads.append(address)
            return _NONE, _NONE
        at = max(bisect_right(self.heads, address) - 1, 0)
        chunk = self.chunks[at]
        index = bisect_right(chunk, address)
        before = chunk[index - 1] if index else _NONE  # only the first chunk is entered below its head
        if index < len(chunk):
            after = chunk[index]
        else:
            after = self.heads[at + 1] if at + 1 < len(self.heads) else _NONE
        chunk.insert(index, address)
        self.heads[at] = chunk[0]
        if len(chunk) > _CHUNK:
            self.chunks.insert(at + 1, chunk[_CHUNK // 2 :])
            self.heads.insert(at + 1, chunk[_CHUNK // 2])
            del chunk[_CHUNK // 2 :]
        return before, after

    def remove(self, address: int) -> None:
        at = bisect_right(self.heads, address) - 1
        chunk = self.chunks[at]
        del chunk[bisect_right(chunk, address) - 1]
        if chunk:
            self.heads[at] = chunk[0]
        else:
            del self.chunks[at]
            del self.heads[at]

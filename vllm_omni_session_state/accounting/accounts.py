"""Whose bytes are where: the ledgers of one manager, settled as sessions change and read at no cost.

Ledgers stand apart where their bytes answer different questions: what the table's sessions hold, and of it
what lies on the device with nobody using it, what lies in host memory by its role, and what is parked there;
what sessions hold that left the table while somebody still uses them; what is staged; what vLLM-Omni keeps of
a session outside of it. A session is an owner by its serial number, so that one that left the table and a
newer one under its key are two.

Not locked: the manager holds its lock around every call. The one exception is the end of a detached
session, which the garbage collector may announce at any time in any thread: its serial number waits in
a queue until the next call.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from vllm_omni_session_state.accounting.append_tracking import Appended, RegionLog
from vllm_omni_session_state.accounting.ledger import Ledger
from vllm_omni_session_state.accounting.regions import HOST, TIER, Region


class _Late:
    """A ledger that is brought up to date when somebody asks it.

    Sessions come and go in it at every step, and only who enforces a budget asks; asking changes it, so it
    wants the lock as well.
    """

    __slots__ = ("_later", "_ledger")

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._later: dict[
            int, tuple[tuple[Region, ...], RegionLog | None] | None
        ] = {}  # ``None``: to be released

    def __contains__(self, owner: int) -> bool:
        return self._later[owner] is not None if owner in self._later else owner in self._ledger

    def charge(self, owner: int, regions: tuple[Region, ...], pile: RegionLog | None = None) -> None:
        """As the ledger's, later."""
        self._later[owner] = regions, pile

    def release(self, owner: int) -> None:
        """As the ledger's, later."""
        self._later[owner] = None

    def forget(self, owner: int) -> None:
        """Release an owner that does not come back, if it is there, now."""
        self._later.pop(owner, None)
        if owner in self._ledger:
            self._ledger.release(owner)

    def told(self) -> Ledger:
        """The ledger, up to date."""
        while self._later:
            owner, held = next(iter(self._later.items()))
            if held is not None:
                self._ledger.charge(owner, *held)
            elif owner in self._ledger:
                self._ledger.release(owner)
            del self._later[owner]
        return self._ledger


class Accounts:
    """The charges of a manager's sessions."""

    __slots__ = ("_detached", "_ended", "_host", "_idle", "_outside", "_parked", "_staged", "_table")

    def __init__(self) -> None:
        self._table = Ledger()
        self._idle = _Late()
        self._host = _Late()
        self._parked = Ledger()
        self._detached = Ledger()
        self._staged = Ledger()
        self._outside = Ledger()
        self._ended: deque[int] = deque()

    def open(self, owner: int) -> None:
        """A session of the table begins, holding nothing."""
        for ledger in (self._table, self._idle, self._host, self._staged):
            ledger.charge(owner, ())

    def settle(
        self,
        owner: int,
        *,
        device: tuple[Region, ...] = (),
        host: tuple[Region, ...] = (),
        parcel: tuple[Region, ...] = (),
        engine: tuple[Region, ...] = (),
        staged: tuple[Region, ...] = (),
        growth: Appended | None = None,
        growth_on_host: bool = False,
    ) -> None:
        """Replace a session's charge by what it holds now; one that has ended is charged no more.

        Args:
            owner: The session's serial number.
            device: What its model keeps on the device.
            host: What its model keeps in host memory.
            parcel: What is parked there; the tier counts it itself against the budget that both share.
            engine: What it holds in an engine's pool, which counts as the session's and towards no budget.
            staged: What is staged.
            growth: What its growing lists hold beside that, in one of the two.
            growth_on_host: Whether that is host memory.
        """
        self._close_ended()
        pile = None
        if growth is not None:
            growth.join()
            pile = growth.pile
        if owner in self._table:
            rest = host + parcel + engine
            self._table.charge(owner, device + rest if rest else device, pile)
            self._host.charge(owner, host, pile if growth_on_host else None)
            if parcel:
                self._parked.charge(owner, parcel)
            elif owner in self._parked:
                self._parked.release(owner)
            if owner in self._idle:
                self._idle.charge(owner, device, None if growth_on_host else pile)
        elif owner in self._detached:
            rest = host + engine
            self._detached.charge(owner, device + rest if rest else device, pile)
        else:
            return
        self._staged.charge(owner, staged)

    def lease(self, owner: int) -> None:
        """Somebody uses a session: it is no candidate to leave the device."""
        self._idle.release(owner)

    def idle(self, owner: int) -> None:
        """Nobody uses a session any more; its next charge counts for that too."""
        if owner not in self._idle:
            self._idle.charge(owner, ())

    def idle_nbytes(self) -> int:
        """Bytes on the device of the sessions that nobody uses."""
        return sum(self._idle.told().nbytes_by_device().values())

    def freed_without(self, owners: Iterable[int]) -> int:
        """Bytes that would leave the device if all of these idle sessions did."""
        return sum(self._idle.told().freed_without(owners).values())

    def host_nbytes(self, *, without: Iterable[int] = ()) -> int:
        """Bytes that the models of all sessions of the table keep in host memory, beside what is parked.

        Args:
            without: Sessions that would not be there.
        """
        host = self._host.told()
        return sum(host.nbytes_by_device().values()) - sum(host.freed_without(without).values())

    def detach(self, owner: int, session: object) -> None:
        """A session leaves the table; its charge lives on for as long as somebody holds it."""
        self._close_ended()
        self._detached.charge(owner, self._table.regions(owner))
        self._forget(owner)
        weakref.finalize(session, self._ended.append, owner).atexit = False

    def close(self, owner: int) -> dict[str, int]:
        """A session of the table ends; returns the bytes by device that no other one reaches."""
        self._staged.release(owner)
        return self._forget(owner)

    def charge_outside(self, name: str, regions: Iterable[Region]) -> None:
        """Say what vLLM-Omni keeps under ``name`` beside the sessions; no regions: nothing any more."""
        self._outside.charge(name, regions)

    def held_by(self, owner: int) -> dict[str, int]:
        """Bytes by device of one session of the table; what it shares with others counts."""
        return self._table.owner_nbytes(owner)

    def held_by_device(self) -> dict[str, int]:
        """Bytes of the table's sessions by device, each region once."""
        return self._table.nbytes_by_device()

    def held_by_tier(self) -> dict[tuple[str, str, str], int]:
        """Bytes of the table's sessions by tier, kind and device, each region once.

        The host tier is what models keep in host memory by its role, ``live``, and what is ``parked`` there;
        what else the sessions hold is of the tier ``device``, on whatever device it lies.
        """
        found = {("host", "live", HOST): 0, ("host", "parked", HOST): 0}
        rest = self.held_by_device()
        for kind, ledger in (("live", self._host.told()), ("parked", self._parked)):
            for device, count in ledger.nbytes_by_device().items():
                found["host", kind, device] = count
                rest[device] -= count  # of a part of what the table's ledger holds
        on_device = {("device", "live", device): count for device, count in rest.items() if count}
        return {**on_device, **found}

    def figures(self) -> dict[str, int]:
        """All totals in bytes, under the keys that ``SessionStateManager.stats()`` has."""
        self._close_ended()
        by_device = self.held_by_device()
        return {
            "total_nbytes": sum(by_device.values()),
            **{f"nbytes:{device}": count for device, count in sorted(by_device.items())},
            **{f"{TIER}{':'.join(where)}": count for where, count in self.held_by_tier().items()},
            "shared_nbytes": sum(self._table.shared_nbytes_by_device().values()),
            "staged_nbytes": sum(self._staged.nbytes_by_device().values()),
            "detached_sessions": len(self._detached.owners()),
            "detached_nbytes": sum(self._detached.nbytes_by_device().values()),
            "outside": sum(self._outside.nbytes_by_device().values()),
        }

    def check(self, owners: Iterable[int], *, idle: AbstractSet[int]) -> None:
        """Assert that every ledger is sound, the table's of exactly these owners, the idle one of these."""
        self._close_ended()
        on_host, on_device = self._host.told(), self._idle.told()
        ledgers = (self._table, on_device, on_host, self._parked, self._detached, self._staged, self._outside)
        for ledger in ledgers:
            ledger.check()
        tiers = self.held_by_tier()
        assert min(tiers.values()) >= 0, f"less than nothing in a tier: {tiers}"
        assert sum(tiers.values()) == sum(self.held_by_device().values()), "the tiers hold another sum"
        assert set(self._parked.owners()) <= set(self._table.owners()), "parked bytes of nobody"
        assert set(on_host.owners()) == set(self._table.owners()), "host bytes of nobody"
        assert set(on_device.owners()) == idle, "idle bytes of nobody"
        assert set(self._table.owners()) == set(owners), (
            "the ledger and the table speak of different sessions"
        )
        everybody = {*self._table.owners(), *self._detached.owners()}
        assert set(self._staged.owners()) == everybody, "staged bytes of nobody"

    def _forget(self, owner: int) -> dict[str, int]:
        self._idle.forget(owner)
        self._host.forget(owner)
        if owner in self._parked:
            self._parked.release(owner)
        return self._table.release(owner)

    def _close_ended(self) -> None:
        while self._ended:
            owner = self._ended.popleft()
            self._detached.release(owner)
            self._staged.release(owner)

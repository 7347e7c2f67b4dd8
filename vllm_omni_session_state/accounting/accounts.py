"""Whose bytes are where: what each session of one manager holds, and ledgers of it.

Ledgers stand apart where their bytes answer different questions: what the table's sessions hold, and of it
what lies on the device with nobody using it, what lies in host memory by its role, and what is parked there;
what sessions hold that left the table while somebody still uses them; what is staged; what vLLM-Omni keeps of
a session outside of it. A session is an owner by its serial number, so that one that left the table and a
newer one under its key are two.

A session that is used changes at every step, and only some ask for totals. So what it holds is noted at
once, and the ledgers follow when somebody asks; asking changes them.

Not locked: the manager holds its lock around every call. The one exception is the end of a detached
session, which the garbage collector may announce at any time in any thread: its serial number waits in
a queue until somebody asks.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from vllm_omni_session_state.accounting.allocations import HOST, TIER, Allocation, nbytes_by_device
from vllm_omni_session_state.accounting.append_list import AllocationLog
from vllm_omni_session_state.accounting.ledger import Ledger


class Held(NamedTuple):
    """What one session is charged for.

    Attributes:
        device: What its model keeps on the device.
        host: What its model keeps in host memory.
        parcel: What is parked there; the tier counts it itself against the budget that both share.
        engine: What it holds in an engine's pool, which counts as the session's and towards no budget.
        staged: What is staged.
        log: What its growing lists hold beside that, in one of the two.
        log_on_host: Whether that is host memory.
    """

    device: tuple[Allocation, ...] = ()
    host: tuple[Allocation, ...] = ()
    parcel: tuple[Allocation, ...] = ()
    engine: tuple[Allocation, ...] = ()
    staged: tuple[Allocation, ...] = ()
    log: AllocationLog | None = None
    log_on_host: bool = False

    @property
    def all(self) -> tuple[Allocation, ...]:
        """All but what is staged, and the log; some of it may be there twice."""
        return self.device + self.host + self.parcel + self.engine


_NOTHING = Held()


class Accounts:
    """The charges of a manager's sessions."""

    __slots__ = (
        *("_changed", "_detached", "_ended", "_held", "_in_detached", "_in_idle", "_in_host", "_in_parked"),
        *("_in_staged", "_in_table", "_outside", "_unused"),
    )

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}  # of every session
        self._detached: set[int] = set()  # those that left the table
        self._unused: set[int] = set()  # those that are on the device with nobody using them
        self._changed: set[int] = set()  # those of which the ledgers do not know
        self._ended: deque[int] = deque()
        self._in_table = Ledger()
        self._in_idle = Ledger()
        self._in_host = Ledger()
        self._in_parked = Ledger()
        self._in_detached = Ledger()
        self._in_staged = Ledger()
        self._outside = Ledger()

    def open(self, owner: int) -> None:
        """A session of the table begins, holding nothing, with nobody using it."""
        self._held[owner] = _NOTHING
        self._unused.add(owner)

    def settle(self, owner: int, held: Held) -> None:
        """Replace a session's charge by what it holds now; one that has ended is charged no more."""
        if owner in self._held:
            self._held[owner] = held
            self._changed.add(owner)

    def lease(self, owner: int) -> None:
        """Somebody uses a session: it is no candidate to leave the device."""
        self._unused.discard(owner)
        self._changed.add(owner)

    def idle(self, owner: int) -> None:
        """Nobody uses a session any more."""
        self._unused.add(owner)
        self._changed.add(owner)

    def detach(self, owner: int, session: object) -> None:
        """A session leaves the table; its charge lives on for as long as somebody holds it."""
        self._close_ended()
        self._detached.add(owner)
        self.lease(owner)
        weakref.finalize(session, self._ended.append, owner).atexit = False

    def close(self, owner: int) -> None:
        """A session ends, and the ledgers let go of it."""
        self._held.pop(owner, None)
        self._detached.discard(owner)
        self.lease(owner)
        self._charge(owner)

    def charge_outside(self, name: str, allocations: tuple[Allocation, ...]) -> None:
        """Say what vLLM-Omni keeps under ``name`` beside the sessions; none: nothing any more."""
        self._outside.charge(name, allocations)

    def idle_nbytes(self) -> int:
        """Bytes on the device of the sessions that nobody uses."""
        self._tell()
        return sum(self._in_idle.nbytes_by_device().values())

    def freed_without(self, owners: Iterable[int]) -> int:
        """Bytes that would leave the device if all of these idle sessions did."""
        self._tell()
        return sum(self._in_idle.freed_without(owners).values())

    def host_nbytes(self, *, without: Iterable[int] = ()) -> int:
        """Bytes that the models of all sessions of the table keep in host memory, beside what is parked.

        Args:
            without: Sessions that would not be there.
        """
        self._tell()
        gone = self._in_host.freed_without(without)
        return sum(self._in_host.nbytes_by_device().values()) - sum(gone.values())

    def held_by(self, owner: int) -> dict[str, int]:
        """Bytes by device of one session; what it shares with others counts."""
        held = self._held[owner]
        return nbytes_by_device(set(held.all)) if held.log is None else held.log.nbytes_with(held.all)

    def held_by_device(self) -> dict[str, int]:
        """Bytes of the table's sessions by device, each allocation once."""
        self._tell()
        return self._in_table.nbytes_by_device()

    def held_by_tier(self) -> dict[tuple[str, str, str], int]:
        """Bytes of the table's sessions by tier, kind and device, each allocation once.

        The host tier is what models keep in host memory by its role, ``live``, and what is ``parked`` there;
        what else the sessions hold is of the tier ``device``, on whatever device it lies.
        """
        found = {("host", "live", HOST): 0, ("host", "parked", HOST): 0}
        rest = self.held_by_device()
        for kind, ledger in (("live", self._in_host), ("parked", self._in_parked)):
            for device, count in ledger.nbytes_by_device().items():
                found["host", kind, device] = count
                rest[device] -= count  # of a part of what the table's ledger holds
        on_device = {("device", "live", device): count for device, count in rest.items() if count}
        return {**on_device, **found}

    def figures(self) -> dict[str, int]:
        """All totals in bytes, under the keys that ``SessionStateManager.stats()`` has."""
        by_device = self.held_by_device()
        return {
            "total_nbytes": sum(by_device.values()),
            **{f"nbytes:{device}": count for device, count in sorted(by_device.items())},
            **{f"{TIER}{':'.join(where)}": count for where, count in self.held_by_tier().items()},
            "shared_nbytes": sum(self._in_table.shared_nbytes_by_device().values()),
            "staged_nbytes": sum(self._in_staged.nbytes_by_device().values()),
            "detached_sessions": len(self._detached),
            "detached_nbytes": sum(self._in_detached.nbytes_by_device().values()),
            "outside": sum(self._outside.nbytes_by_device().values()),
        }

    def check(self, owners: Iterable[int], *, idle: AbstractSet[int]) -> None:
        """Assert that every ledger is sound, and that these are the table's sessions and the idle ones."""
        self._tell()
        table = self._held.keys() - self._detached
        assert table == set(owners), "the accounts and the table speak of different sessions"
        assert self._detached <= self._held.keys(), "detached bytes of nobody"
        assert self._unused == idle, "idle bytes of nobody"
        for ledger, those in (
            (self._in_table, table),
            (self._in_idle, idle),
            (self._in_host, table),
            (self._in_parked, table),
            (self._in_detached, self._detached),
            (self._in_staged, self._held.keys()),
        ):
            ledger.check()
            assert ledger.owners() <= those, f"bytes of nobody: {ledger.owners() - those}"
        self._outside.check()
        tiers = self.held_by_tier()
        assert min(tiers.values()) >= 0, f"less than nothing in a tier: {tiers}"
        assert sum(tiers.values()) == sum(self.held_by_device().values()), "the tiers hold another sum"

    def _close_ended(self) -> None:
        while self._ended:
            self.close(self._ended[0])
            self._ended.popleft()

    def _tell(self) -> None:
        """Bring the ledgers up to date."""
        self._close_ended()
        while self._changed:
            self._charge(next(iter(self._changed)))

    def _charge(self, owner: int) -> None:
        held = self._held.get(owner, _NOTHING)
        inside = _NOTHING if owner in self._detached else held
        outside = held if owner in self._detached else _NOTHING
        idle = held if owner in self._unused else _NOTHING
        self._in_table.charge(owner, inside.all, inside.log)
        self._in_host.charge(owner, inside.host, inside.log if inside.log_on_host else None)
        self._in_parked.charge(owner, inside.parcel)
        self._in_idle.charge(owner, idle.device, None if idle.log_on_host else idle.log)
        self._in_detached.charge(owner, outside.all, outside.log)
        self._in_staged.charge(owner, held.staged)
        self._changed.discard(owner)  # not before: the process may be stopped on the way

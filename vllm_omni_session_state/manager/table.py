"""The table: every session's entry, the orders, the accounts and the losses, under one lock.

Where a session is, is its entry's ``Placement``, and ``Table.transition()`` alone changes it: orders, counts
and charges follow there. Each method says whether it takes the lock or wants it held. None of them copies,
walks, frees or logs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from vllm_omni_session_state.accounting.accounts import Accounts
from vllm_omni_session_state.manager.entry import (
    MOVING,
    ON_DISK,
    OUT,
    PARKED,
    RESTING,
    Entry,
    Lease,
    Placement,
)
from vllm_omni_session_state.manager.losses import Losses, Reason
from vllm_omni_session_state.manager.lru import LruOrder
from vllm_omni_session_state.state.session import SessionState


class Charge(Protocol):
    """What a session holds now."""

    def settle(self, accounts: Accounts, session: SessionState) -> None:
        """Tell the accounts."""


class Table:
    """Sessions by key.

    Attributes:
        lock: Guards everything here, and every field of an entry.
        moved: Told when a session has arrived somewhere.
        entries: By session key.
        at: Keys by where their sessions are; of those that rest, longest unused first.
        accounts: Charges by a session's serial number.
        losses: Who was lost.
        changed: Keys of what a watcher has not seen yet, ``None`` while there is none.
        notice: That watcher; see ``Changes.begin()``.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.moved = threading.Condition(self.lock)
        self.entries: dict[str, Entry] = {}
        self.at = {placement: LruOrder() for placement in Placement if placement not in OUT}
        self.accounts = Accounts()
        self.losses = Losses()
        self.hits = self.misses = self.evictions = self.parks = self.restores = 0
        self.changed: set[str] | None = None
        self.notice: Callable[[bool], None] | None = None
        self._turns = 0

    @property
    def order(self) -> LruOrder:
        """Keys of those on the device that nobody uses, longest unused first."""
        return self.at[Placement.IDLE]

    @property
    def host_lru(self) -> LruOrder:
        """Keys of those that are in host memory and stay there, longest unused first."""
        return self.at[Placement.ON_HOST]

    @property
    def parked(self) -> int:
        """How many are parked, also of those on their way."""
        return self._count(PARKED)

    @property
    def on_disk(self) -> int:
        """How many of them on the disk."""
        return self._count(ON_DISK)

    def _count(self, placements: Iterable[Placement]) -> int:
        return sum([len(self.at[placement]) for placement in placements])

    def tell(self, *, ended: bool = False) -> None:
        """Tell who watches that something has changed; ``ended``: a use has ended. Lock free."""
        if self.notice is not None:
            self.notice(ended)

    def note(self, key: str) -> None:
        """What a listing shows of a session is going to be another. Lock held."""
        if self.changed is not None:
            self.changed.add(key)

    def transition(self, entry: Entry, to: Placement, charge: Charge | None = None) -> None:
        """Change where a session is, and with it orders, counts and charges; wake who waits. Lock held.

        After a stop in the middle of it, it is done again, without the charge: that may be half there.

        Args:
            entry: The session's.
            to: Where it is from now on.
            charge: What it holds there, where that is another.
        """
        key, serial, was = entry.session.key, entry.session.serial, entry.placement
        entry.placement = to
        self.parks += was is Placement.LEAVING and to in PARKED
        self.restores += was in PARKED and to is Placement.LEASED
        entry.unwritable &= to not in (Placement.LEAVING, Placement.LEASED)
        self.note(key)
        for placement, keys in self.at.items():
            if placement is not to:
                keys.pop(key, None)
        if to in OUT:
            self.entries.pop(key, None)
            if to is Placement.DETACHED:
                self.accounts.detach(serial, entry.session)
            else:
                self.accounts.close(serial)
        else:
            keys = self.at[to]
            if to in RESTING:
                keys.put(key, entry.turn)
            else:
                keys[key] = entry.turn  # nobody chooses from these: they are counted
            if to is not Placement.IDLE:
                self.accounts.lease(serial)
            else:
                self.accounts.idle(serial)
        if to not in MOVING:
            self.moved.notify_all()
        if charge is not None:
            charge.settle(self.accounts, entry.session)

    def wait_until_placed(self, key: str, *, until: float | None = None) -> Entry | None:
        """The entry of that key, once it is not on its way. Lock held; a wait gives it up meanwhile.

        Args:
            key: The key.
            until: When to wait no longer, by the monotonic clock; then the entry is still on its way.
        """
        while (entry := self.entries.get(key)) is not None and entry.placement in MOVING:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            self.moved.wait(left)
        return entry

    def place(self, key: str) -> str:
        """Where a session is, for the other ranks of its model. Lock held.

        Of one that is not there also what decides whether there is room for it.
        """
        entry = self.entries.get(key)
        if entry is not None:
            return entry.tier
        lost = self.losses.reason(key)
        what = "not there" if lost is None else f"lost ({lost.value})"
        return f"{what}, of {len(self.entries)} sessions {self.parked} are parked, {self.on_disk} on the disk"

    def open(self, key: str) -> Entry:
        """Enter a new session. Lock held."""
        self.misses += 1
        entry = Entry(SessionState(key))
        self.accounts.open(entry.session.serial)
        self.entries[key] = entry
        try:
            self.use(entry)
        except BaseException:  # the process is stopped
            self.transition(entry, Placement.ENDED)
            raise
        return entry

    def use(self, entry: Entry, charge: Charge | None = None) -> None:
        """A session is the most recently used one from now on, and nobody uses it. Lock held."""
        self._turns += 1
        entry.turn, entry.used_at = self._turns, time.monotonic()
        self.transition(entry, Placement.IDLE, charge)

    def lend(self, entry: Entry, lease: Lease | None, *, count: bool = False) -> None:
        """A session on the device, or on its way there, is used. Lock held.

        Args:
            entry: The session's.
            lease: The use that begins, ``None`` where it is for this moment only.
            count: Whether it counts as a hit.
        """
        self.hits += count and not entry.leases
        if lease is not None:
            lease.entry = entry
            entry.leases.add(lease)
            if entry.placement is not Placement.LEASED:
                self.transition(entry, Placement.LEASED)
        elif not entry.leases:
            self.use(entry)

    def end_lease(self, entry: Entry, lease: Lease, charge: Charge | None) -> bool:
        """One use has ended. Takes the lock.

        Args:
            entry: The session's.
            lease: The use.
            charge: What the session holds now.

        Returns:
            Whether a drop was waiting for this.
        """
        with self.lock:
            entry.leases.discard(lease)
            if entry.leases:
                if charge is not None:
                    charge.settle(self.accounts, entry.session)
                self.note(entry.key)
                return False
            self.use(entry, charge)
            return entry.ending

    def resting(self, *, but: str | None = None, stale: bool = False) -> list[Entry]:
        """Those that nobody uses or moves, wherever they are, longest unused first. Lock held.

        Args:
            but: The key of one that is left out.
            stale: Whether only those count that are marked stale.
        """
        there = (entry for key, entry in self.entries.items() if entry.resting and key != but)
        return sorted((entry for entry in there if entry.stale or not stale), key=lambda entry: entry.turn)

    def lose(self, entry: Entry, reason: Reason) -> None:
        """Take a session that nobody uses or moves out of the table. Lock held.

        What one on the device holds stays for whoever holds the session, and counts as detached.
        """
        self.losses.record(entry.key, reason)
        self.evictions += 1
        self.transition(entry, Placement.DETACHED if entry.idle else Placement.ENDED)

    def remove(self, key: str, *, clear: bool) -> Entry | None:
        """Take a session out, unless it is in use: then its entry is marked. Takes the lock.

        Args:
            key: The session's.
            clear: Whether one that was lost may begin anew.

        Returns:
            The entry, still leased where the removal must wait; ``None`` where there is none.
        """
        with self.lock:
            if clear:
                self.losses.clear(key)
            entry = self.wait_until_placed(key)
            if entry is None:
                return None
            if entry.leases:
                entry.ending = True
            else:
                self.transition(entry, Placement.ENDED)
            return entry

    def keys(self) -> tuple[str, ...]:
        """Keys of all: parked ones, then idle ones by last use, then those in use. Takes the lock."""
        with self.lock:
            parked = [key for key, entry in self.entries.items() if entry.parked]
            used = [key for key, entry in self.entries.items() if not entry.idle and not entry.parked]
            return (*parked, *self.order, *used)

    def figures(self) -> dict[str, int]:
        """Counters and bytes. Takes the lock."""
        with self.lock:
            return {
                "sessions": len(self.entries),
                "used_sessions": len(self.entries) - self.parked - len(self.order),
                "parked_sessions": self.parked,
                "disk_sessions": self.on_disk,
                "hits": self.hits,
                "misses": self.misses,
                "evictions": self.evictions,
                "parks": self.parks,
                "restores": self.restores,
                **{f"lost:{reason.value}": count for reason, count in self.losses.counts.items() if count},
                **self.accounts.figures(),
            }

    def check(self) -> None:
        """Assert that entries, orders and accounts speak of the same sessions. An expensive no-op."""
        with self.lock:
            assert all(key == entry.key for key, entry in self.entries.items()), "a session is misfiled"
            for placement, keys in self.at.items():
                there = sorted(
                    (entry.turn, key) for key, entry in self.entries.items() if entry.placement is placement
                )
                if placement in RESTING:
                    keys.check()
                assert sorted((turn, key) for key, turn in keys.items()) == there, f"others {placement.value}"
            turns = [entry.turn for entry in self.resting()]
            assert len(set(turns)) == len(turns), "two sessions were used at once"
            for entry in self.entries.values():
                assert bool(entry.leases) is (entry.placement is Placement.LEASED), "in use, and not leased"
                assert entry.moving or entry.session.parked is entry.parked, "in two places"
            self.accounts.check(
                (entry.session.serial for entry in self.entries.values()),
                idle={self.entries[key].session.serial for key in self.order},
            )

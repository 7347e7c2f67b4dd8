"""The table: every session's entry, the eviction order, the accounts and the losses, under one lock.

Each method says whether it takes the lock or wants it held. None of them copies, walks, frees or logs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from vllm_omni_session_state.accounting.accounts import Accounts
from vllm_omni_session_state.manager.entry import Entry
from vllm_omni_session_state.manager.losses import Losses, Reason
from vllm_omni_session_state.manager.lru import LruOrder
from vllm_omni_session_state.offload.parking import Level, Parked
from vllm_omni_session_state.state.session import SessionState


class Table:
    """Sessions by key.

    Attributes:
        lock: Guards everything here, and every field of an entry.
        moved: Told when a session has arrived somewhere.
        entries: By session key.
        order: Keys of the idle entries, oldest first.
        accounts: Charges by a session's serial number.
        losses: Who was lost.
        host_lru: Keys of those that are parked in host memory and not on their way, longest unused first.
        changed: Keys of what a watcher has not seen yet, ``None`` while there is none.
        notice: That watcher; see ``Watch.begin()``.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.moved = threading.Condition(self.lock)
        self.entries: dict[str, Entry] = {}
        self.order = LruOrder()
        self.host_lru = LruOrder()
        self.accounts = Accounts()
        self.losses = Losses()
        self.hits = self.misses = self.evictions = self.parks = self.restores = 0
        self.changed: set[str] | None = None
        self.notice: Callable[[bool], None] | None = None
        self._shelved: set[str] = set()  # keys of the parked ones, also while they are on their way
        self._filed: set[str] = set()  # of these on the disk

    def note(self, key: str) -> None:
        """What a listing shows of a session is going to be another. Lock held."""
        if self.changed is not None:
            self.changed.add(key)

    def tell(self, *, ended: bool = False) -> None:
        """Tell who watches that something has changed; ``ended``: a use has ended. Lock free."""
        if self.notice is not None:
            self.notice(ended)

    @property
    def parked(self) -> int:
        """How many are parked."""
        return len(self._shelved)

    @property
    def on_disk(self) -> int:
        """How many of them on the disk."""
        return len(self._filed)

    def wait_until_placed(self, key: str, *, until: float | None = None) -> Entry | None:
        """The entry of that key, once it is not on its way. Lock held; a wait gives it up meanwhile.

        Args:
            key: The key.
            until: When to wait no longer, by the monotonic clock; then the entry is still on its way.
        """
        while (entry := self.entries.get(key)) is not None and entry.moving:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            self.moved.wait(left)
        return entry

    def place(self, key: str) -> str:
        """Where a session is, for the other ranks of its model. Lock held.

        Of one that is not there also what decides whether there is room for it.
        """
        entry, lost = self.entries.get(key), self.losses.reason(key)
        if entry is not None:
            return entry.tier
        what = "not there" if lost is None else f"lost ({lost.value})"
        return f"{what}, of {len(self.entries)} sessions {self.parked} are parked, {self.on_disk} on the disk"

    def open(self, key: str) -> Entry:
        """Entry a new session. Lock held."""
        self.misses += 1
        entry = Entry(SessionState(key))
        try:
            self.accounts.open(entry.session.serial)
            self._use(entry)
            self.entries[key] = entry
        except BaseException:  # the process is stopped
            if key in self.order:
                self.order.remove(key)
            raise
        return entry

    def _use(self, entry: Entry) -> None:
        self.note(entry.session.key)
        entry.place, entry.used_at = self.order.use(entry.session.key), time.monotonic()

    def touch(self, entry: Entry, *, lease: object, count: bool) -> None:
        """A session on the device is used. Lock held.

        Args:
            entry: The session's.
            lease: The use that begins, ``None`` where it is for this moment only.
            count: Whether it counts as a hit or a miss.
        """
        idle = not entry.leases
        if lease is not None:
            entry.leases.add(lease)
        if idle:
            if count:
                self.hits += not entry.fresh
                entry.fresh = False
            if lease is not None:
                self.take(entry)
            else:
                self._use(entry)

    def take(self, entry: Entry) -> None:
        """An idle session leaves the order: it is used, or it moves. Lock held."""
        self.note(entry.session.key)
        self.order.remove(entry.session.key)
        entry.unwritable = False
        self.accounts.lease(entry.session.serial)

    def stay(self, entry: Entry) -> None:
        """A session that was on its way is on the device, idle, where it was in the order. Lock held."""
        self.note(entry.session.key)
        entry.moving = False
        self._forget_parked(entry.session.key)
        entry.parked = None
        self.order.put_back(entry.session.key, entry.place)
        self.accounts.idle(entry.session.serial)
        self.moved.notify_all()

    def mark_parked(self, entry: Entry, parked: Parked) -> None:
        """A session has come to a tier, or has stayed where it was parked. Lock held."""
        self.note(entry.session.key)
        entry.moving = False
        self.parks += entry.parked is None
        self._forget_parked(entry.session.key)
        entry.parked = parked
        self._shelved.add(entry.session.key)
        if parked.level is Level.DISK:
            self._filed.add(entry.session.key)
        else:
            self.host_lru.put_back(entry.session.key, entry.place)
        self.moved.notify_all()

    def mark_in_transit(self, entry: Entry) -> None:
        """A parked session goes on its way to another place. Lock held."""
        assert entry.parked is not None, "only a parked session is fetched"
        self.note(entry.session.key)
        entry.moving = True
        if entry.parked.level is Level.HOST:
            self.host_lru.remove(entry.session.key)

    def mark_resident(self, entry: Entry, lease: object) -> None:
        """A session that was fetched is on the device again, in a lease. Lock held."""
        self.note(entry.session.key)
        entry.leases.add(lease)
        entry.moving = False
        self.restores += entry.parked is not None
        self._forget_parked(entry.session.key)
        entry.parked = None
        self.moved.notify_all()

    def _forget_parked(self, key: str) -> None:
        self._shelved.discard(key)
        self._filed.discard(key)
        if key in self.host_lru:
            self.host_lru.remove(key)

    def end_lease(self, entry: Entry, lease: object) -> bool:
        """One use has ended. Takes the lock.

        Args:
            entry: The session's.
            lease: The use.

        Returns:
            Whether a drop was waiting for this.
        """
        with self.lock:
            entry.leases.discard(lease)
            if entry.leases:
                return False
            self._use(entry)
            self.accounts.idle(entry.session.serial)
            return entry.ending

    def resting(self, *, but: str | None = None, stale: bool = False) -> list[Entry]:
        """Those that nobody uses or moves, wherever they are, longest unused first. Lock held.

        Args:
            but: The key of one that is left out.
            stale: Whether only those count that are marked stale.
        """
        there = (entry for key, entry in self.entries.items() if entry.resting and key != but)
        return sorted((entry for entry in there if entry.stale or not stale), key=lambda entry: entry.place)

    def lose(self, entry: Entry, reason: Reason) -> None:
        """Take a session that nobody uses or moves out of the table. Lock held.

        What one on the device holds stays for whoever holds the session, and counts as detached.
        """
        key, session = entry.session.key, entry.session
        del self.entries[key]
        self.note(key)
        self.losses.record(key, reason)
        self.evictions += 1
        if entry.parked is None:
            self.order.remove(key)
            self.accounts.detach(session.serial, session)
        else:
            self._forget_parked(key)
            self.accounts.close(session.serial)

    def remove(self, key: str) -> Entry | None:
        """Take a session out, unless it is in use: then its entry is marked. Takes the lock.

        Returns:
            The entry, still leased where the removal must wait; ``None`` where there is none.
        """
        with self.lock:
            self.losses.clear(key)
            entry = self.wait_until_placed(key)
            if entry is None:
                return None
            if entry.leases:
                entry.ending = True
                return entry
            del self.entries[key]
            self.note(key)
            if entry.parked is None:
                self.order.remove(key)
            else:
                self._forget_parked(key)
            self.accounts.close(entry.session.serial)
            return entry

    def keys(self) -> tuple[str, ...]:
        """Keys of all: parked ones, then idle ones by last use, then those in use. Takes the lock."""
        with self.lock:
            parked = [key for key, entry in self.entries.items() if entry.parked is not None]
            used = [key for key, entry in self.entries.items() if not entry.idle and entry.parked is None]
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
        """Assert that entries, order and accounts speak of the same sessions. An expensive no-op."""
        with self.lock:
            self.order.check()
            parked = {
                key: entry.parked.level for key, entry in self.entries.items() if entry.parked is not None
            }
            assert self._shelved == set(parked), "others are parked than those that are said to be"
            on_disk = {key for key, level in parked.items() if level is Level.DISK}
            assert self._filed == on_disk, "others are on the disk than those that are said to be"
            idle = {key for key, entry in self.entries.items() if entry.idle}
            assert set(self.order) == idle, "the order is of the idle sessions"
            host_lru = {
                key
                for key, entry in self.entries.items()
                if not entry.moving and entry.parked is not None and entry.parked.level is Level.HOST
            }
            self.host_lru.check()
            assert set(self.host_lru) == host_lru, "the order of what is parked in host memory is of others"
            assert all(key == entry.session.key for key, entry in self.entries.items()), (
                "a session is misfiled"
            )
            places = [entry.place for entry in self.resting()]
            assert len(set(places)) == len(places), "two sessions were used at once"
            in_order = [self.entries[key].place for key in self.order]
            assert in_order == sorted(in_order), "the order is not that of the last uses"
            for entry in self.entries.values():
                assert not (entry.leases and entry.parked), "a session in use is parked"
                assert entry.moving or entry.session.parked is (entry.parked is not None), "in two places"
            self.accounts.check(
                (entry.session.serial for entry in self.entries.values()),
                idle={self.entries[key].session.serial for key in idle},
            )

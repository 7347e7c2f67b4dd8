"""The table: every session's seat, the eviction order, the accounts and the losses, under one lock.

Each method says whether it takes the lock or wants it held. None of them copies, walks, frees or logs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from vllm_omni_session_state.accounting.accounts import Accounts
from vllm_omni_session_state.accounting.append_tracking import RegionLog
from vllm_omni_session_state.manager.entry import Seat
from vllm_omni_session_state.manager.losses import Losses, Reason
from vllm_omni_session_state.manager.lru import LruOrder
from vllm_omni_session_state.offload.parking import Level, Parked
from vllm_omni_session_state.accounting.regions import Region
from vllm_omni_session_state.state.session import SessionState


class Table:
    """Sessions by key.

    Attributes:
        lock: Guards everything here, and every field of a seat.
        moved: Told when a session has arrived somewhere.
        seats: By session key.
        order: Keys of the idle seats, oldest first.
        accounts: Charges by a session's serial number.
        losses: Who was lost.
        hosted: Keys of those that are parked in host memory and not on their way, longest unused first.
        changed: Keys of what a watcher has not seen yet, ``None`` while there is none.
        notice: That watcher; see ``Watch.begin()``.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.moved = threading.Condition(self.lock)
        self.seats: dict[str, Seat] = {}
        self.order = LruOrder()
        self.hosted = LruOrder()
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

    def arrived(self, key: str, *, until: float | None = None) -> Seat | None:
        """The seat of that key, once it is not on its way. Lock held; a wait gives it up meanwhile.

        Args:
            key: The key.
            until: When to wait no longer, by the monotonic clock; then the seat is still on its way.
        """
        while (seat := self.seats.get(key)) is not None and seat.moving:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            self.moved.wait(left)
        return seat

    def place(self, key: str) -> str:
        """Where a session is, for the other ranks of its model. Lock held.

        Of one that is not there also what decides whether there is room for it.
        """
        seat, lost = self.seats.get(key), self.losses.reason(key)
        if seat is not None:
            return seat.tier
        what = "not there" if lost is None else f"lost ({lost.value})"
        return f"{what}, of {len(self.seats)} sessions {self.parked} are parked, {self.on_disk} on the disk"

    def open(self, key: str) -> Seat:
        """Seat a new session. Lock held."""
        self.misses += 1
        seat = Seat(SessionState(key))
        try:
            self.accounts.open(seat.session.serial)
            self._use(seat)
            self.seats[key] = seat
        except BaseException:  # the process is stopped
            if key in self.order:
                self.order.remove(key)
            raise
        return seat

    def _use(self, seat: Seat) -> None:
        self.note(seat.session.key)
        seat.place, seat.used_at = self.order.use(seat.session.key), time.monotonic()

    def touch(self, seat: Seat, *, lease: object, count: bool) -> None:
        """A session on the device is used. Lock held.

        Args:
            seat: The session's.
            lease: The use that begins, ``None`` where it is for this moment only.
            count: Whether it counts as a hit or a miss.
        """
        idle = not seat.leases
        if lease is not None:
            seat.leases.add(lease)
        if idle:
            if count:
                self.hits += not seat.fresh
                seat.fresh = False
            if lease is not None:
                self.take(seat)
            else:
                self._use(seat)

    def take(self, seat: Seat) -> None:
        """An idle session leaves the order: it is used, or it moves. Lock held."""
        self.note(seat.session.key)
        self.order.remove(seat.session.key)
        seat.unwritable = False
        self.accounts.lease(seat.session.serial)

    def stay(self, seat: Seat, device: tuple[Region, ...]) -> None:
        """A session that was on its way is on the device, idle, where it was in the order. Lock held.

        Args:
            seat: The session's.
            device: What it holds there.
        """
        self.note(seat.session.key)
        seat.moving = False
        self._forget_parked(seat.session.key)
        seat.parked = None
        self.order.put_back(seat.session.key, seat.place)
        self.accounts.idle(seat.session.serial, device)
        self.moved.notify_all()

    def shelve(self, seat: Seat, parked: Parked) -> None:
        """A session has come to a tier, or has stayed where it was parked. Lock held."""
        self.note(seat.session.key)
        seat.moving = False
        self.parks += seat.parked is None
        self._forget_parked(seat.session.key)
        seat.parked = parked
        self._shelved.add(seat.session.key)
        if parked.level is Level.DISK:
            self._filed.add(seat.session.key)
        else:
            self.hosted.put_back(seat.session.key, seat.place)
        self.moved.notify_all()

    def fetch(self, seat: Seat) -> None:
        """A parked session goes on its way to another place. Lock held."""
        assert seat.parked is not None, "only a parked session is fetched"
        self.note(seat.session.key)
        seat.moving = True
        if seat.parked.level is Level.HOST:
            self.hosted.remove(seat.session.key)

    def unshelve(self, seat: Seat, lease: object) -> None:
        """A session that was fetched is on the device again, in a lease. Lock held."""
        self.note(seat.session.key)
        seat.leases.add(lease)
        seat.moving = False
        self.restores += seat.parked is not None
        self._forget_parked(seat.session.key)
        seat.parked = None
        self.moved.notify_all()

    def _forget_parked(self, key: str) -> None:
        self._shelved.discard(key)
        self._filed.discard(key)
        if key in self.hosted:
            self.hosted.remove(key)

    def end_lease(self, seat: Seat, lease: object, device: tuple[Region, ...], pile: RegionLog | None) -> bool:
        """One use has ended. Takes the lock.

        Args:
            seat: The session's.
            lease: The use.
            device: What it holds on the device now,
            pile: with a pile of it.

        Returns:
            Whether a drop was waiting for this.
        """
        with self.lock:
            seat.leases.discard(lease)
            if seat.leases:
                return False
            self._use(seat)
            self.accounts.idle(seat.session.serial, device, pile)
            return seat.ending

    def resting(self, *, but: str | None = None, stale: bool = False) -> list[Seat]:
        """Those that nobody uses or moves, wherever they are, longest unused first. Lock held.

        Args:
            but: The key of one that is left out.
            stale: Whether only those count that are marked stale.
        """
        there = (seat for key, seat in self.seats.items() if seat.resting and key != but)
        return sorted((seat for seat in there if seat.stale or not stale), key=lambda seat: seat.place)

    def lose(self, seat: Seat, reason: Reason) -> None:
        """Take a session that nobody uses or moves out of the table. Lock held.

        What one on the device holds stays for whoever holds the session, and counts as detached.
        """
        key, session = seat.session.key, seat.session
        del self.seats[key]
        self.note(key)
        self.losses.record(key, reason)
        self.evictions += 1
        if seat.parked is None:
            self.order.remove(key)
            self.accounts.detach(session.serial, session)
        else:
            self._forget_parked(key)
            self.accounts.close(session.serial)

    def remove(self, key: str) -> Seat | None:
        """Take a session out, unless it is in use: then its seat is marked. Takes the lock.

        Returns:
            The seat, still leased where the removal must wait; ``None`` where there is none.
        """
        with self.lock:
            self.losses.forgive(key)
            seat = self.arrived(key)
            if seat is None:
                return None
            if seat.leases:
                seat.ending = True
                return seat
            del self.seats[key]
            self.note(key)
            if seat.parked is None:
                self.order.remove(key)
            else:
                self._forget_parked(key)
            self.accounts.close(seat.session.serial)
            return seat

    def keys(self) -> tuple[str, ...]:
        """Keys of all: parked ones, then idle ones by last use, then those in use. Takes the lock."""
        with self.lock:
            parked = [key for key, seat in self.seats.items() if seat.parked is not None]
            used = [key for key, seat in self.seats.items() if not seat.idle and seat.parked is None]
            return (*parked, *self.order, *used)

    def figures(self) -> dict[str, int]:
        """Counters and bytes. Takes the lock."""
        with self.lock:
            return {
                "sessions": len(self.seats),
                "used_sessions": len(self.seats) - self.parked - len(self.order),
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
        """Assert that seats, order and accounts speak of the same sessions. An expensive no-op."""
        with self.lock:
            self.order.check()
            parked = {key: seat.parked.level for key, seat in self.seats.items() if seat.parked is not None}
            assert self._shelved == set(parked), "others are parked than those that are said to be"
            on_disk = {key for key, level in parked.items() if level is Level.DISK}
            assert self._filed == on_disk, "others are on the disk than those that are said to be"
            idle = {key for key, seat in self.seats.items() if seat.idle}
            assert set(self.order) == idle, "the order is of the idle sessions"
            hosted = {
                key
                for key, seat in self.seats.items()
                if not seat.moving and seat.parked is not None and seat.parked.level is Level.HOST
            }
            self.hosted.check()
            assert set(self.hosted) == hosted, "the order of what is parked in host memory is of others"
            assert all(key == seat.session.key for key, seat in self.seats.items()), "a session is misfiled"
            places = [seat.place for seat in self.resting()]
            assert len(set(places)) == len(places), "two sessions were used at once"
            in_order = [self.seats[key].place for key in self.order]
            assert in_order == sorted(in_order), "the order is not that of the last uses"
            for seat in self.seats.values():
                assert not (seat.leases and seat.parked), "a session in use is parked"
                assert seat.moving or seat.session.parked is (seat.parked is not None), "in two places"
            self.accounts.check(
                (seat.session.serial for seat in self.seats.values()),
                idle={self.seats[key].session.serial for key in idle},
            )

"""The table: every session's seat, the eviction order, the accounts and the losses, under one lock.

Each method says whether it takes the lock or wants it held. None of them copies, walks, frees or logs.
"""

from __future__ import annotations

import threading

from vllm_omni_session_state.accounts import Accounts
from vllm_omni_session_state.growth import Pile
from vllm_omni_session_state.lease import Seat
from vllm_omni_session_state.losses import Losses, Reason
from vllm_omni_session_state.order import RecencyOrder
from vllm_omni_session_state.parking import Level, Parked
from vllm_omni_session_state.regions import Region
from vllm_omni_session_state.session import SessionState


class Table:
    """Sessions by key.

    Attributes:
        lock: Guards everything here, and every field of a seat.
        moved: Told when a session has arrived somewhere.
        seats: By session key.
        order: Keys of the idle seats, oldest first.
        accounts: Charges by a session's serial number.
        losses: Who was lost.
        parked: How many are parked,
        on_disk: and how many of them on the disk.
        hosted: Keys of those that are parked in host memory and not on their way, longest unused first.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.moved = threading.Condition(self.lock)
        self.seats: dict[str, Seat] = {}
        self.order = RecencyOrder()
        self.hosted = RecencyOrder()
        self.accounts = Accounts()
        self.losses = Losses()
        self.hits = self.misses = self.evictions = self.parks = self.restores = 0
        self.parked = self.on_disk = 0

    def arrived(self, key: str) -> Seat | None:
        """The seat of that key, once it is not on its way. Lock held; a wait gives it up meanwhile."""
        while (seat := self.seats.get(key)) is not None and seat.moving:
            self.moved.wait()
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
        seat = self.seats[key] = Seat(SessionState(key))
        self.accounts.open(seat.session.serial)
        self.order.use(key)
        return seat

    def touch(self, seat: Seat, *, lease: bool, count: bool) -> None:
        """A session on the device is used. Lock held."""
        if not seat.leases:
            if count:
                self.hits += not seat.fresh
                seat.fresh = False
            if lease:
                self.take(seat)
            else:
                self.order.use(seat.session.key)
        seat.leases += lease

    def take(self, seat: Seat) -> None:
        """An idle session leaves the order: it is used, or it moves. Lock held."""
        seat.place, seat.unwritable = self.order.remove(seat.session.key), False
        self.accounts.lease(seat.session.serial)

    def shelve(self, seat: Seat, parked: Parked) -> None:
        """A session has come to a tier, or has stayed where it was parked. Lock held."""
        self.parks += seat.parked is None
        self._count(seat.parked, -1)
        self._count(parked, 1)
        seat.parked = parked
        if parked.level is Level.HOST:
            self.hosted.put_back(seat.session.key, seat.place)

    def fetch(self, seat: Seat) -> None:
        """A parked session goes on its way to another place. Lock held."""
        assert seat.parked is not None, "only a parked session is fetched"
        seat.moving = True
        if seat.parked.level is Level.HOST:
            self.hosted.remove(seat.session.key)

    def unshelve(self, seat: Seat) -> None:
        """A session that was fetched is on the device again. Lock held."""
        self._count(seat.parked, -1)
        seat.parked = None
        self.restores += 1

    def _count(self, parked: Parked | None, by: int) -> None:
        if parked is not None:
            self.parked += by
            self.on_disk += by * (parked.level is Level.DISK)

    def end_lease(self, seat: Seat, device: tuple[Region, ...], pile: Pile | None) -> bool:
        """One use has ended. Takes the lock.

        Args:
            seat: The session's.
            device: What it holds on the device now,
            pile: with a pile of it.

        Returns:
            Whether a drop was waiting for this.
        """
        with self.lock:
            assert seat.leases > 0, "a lease ended twice"
            seat.leases -= 1
            if seat.leases:
                return False
            self.order.use(seat.session.key)
            self.accounts.idle(seat.session.serial, device, pile)
            return seat.ending

    def lose_oldest(self, reason: Reason) -> str | None:
        """Take the least recently used session out of the table only; its key. Takes the lock."""
        with self.lock:
            key = self.order.oldest()
            if key is not None:
                self.order.remove(key)
                session = self.seats.pop(key).session
                self.accounts.detach(session.serial, session)
                self.evictions += 1
                self.losses.record(key, reason)
            return key

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
            if seat.parked is None:
                self.order.remove(key)
            else:
                self._count(seat.parked, -1)
                if seat.parked.level is Level.HOST:
                    self.hosted.remove(key)
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
            parked = [seat.parked.level for seat in self.seats.values() if seat.parked is not None]
            said = self.parked, self.on_disk
            assert said == (len(parked), parked.count(Level.DISK)), f"{said} are said to be parked, on disk"
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
            for seat in self.seats.values():
                assert seat.leases >= 0, "leases below none"
                assert not (seat.leases and seat.parked), "a session in use is parked"
                assert seat.moving or seat.session.parked is (seat.parked is not None), "in two places"
            self.accounts.check(
                (seat.session.serial for seat in self.seats.values()),
                idle={self.seats[key].session.serial for key in idle},
            )

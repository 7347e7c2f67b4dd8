"""Room on the device: which sessions leave it, and how they come back.

Decide under the table's lock, move outside of it, settle under it. The new place holds the data before the
old one lets go, and a move that fails leaves the session where it was. With no tier and no budget nothing
ever moves.

Several ranks decide alike: by the order of requests and by declared sizes, never by bytes of their own.
What is parked is parked on all of them. A rank that cannot move its part keeps the bytes where they are,
and says so; before a session is used again, all ranks tell each other whether they have it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from vllm_omni_session_state.config import ENV_MAX_SESSIONS
from vllm_omni_session_state.errors import (
    CannotParkError,
    NoRoomError,
    SessionRestoreFailedError,
    SessionStateError,
    TierFullError,
)
from vllm_omni_session_state.events import LOGGER, say_once
from vllm_omni_session_state.footprint import footprint
from vllm_omni_session_state.ids import shown
from vllm_omni_session_state.lease import Seat
from vllm_omni_session_state.losses import Reason
from vllm_omni_session_state.parking import Parked, fetch, park, park_in_place
from vllm_omni_session_state.regions import Region
from vllm_omni_session_state.session import Declaration
from vllm_omni_session_state.table import Table
from vllm_omni_session_state.tiers.disk import DiskTier
from vllm_omni_session_state.tiers.host import HostTier

Exchange = Callable[[str | None], Sequence[str | None]]
"""Tells all ranks what went wrong on this one, if anything; returns what each of them told, by rank."""


class Room:
    """The bounds of one manager and what is done to keep them.

    Args:
        table: Whose sessions.
        max_sessions: Sessions on the device.
        device_budget: Bytes on the device of sessions that nobody uses, ``None``: any.
        tier: Host memory where sessions are parked, ``None``: none is.
        disk: Where they go from there.
        max_parked: Sessions that may be parked at once.
        on_lost: ``"error"`` refuses a new session rather than lose another one.
        exchange: How the ranks tell each other; ``None`` where there is one.
    """

    def __init__(
        self,
        table: Table,
        *,
        max_sessions: int,
        device_budget: int | None,
        tier: HostTier | None,
        disk: DiskTier | None,
        max_parked: int,
        on_lost: Literal["warn", "error"],
        exchange: Exchange | None,
    ) -> None:
        self.max_sessions = max_sessions
        self.device_budget = device_budget
        self.tier = tier
        self.disk = disk
        self.max_parked = max_parked
        self.on_lost = on_lost
        self.declaration: Declaration | None = None
        self._exchange = exchange
        self._table = table

    @property
    def on_host(self) -> frozenset[str]:
        """Names of the values that the model keeps in host memory itself."""
        return frozenset() if self.declaration is None else self.declaration.host_fields

    def crowded(self) -> bool:
        """Whether a new session must wait for room that an idle one can give. Lock held."""
        if not len(self._table.order):
            return False  # every session is in use: none of them can be asked
        return self._on_device() >= self.max_sessions or (self.tier is not None and self._excess() > 0)

    def make(self) -> None:
        """Park the least recently used session that can be parked, else lose the least recently used one.

        Raises:
            NoRoomError: If none can be parked and ``on_lost`` is ``"error"``; nobody was touched.
        """
        why = f"{self.max_sessions} sessions are kept ({ENV_MAX_SESSIONS})"
        tried: set[str] = set()
        while self.tier is not None and (seat := self._choose(tried, newcomers=1)) is not None:
            refused = self._send_away(seat, self.tier)
            if refused is None:
                return
            why = str(refused)
        if self.on_lost == "error":
            raise NoRoomError(why)
        reason = Reason.COUNT if self.tier is None else Reason.TIER_FULL
        key = self._table.lose_oldest(reason)
        if key is not None:
            LOGGER.warning(
                "session %s is lost (%s): a new one came and %s; its rollout starts over at its next step",
                shown(key),
                reason.value,
                why,
            )

    def enforce(self) -> None:
        """Park idle sessions until the rest fits the budget, each asked at most once. Never raises."""
        tried: set[str] = set()
        while self.tier is not None and (seat := self._choose(tried, newcomers=0)) is not None:
            self._send_away(seat, self.tier)
        with self._table.lock:
            over = self._excess() if tried else 0
        if over > 0:
            say_once(
                logging.WARNING,
                ("overrun",),
                "idle sessions hold %d bytes on the device beyond device_budget=%d and none of them can be "
                "parked; raise host_budget",
                over,
                self.device_budget,
            )

    def send(self, key: str) -> bool:
        """Park one session that nobody uses, whatever the budgets say.

        Returns:
            Whether it is parked now; a session in use is not, nor one that is not there.

        Raises:
            CannotParkError: If there is no tier, or it was refused; the session is where it was.
        """
        with self._table.lock:
            seat = self._table.arrived(key)
            if seat is None or not seat.idle:
                return seat is not None and seat.parked is not None
            if self.tier is None:
                raise CannotParkError(shown(key), "there is nowhere to park it; set host_budget")
            self._take(seat)
        refused = self._send_away(seat, self.tier)
        if refused is not None:
            raise CannotParkError(shown(key), refused)
        return True

    def _on_device(self) -> int:
        return len(self._table.seats) - self._table.parked

    @property
    def _declared_nbytes(self) -> int | None:
        """What one session counts where ranks must agree; ``None`` where each is as large as it is."""
        if self._exchange is None:
            return None
        return 0 if self.declaration is None else self.declaration.device_nbytes

    def _excess(self) -> int:
        budget, declared = self.device_budget, self._declared_nbytes
        if budget is None:
            return 0
        held = self._table.accounts.idle_nbytes() if declared is None else declared * len(self._table.order)
        return max(0, held - budget)

    def _choose(self, tried: set[str], *, newcomers: int) -> Seat | None:
        """The next session to park, taken out of the order; ``None`` where none would help.

        Args:
            tried: Keys that are not asked again; the answer's is added.
            newcomers: Sessions for which a place on the device is wanted beside those that are there.
        """
        table = self._table
        with table.lock:
            seats = (table.seats[key] for key in table.order if key not in tried)
            if self._on_device() + newcomers > self.max_sessions:
                seat = next(seats, None)
            else:
                seat = self._oldest_that_helps(seats)
            if seat is not None:
                tried.add(seat.session.key)
                self._take(seat)
            return seat

    def _take(self, seat: Seat) -> None:
        self._table.take(seat)
        seat.moving = True

    def _oldest_that_helps(self, seats: Iterator[Seat]) -> Seat | None:
        """The oldest session whose going helps to bring the bytes under the budget. Lock held."""
        accounts, excess = self._table.accounts, self._excess()
        if self._declared_nbytes is not None:
            return next(seats, None) if excess else None
        going: list[Seat] = []
        owners: list[int] = []
        freed = 0
        while freed < excess and (seat := next(seats, None)) is not None:
            going.append(seat)
            owners.append(seat.session.serial)
            freed = accounts.freed_without(owners)
        for index, seat in enumerate(going):
            # One whose every byte another of them reaches frees nothing by going.
            if freed > accounts.freed_without(owners[:index] + owners[index + 1 :]):
                return seat
        return None

    def _send_away(self, seat: Seat, tier: HostTier) -> Exception | None:
        """Park a session that was chosen; returns what refused it, or ``None``."""
        table, session = self._table, seat.session
        parked: Parked | None = None
        refused: Exception | None = None
        device: tuple[Region, ...] = ()
        host: tuple[Region, ...] = ()
        parcel: tuple[Region, ...] = ()
        try:
            self._permit(seat, tier)
            parked = self._move(seat, tier)
            device = footprint(*parked.alive.values()).regions
            host = footprint(*session.away()).regions
            if parked.parcel is not None:
                parcel = footprint(parked.parcel.slab).regions
        except Exception as error:  # noqa: BLE001 - a copy can fail in any way, and nothing has changed then
            refused = error.with_traceback(None)  # its frames hold what should have moved
            device = footprint(*session.contents(without=self.on_host)).regions
        with table.lock:
            seat.moving, seat.parked = False, parked
            if parked is None:
                table.order.put_back(session.key, seat.place)
                table.accounts.idle(session.serial, device)
            else:
                table.parked += 1
                table.parks += 1
                table.accounts.settle(session.serial, device=device, host=host, parcel=parcel)
            table.moved.notify_all()
        return refused

    def _permit(self, seat: Seat, tier: HostTier) -> None:
        """Refuse what every rank would refuse."""
        parked, shown_id = self._table.parked, shown(seat.session.key)
        if seat.session.staging:
            raise CannotParkError(shown_id, "it has a window in progress")
        if parked >= self.max_parked:
            raise CannotParkError(shown_id, f"{parked} sessions are parked (max_parked)")
        wanted = self._declared_nbytes
        room = tier.budget if wanted is None else max(0, tier.budget - parked * wanted)
        if wanted is not None and wanted > room:
            raise TierFullError("host", wanted=wanted, room=room, setting="host_budget")

    def _move(self, seat: Seat, tier: HostTier) -> Parked:
        with self._table.lock:
            live_nbytes = self._table.accounts.host_nbytes()
        try:
            return park(seat.session, tier, on_host=self.on_host, live_nbytes=live_nbytes)
        except Exception as error:
            if self._exchange is None:
                raise
            # The other ranks have parked theirs by now.
            say_once(
                logging.WARNING,
                ("in place",),
                "a parked session stays on the device of this rank, beyond device_budget: %s: %s",
                type(error).__name__,
                error,
            )
        return park_in_place(seat.session, on_host=self.on_host)

    def bring_back(self, seat: Seat) -> None:
        """Restore a session that was marked as moving, into a lease of the caller.

        Raises:
            SessionRestoreFailedError: It stays parked, whole; with several ranks on all of them.
        """
        table, session, parked = self._table, seat.session, seat.parked
        failed: Exception | None = None
        assert parked is not None, "only a parked session is brought back"
        assert self.tier is not None, "a parked session has a tier"
        try:
            part = fetch(parked, self.tier)
        except Exception as error:  # noqa: BLE001 - as above
            failed = error.with_traceback(None)  # as above
        if self._exchange is not None:
            failed = self._failed_somewhere(self._exchange, failed)
        if failed is None:
            session.put_back(part)
            if parked.parcel is not None:
                self.tier.drop(parked.parcel)
        with table.lock:
            seat.moving = False
            if failed is None:
                seat.parked = None
                table.parked -= 1
                seat.leases += 1
                table.restores += 1
            table.moved.notify_all()
        if failed is not None:
            raise SessionRestoreFailedError(shown(session.key), failed) from failed

    @staticmethod
    def _failed_somewhere(exchange: Exchange, failed: Exception | None) -> Exception | None:
        try:
            told = exchange(None if failed is None else f"{type(failed).__name__}: {failed}")
        except Exception as error:  # noqa: BLE001 - a rank is gone: the session stays where it is
            return error.with_traceback(None)
        reasons = [f"rank {rank}: {why}" for rank, why in enumerate(told) if why is not None]
        return SessionStateError("; ".join(reasons)) if reasons else None

    def forget(self, seat: Seat) -> None:
        """A parked session has ended: its parcel goes."""
        if seat.parked is not None and self.tier is not None:
            if seat.parked.parcel is not None:
                self.tier.drop(seat.parked.parcel)
            seat.parked = None

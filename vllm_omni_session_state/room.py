"""Room on the device: which sessions leave it, and how they come back.

Decide under the table's lock, move outside of it, settle under it. The new place holds the data before the
old one lets go, and a move that fails leaves the session where it was. With no tier and no budget nothing
ever moves.
"""

from __future__ import annotations

import logging
from typing import Literal

from vllm_omni_session_state.config import ENV_MAX_SESSIONS
from vllm_omni_session_state.errors import NoRoomError, SessionRestoreFailedError, SessionStateError
from vllm_omni_session_state.events import LOGGER, say_once
from vllm_omni_session_state.footprint import footprint
from vllm_omni_session_state.ids import shown
from vllm_omni_session_state.lease import Seat
from vllm_omni_session_state.losses import Reason
from vllm_omni_session_state.parking import Parked, park, restore
from vllm_omni_session_state.regions import Region
from vllm_omni_session_state.session import SessionState
from vllm_omni_session_state.table import Table
from vllm_omni_session_state.tiers.host import HostTier


class NotNowError(SessionStateError):
    """A session cannot be parked as things are; nothing has changed."""


class Room:
    """The bounds of one manager and what is done to keep them.

    Args:
        table: Whose sessions.
        max_sessions: Sessions on the device.
        device_budget: Bytes on the device of sessions that nobody uses, ``None``: any.
        tier: Where sessions are parked, ``None``: nowhere.
        max_parked: Sessions that may be parked at once.
        on_lost: ``"error"`` refuses a new session rather than lose another one.
    """

    def __init__(
        self,
        table: Table,
        *,
        max_sessions: int,
        device_budget: int | None,
        tier: HostTier | None,
        max_parked: int,
        on_lost: Literal["warn", "error"],
    ) -> None:
        self.max_sessions = max_sessions
        self.device_budget = device_budget
        self.tier = tier
        self.max_parked = max_parked
        self.on_lost = on_lost
        self._table = table

    def crowded(self) -> bool:
        """Whether a new session must wait for room that an idle one can give. Lock held."""
        if not len(self._table.order):
            return False  # every session is in use: none of them can be asked
        return self._on_device() >= self.max_sessions or (self.tier is not None and self._excess() > 0)

    def make(self, on_host: frozenset[str]) -> None:
        """Park the least recently used session that can be parked, else lose the least recently used one.

        Raises:
            NoRoomError: If none can be parked and ``on_lost`` is ``"error"``; nobody was touched.
        """
        why = f"{self.max_sessions} sessions are kept ({ENV_MAX_SESSIONS})"
        tried: set[str] = set()
        while self.tier is not None and (seat := self._choose(tried, newcomers=1)) is not None:
            refused = self._send_away(seat, self.tier, on_host)
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

    def enforce(self, on_host: frozenset[str]) -> None:
        """Park idle sessions until the rest fits the budget, each asked at most once. Never raises."""
        tried: set[str] = set()
        while self.tier is not None and (seat := self._choose(tried, newcomers=0)) is not None:
            self._send_away(seat, self.tier, on_host)
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

    def _on_device(self) -> int:
        return len(self._table.seats) - self._table.parked

    def _excess(self) -> int:
        budget = self.device_budget
        return 0 if budget is None else max(0, self._table.accounts.idle_nbytes() - budget)

    def _choose(self, tried: set[str], *, newcomers: int) -> Seat | None:
        """The next session to park, taken out of the order; ``None`` where none would help.

        Args:
            tried: Keys that are not asked again; the answer's is added.
            newcomers: Sessions for which a place on the device is wanted beside those that are there.
        """
        table = self._table
        with table.lock:
            seats = [table.seats[key] for key in table.order if key not in tried]
            if self._on_device() + newcomers > self.max_sessions:
                seat = next(iter(seats), None)
            else:
                seat = self._oldest_that_helps(seats)
            if seat is not None:
                tried.add(seat.session.key)
                table.take(seat)
                seat.moving = True
            return seat

    def _oldest_that_helps(self, seats: list[Seat]) -> Seat | None:
        """The oldest session whose going helps to bring the bytes under the budget. Lock held."""
        accounts, excess = self._table.accounts, self._excess()
        owners: list[int] = []
        while len(owners) < len(seats) and accounts.freed_without(owners) < excess:
            owners.append(seats[len(owners)].session.serial)
        freed = accounts.freed_without(owners)
        for index, seat in enumerate(seats[: len(owners)]):
            # One whose every byte another of them reaches frees nothing by going.
            if freed > accounts.freed_without(owners[:index] + owners[index + 1 :]):
                return seat
        return None

    def _send_away(self, seat: Seat, tier: HostTier, on_host: frozenset[str]) -> Exception | None:
        """Park a session that was chosen; returns what refused it, or ``None``."""
        table, session = self._table, seat.session
        parked: Parked | None = None
        refused: Exception | None = None
        device: tuple[Region, ...] = ()
        host: tuple[Region, ...] = ()
        try:
            self._permit(session)
            with table.lock:
                live_nbytes = table.accounts.host_nbytes()
            parked = park(session, tier, on_host=on_host, live_nbytes=live_nbytes)
            device = footprint(*parked.alive.values()).regions
            host = footprint(parked.parcel.slab, *session.away()).regions
        except Exception as error:  # noqa: BLE001 - a copy can fail in any way, and nothing has changed then
            refused = error.with_traceback(None)  # its frames hold what should have moved
            device = footprint(*session.contents(without=on_host)).regions
        with table.lock:
            seat.moving, seat.parked = False, parked
            if parked is None:
                table.order.put_back(session.key, seat.place)
                table.accounts.idle(session.serial, device)
            else:
                table.parked += 1
                table.parks += 1
                table.accounts.settle(session.serial, device=device, host=host)
            table.moved.notify_all()
        return refused

    def _permit(self, session: SessionState) -> None:
        if session.staging:
            raise NotNowError(f"session {shown(session.key)} has a window in progress")
        if self._table.parked >= self.max_parked:
            raise NotNowError(f"{self._table.parked} sessions are parked (max_parked)")

    def bring_back(self, seat: Seat) -> None:
        """Restore a session that was marked as moving, into a lease of the caller.

        Raises:
            SessionRestoreFailedError: It stays parked, whole.
        """
        table, session, parked, failed = self._table, seat.session, seat.parked, None
        assert parked is not None, "only a parked session is brought back"
        assert self.tier is not None, "a parked session has a tier"
        try:
            restore(session, parked, self.tier)
        except Exception as error:  # noqa: BLE001 - as above
            failed = error.with_traceback(None)  # as above
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

    def forget(self, seat: Seat) -> None:
        """A parked session has ended: its parcel goes."""
        if seat.parked is not None and self.tier is not None:
            self.tier.drop(seat.parked.parcel)
            seat.parked = None

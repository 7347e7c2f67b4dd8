"""Room on the device: which sessions leave it when there is too little.

Only choices are made here, under the table's lock; the cascade moves what was chosen. With no tier and no
budget nothing ever moves. Several ranks choose alike: by the order of requests and by declared sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Literal, Protocol

from vllm_omni_session_state.cascade import Cascade
from vllm_omni_session_state.config import ENV_MAX_SESSIONS
from vllm_omni_session_state.errors import BudgetFixedError, CannotParkError, NoRoomError
from vllm_omni_session_state.events import LOGGER, say_once
from vllm_omni_session_state.ids import session_key, shown
from vllm_omni_session_state.lease import Seat
from vllm_omni_session_state.losses import Reason
from vllm_omni_session_state.table import Table


class Pool(Protocol):
    """Places that an engine has for sessions on the device; it is asked under the table's lock as well."""

    @property
    def places(self) -> int:
        """How many there are."""

    def holds(self, key: str) -> bool:
        """Whether a session has one."""

    def has_place(self, key: str) -> bool:
        """Whether a session has one or can have one now."""


class Room:
    """The bounds of one manager and what is done to keep them.

    Args:
        table: Whose sessions.
        cascade: Where they go.
        max_sessions: Sessions on the device.
        device_budget: Bytes on the device of sessions that nobody uses, ``None``: any.
        on_lost: ``"error"`` refuses a new session rather than lose another one.

    Attributes:
        pool: Where sessions on the device need a place; ``None``: nowhere.
        sizes_pool: Whether the device budget decides how large that pool is.
    """

    def __init__(
        self,
        table: Table,
        cascade: Cascade,
        *,
        max_sessions: int,
        device_budget: int | None,
        on_lost: Literal["warn", "error"],
    ) -> None:
        self.cascade = cascade
        self.max_sessions = max_sessions
        self._device_budget = device_budget
        self._most: int | None = None
        self.on_lost = on_lost
        self.pool: Pool | None = None
        self.sizes_pool = False
        self._table = table

    @property
    def device_budget(self) -> int | None:
        """Bytes on the device of sessions that nobody uses; ``None``: any.

        Raises:
            BudgetFixedError: When it is set beyond what was reserved when the model was loaded.
        """
        return self._device_budget

    @device_budget.setter
    def device_budget(self, nbytes: int | None) -> None:
        if self._most is not None and (nbytes is None or nbytes > self._most):
            raise BudgetFixedError(nbytes, most=self._most)
        self._device_budget = nbytes

    def fix_device_budget(self) -> None:
        """The rest of the device has been given away: from now on the budget can only become smaller."""
        self._most = self._device_budget

    def bounds(self) -> dict[str, int]:
        """Bytes of ``device``, ``host`` and ``disk``, where they are bounded, and ``max_parked``."""
        host, disk = self.cascade.host, self.cascade.disk
        held = {
            "device": self._device_budget,
            "host": None if host is None else host.budget,
            "disk": None if disk is None else disk.budget,
            "max_parked": self.cascade.max_parked,
        }
        return {name: value for name, value in held.items() if value is not None}

    def crowded(self) -> bool:
        """Whether a new session must wait for room that an idle one can give. Lock held."""
        if not len(self._table.order):
            return False  # every session is in use: none of them can be asked
        return self._on_device() >= self.max_sessions or (bool(self.cascade) and self._excess() > 0)

    def make(self) -> None:
        """Park the least recently used session that can be parked, else lose the least recently used one.

        Raises:
            NoRoomError: If none can be parked, and ``on_lost`` is ``"error"`` or there is a disk to keep
                sessions on; nobody was lost.
        """
        why = f"{self.max_sessions} sessions are kept ({ENV_MAX_SESSIONS})"
        tried: set[str] = set()
        while self.cascade and (seat := self._choose(tried, newcomers=1)) is not None:
            refused = self.cascade.down(seat)
            if refused is None:
                return
            why = str(refused)
        if self.loses_nobody:
            raise NoRoomError(why)
        reason = Reason.TIER_FULL if self.cascade else Reason.COUNT
        key = self._table.lose_oldest(reason)
        if key is not None:
            LOGGER.warning(
                "session %s is lost (%s): a new one came and %s; its rollout starts over at its next step",
                shown(key),
                reason.value,
                why,
            )

    @property
    def loses_nobody(self) -> bool:
        """Whether a new session is refused rather than another one lost."""
        return self.on_lost == "error" or self.cascade.disk is not None

    def has_lost(self, session_id: str | None) -> bool:
        """Whether a session was lost and its client does not know it yet."""
        with self._table.lock:
            return self._table.losses.reason(session_key(session_id)) is not None

    def make_place(self, key: str) -> str | None:
        """Park idle sessions until a session that needs a place in the pool can have one, each asked once.

        Returns:
            Why it has none; ``None`` if it has one.
        """
        pool, tried = self.pool, set[str]()
        if pool is None or not self.cascade or pool.has_place(key):
            return None
        why = f"{pool.places} sessions have their KV in the engine's pool, and all of them are in use"
        while not pool.has_place(key):
            with self._table.lock:
                idle = (self._table.seats[other] for other in self._table.order if other not in tried)
                seat = next((seat for seat in idle if pool.holds(seat.session.key)), None)
                if seat is not None:
                    tried.add(seat.session.key)
                    self._take(seat)
                comer = self._table.seats.get(key)
            if seat is None:
                return why
            refused = self.cascade.down(seat, swap=None if comer is None else comer.parked)
            if refused is not None:
                why = str(refused)
        return None

    def enforce(self) -> None:
        """Park idle sessions until the rest fits the budget, each asked at most once. Never raises."""
        tried: set[str] = set()
        while self.cascade and (seat := self._choose(tried, newcomers=0)) is not None:
            self.cascade.down(seat)
        self.cascade.relieve()
        with self._table.lock:
            over = self._excess() if tried else 0
        if over > 0:
            say_once(
                logging.WARNING,
                ("overrun",),
                "idle sessions hold %d bytes on the device beyond device_budget=%d and none of them can be "
                "parked; raise host_budget or disk.budget",
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
            if not self.cascade:
                raise CannotParkError(
                    shown(key), "there is nowhere to park it; set host_budget, or disk.path and disk.budget"
                )
            self._take(seat)
        refused = self.cascade.down(seat)
        if refused is not None:
            raise CannotParkError(shown(key), refused)
        return True

    def _on_device(self) -> int:
        return len(self._table.seats) - self._table.parked

    def _excess(self) -> int:
        budget, declared = self.device_budget, self.cascade.declared_nbytes
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
        if self.cascade.declared_nbytes is not None:
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

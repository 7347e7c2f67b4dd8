"""Room on the device: which sessions leave it when there is too little.

Only choices are made here, under the table's lock; the offloader moves what was chosen. With no tier
nothing ever moves. Several ranks choose alike: by the order of requests and by declared sizes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence

from vllm_omni_session_state.base.errors import BudgetFixedError, CannotParkError
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.base.settings import ENV_MAX_SESSIONS
from vllm_omni_session_state.manager.entry import Entry, Placement
from vllm_omni_session_state.manager.eviction import EvictionPolicy, Refused
from vllm_omni_session_state.manager.kv_slots import KVSlots
from vllm_omni_session_state.manager.offloader import Offloader
from vllm_omni_session_state.manager.table import Table
from vllm_omni_session_state.offload.parking import Parked


class DeviceCapacity:
    """The bounds of one manager and what is done to keep them.

    Args:
        table: Whose sessions.
        offloader: Where they go.
        max_sessions: Sessions on the device.
        device_budget: Bytes on the device of sessions that nobody uses, ``None``: any.
        eviction: Who is lost where nobody can leave unharmed.

    Attributes:
        pool: Where sessions on the device need a place; ``None``: nowhere.
    """

    def __init__(
        self,
        table: Table,
        offloader: Offloader,
        *,
        max_sessions: int,
        device_budget: int | None,
        eviction: EvictionPolicy,
    ) -> None:
        self.offloader = offloader
        self.max_sessions = max_sessions
        self._device_budget = device_budget
        self._most: int | None = None
        self.eviction = eviction
        self.pool: KVSlots | None = None
        self._table = table

    @property
    def device_budget(self) -> int | None:
        """Bytes on the device of idle sessions; ``None``: any. Fixed: not beyond what is reserved."""
        return self._device_budget

    @device_budget.setter
    def device_budget(self, nbytes: int | None) -> None:
        if self._most is not None and (nbytes is None or nbytes > self._most):
            raise BudgetFixedError(nbytes, most=self._most)
        self._device_budget = nbytes

    @property
    def fixed(self) -> bool:
        """Whether the device has no more than was reserved: then no newcomer may exceed the budget."""
        return self._most is not None

    def fix_device_budget(self) -> None:
        """The rest of the device has been given away: from now on the budget can only become smaller."""
        self._most = self._device_budget

    def bounds(self) -> dict[str, int]:
        """Bytes of ``device``, ``host`` and ``disk``, where they are bounded, and ``max_parked``."""
        host, disk = self.offloader.host, self.offloader.disk
        held = {
            "device": self._device_budget,
            "host": None if host is None else host.budget,
            "disk": None if disk is None else disk.budget,
            "max_parked": self.offloader.max_parked,
        }
        return {name: value for name, value in held.items() if value is not None}

    def over_capacity(self, *, paid: bool) -> bool:
        """Whether a new session must wait for room that an idle one can give. Lock held.

        Args:
            paid: Whether another one was lost for it already. Bytes that others hold beyond a budget are
                not its to pay for, unless they would be missing on the device.
        """
        if not len(self._table.order):
            return False  # every session is in use: none of them can be asked
        if self._on_device() >= self.max_sessions:
            return True
        return bool(self.offloader) and (self.fixed or not paid) and self._excess(newcomers=1) > 0

    def make(self) -> bool:
        """Park the least recently used session that can be parked, else lose as many as make the room.

        Returns:
            Whether somebody was lost.

        Raises:
            NoRoomError: If none can be parked, nobody may be lost, and those that are stale give too little.
        """
        refused: list[Refused] = []
        while self.offloader:
            entry, why = self._park(functools.partial(self._choose, refused, newcomers=1))
            if entry is None:
                break
            if why is None:
                return False
            refused.append(Refused(entry, why))
        with self._table.lock:
            before = self._excess(newcomers=1)

        def met(gone: Sequence[Entry]) -> bool:
            left = [entry for entry in gone if entry.idle]
            if len(left) == len(self._table.order):
                return True  # nobody is left to be asked
            over = self._excess(newcomers=1, without=left)
            fits = not over or (over < before and not self.fixed)
            return self._on_device() - len(left) < self.max_sessions and (fits or not self.offloader)

        full = f"{self.max_sessions} sessions are kept ({ENV_MAX_SESSIONS})"
        full = str(refused[-1].why) if refused else full
        lost = self.eviction.make(met, self._park_again, refused, why=full)
        if lost or not self.eviction.loses_nobody:
            return lost
        with self._table.lock:
            if met(()):
                return False  # somebody has left meanwhile
        raise self.eviction.refusal(full)

    def full(self, key: str) -> bool:
        """Whether a session needs a place in the pool, and somebody must give one up for it."""
        return self.pool is not None and bool(self.offloader) and not self.pool.has_place(key)

    def reserve_kv_slot(self, key: str) -> str | None:
        """Park idle sessions until a session that needs a place in the pool can have one, each asked once.

        Where none can be parked, as many are lost as make the place, if any may.

        Returns:
            Why it has none; ``None`` if it has one.
        """
        pool = self.pool
        if pool is None or not self.full(key):
            return None
        refused: list[Refused] = []
        with self._table.lock:
            comer = self._table.entries.get(key)
            swap = None if comer is None else comer.gone_to

        def holder() -> Entry | None:
            asked = [each.entry for each in refused]
            idle = (self._table.entries[other] for other in self._table.order)
            there = (entry for entry in idle if pool.holds(entry.session.key))
            return next((entry for entry in there if entry not in asked), None)

        while not pool.has_place(key):
            entry, why = self._park(holder, swap=swap)
            if entry is None:
                break
            if why is not None:
                refused.append(Refused(entry, why))
        else:
            return None
        full = f"{pool.places} sessions have their KV in the engine's pool, and all of them are in use"
        full = str(refused[-1].why) if refused else full

        def met(gone: Sequence[Entry]) -> bool:
            return pool.has_place(key) or any(entry.idle and pool.holds(entry.session.key) for entry in gone)

        self.eviction.make(
            met,
            functools.partial(self._park_again, swap=swap),
            refused,
            why=full,
            but=key,
            swap=swap,
        )
        return None if pool.has_place(key) else full

    def enforce(self) -> None:
        """Park idle sessions until the rest fits the budget, each asked at most once. Never raises.

        Where none can be parked and the device has no more, as many are lost as make it fit, if any may.
        """
        if not self.offloader:
            return
        refused: list[Refused] = []
        asked = False
        while True:
            entry, why = self._park(functools.partial(self._choose, refused, newcomers=0))
            if entry is None:
                break
            asked = True
            if why is not None:
                refused.append(Refused(entry, why))
        self.offloader.enforce_host_budget()
        if not asked:
            return
        if refused and self.fixed:
            self._shrink(refused)
        with self._table.lock:
            over = self._excess()
        if over > 0:
            log_once(
                logging.WARNING,
                ("overrun",),
                "idle sessions hold %d bytes on the device beyond device_budget=%d and none of them can be "
                "parked; raise host_budget or disk.budget",
                over,
                self.device_budget,
            )

    def _shrink(self, refused: Sequence[Refused]) -> None:
        def met(gone: Sequence[Entry]) -> bool:
            return not self._excess(without=[entry for entry in gone if entry.idle], least=self._own_nbytes)

        with self._table.lock:
            latest = list(self._table.order)[-1:]  # it fits, or was reserved more than it declared
        but = latest[0] if latest else None
        self.eviction.make(met, self._park_again, refused, why=str(refused[-1].why), but=but)

    def send(self, key: str, *, until: float | None = None) -> bool:
        """Park one session that nobody uses, whatever the budgets say.

        Args:
            key: The session's.
            until: When to wait no longer for one that is on its way, by the monotonic clock.

        Returns:
            Whether it is parked now; a session in use is not, nor one that is not there.

        Raises:
            CannotParkError: If there is no tier, or it was refused; the session is where it was.
        """
        with self._table.lock:
            there = self._table.wait_until_placed(key, until=until)
            if there is not None and there.moving:
                raise CannotParkError(display_id(key), "it is on its way, and nobody waits for it any longer")
            if there is None or not there.idle:
                return there is not None and there.parked
            if not self.offloader:
                raise CannotParkError(
                    display_id(key),
                    "there is nowhere to park it; set host_budget, or disk.path and disk.budget",
                )
        entry, why = self._park(lambda: there if self._stands(there) else None)
        if why is not None:
            raise CannotParkError(display_id(key), why)
        return entry is not None

    def _park(
        self, choose: Callable[[], Entry | None], *, swap: Parked | None = None
    ) -> tuple[Entry | None, Exception | None]:
        """Park an idle session: whom, if anybody, and what refused it, if anything did.

        Args:
            choose: Says whom. Called with the lock held.
            swap: As for ``Offloader.offload()``.
        """
        going: list[Entry] = []
        try:
            with self._table.lock:
                entry = choose()
                if entry is None:
                    return None, None
                going.append(entry)
                self._table.transition(entry, Placement.LEAVING)
            return entry, self.offloader.offload(entry, swap=swap)
        except BaseException as error:
            self.offloader.stopped(error, going)
            raise

    def _park_again(self, entry: Entry, *, swap: Parked | None = None) -> Exception | None:
        """Park a session that was refused before, if it still stands where it stood."""
        return self._park(lambda: entry if self._stands(entry) else None, swap=swap)[1]

    def _stands(self, entry: Entry) -> bool:
        return entry.idle and self._table.entries.get(entry.session.key) is entry

    def _on_device(self) -> int:
        return len(self._table.entries) - self._table.parked

    @property
    def _own_nbytes(self) -> int:
        """What a model declared of one session on the device."""
        declaration = self.offloader.declaration
        return 0 if declaration is None else declaration.device_nbytes

    def _excess(self, *, newcomers: int = 0, without: Sequence[Entry] = (), least: int = 0) -> int:
        """Bytes of idle sessions beyond the budget. Lock held.

        Args:
            newcomers: Sessions that will be there too, where the device has no more than was reserved.
            without: Those of the idle ones that are not counted.
            least: What the budget is at least.
        """
        budget, declared = self.device_budget, self.offloader.declared_nbytes
        if budget is None:
            return 0
        if declared is None:
            accounts = self._table.accounts
            held = accounts.idle_nbytes() - accounts.freed_without(entry.session.serial for entry in without)
        else:
            held = declared * (len(self._table.order) - len(without))
        if newcomers and self.fixed:  # one session at least was reserved, however small the budget is
            held, least = held + newcomers * self._own_nbytes, self._own_nbytes
        return max(0, held - max(budget, least))

    def _choose(self, refused: Sequence[Refused], *, newcomers: int) -> Entry | None:
        """The next session to park; ``None`` where none would help. Lock held.

        Args:
            refused: Those that are not asked again.
            newcomers: Sessions for which a place on the device is wanted beside those that are there.
        """
        asked = {each.entry.session.key for each in refused}
        entries = (self._table.entries[key] for key in self._table.order if key not in asked)
        if self._on_device() + newcomers > self.max_sessions:
            return next(entries, None)
        return self._oldest_that_helps(entries, self._excess(newcomers=newcomers))

    def _oldest_that_helps(self, entries: Iterator[Entry], excess: int) -> Entry | None:
        """The oldest session whose going helps to bring the bytes under the budget. Lock held."""
        accounts = self._table.accounts
        if self.offloader.declared_nbytes is not None:
            return next(entries, None) if excess else None
        going: list[Entry] = []
        owners: list[int] = []
        freed = 0
        while freed < excess and (entry := next(entries, None)) is not None:
            going.append(entry)
            owners.append(entry.session.serial)
            freed = accounts.freed_without(owners)
        for index, entry in enumerate(going):
            # One whose every byte another of them reaches frees nothing by going.
            if freed > accounts.freed_without(owners[:index] + owners[index + 1 :]):
                return entry
        return None

"""The heart: which sessions there are, what each of them holds, and where.

Ownership: the table owns a session. A lease is the span in which somebody uses one; a leased session is
not in the order, so it is never moved nor evicted, and a drop takes effect when the last lease ends.
``drop_session()`` ends a session and frees all of it, whoever still holds it.

Synchronization: one lock, the table's. Under it only look-ups and choices are made. Who needs a session
that is on its way waits for that session, not for the lock.

Accounting: a session's charge is settled when its use ends, never by a reader. Figures are those of the
last settlement; reading them walks nothing and costs the same for one session and for a thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from vllm_omni_session_state.base.ids import display_id, session_key
from vllm_omni_session_state.base.log import LOGGER
from vllm_omni_session_state.base.settings import DEFAULT_MAX_PARKED, DEFAULT_MAX_SESSIONS, ENV_MAX_SESSIONS
from vllm_omni_session_state.manager.capacity import DeviceCapacity
from vllm_omni_session_state.manager.changes import Changes
from vllm_omni_session_state.manager.charging import charge_session
from vllm_omni_session_state.manager.consensus import AllGather
from vllm_omni_session_state.manager.entry import Lease
from vllm_omni_session_state.manager.eviction import EvictionPolicy
from vllm_omni_session_state.manager.kv_slots import KVSlots
from vllm_omni_session_state.manager.leases import Leases
from vllm_omni_session_state.manager.losses import Reason
from vllm_omni_session_state.manager.offloader import Offloader
from vllm_omni_session_state.manager.outside import Outside
from vllm_omni_session_state.manager.table import Table
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.offload.spill import Spiller
from vllm_omni_session_state.state.inspection import Entry, entry_of
from vllm_omni_session_state.state.session import Declaration, SessionState


class SessionStateManager:
    """Owns the sessions of one model in one worker process. A session's id that is no string: TypeError.

    Args:
        max_sessions: Sessions kept on the device, at least 1. A new one beyond it sends the least
            recently used one to the tier, or out of the table where there is no tier.
        declaration: What the model declared of one session; a session that is found to hold more is said
            once at WARNING.
        device_budget: Bytes on the device that sessions may hold while nobody uses them; ``None``: any.
        tier: Host memory where sessions are parked; ``None``: none is.
        disk: Where they go from there, or at once if there is no ``tier``. With neither nothing ever moves.
        max_parked: Sessions that may be parked at once.
        on_lost: With ``"error"`` a new session is refused rather than another one lost, and a step of a
            lost session raises; with ``"warn"`` either is counted and said.
        idle_drop_s: Seconds after which a server marks a session stale, as the refusals say it; 0: never.
        exchange: How the ranks of one model tell each other how a restore went; ``None`` where there is one
            rank. With it, what is parked follows from the order of requests and from what is declared.

    Attributes:
        moves: How long moves between tiers took, and how much moved.
        watch: Tells one watcher what changed in the listing.

    Raises:
        ValueError: For a ``max_sessions`` that is not a positive whole number.
    """

    def __init__(
        self,
        *,
        max_sessions: int = DEFAULT_MAX_SESSIONS,
        declaration: Declaration | None = None,
        device_budget: int | None = None,
        tier: HostTier | None = None,
        disk: DiskTier | None = None,
        max_parked: int = DEFAULT_MAX_PARKED,
        on_lost: Literal["warn", "error"] = "warn",
        idle_drop_s: float = 0.0,
        exchange: AllGather | None = None,
    ) -> None:
        if type(max_sessions) is not int or max_sessions < 1:
            raise ValueError(
                f"max_sessions={max_sessions!r} keeps no session; set {ENV_MAX_SESSIONS} to 1 or more"
            )
        self._table = Table()
        self.offloader = Offloader(
            self._table, host=tier, disk=disk, max_parked=max_parked, exchange=exchange
        )
        self.capacity = DeviceCapacity(
            self._table,
            self.offloader,
            max_sessions=max_sessions,
            device_budget=device_budget,
            eviction=EvictionPolicy(self._table, self.offloader, on_lost=on_lost, idle_drop_s=idle_drop_s),
        )
        self.moves = self.offloader.moves
        self.watch = Changes(self._table)
        self.offloader.declaration = declaration
        self._uses = Leases(self._table, self.offloader, self.capacity)
        self._outside = Outside(self._table)

    @property
    def declaration(self) -> Declaration | None:
        """What the model declared of one session."""
        return self.offloader.declaration

    @declaration.setter
    def declaration(self, declaration: Declaration | None) -> None:
        self.offloader.declaration = declaration

    @property
    def has_tier(self) -> bool:
        """Whether there is anywhere to park a session."""
        return bool(self.offloader)

    @property
    def disk(self) -> DiskTier | None:
        """The lowest tier, if there is one."""
        return self.offloader.disk

    @property
    def spiller(self) -> Spiller | None:
        """Moves older items of a session's lists to the disk, where there is one."""
        return self.offloader.spiller

    @property
    def kv_slots(self) -> KVSlots | None:
        """Where sessions on the device need a place; ``None``: nowhere."""
        return self.capacity.pool

    @property
    def device_budget(self) -> int | None:
        """Bytes on the device of idle sessions; ``None``: any."""
        return self.capacity.device_budget

    def bounds(self) -> dict[str, int]:
        """Bytes of ``device``, ``host`` and ``disk``, where they are bounded, and ``max_parked``."""
        return self.capacity.bounds()

    def too_small(self) -> Iterable[tuple[str, int, int]]:
        """Tiers that have no room for one session as the model declares it: setting, budget, bytes of one."""
        return self.offloader.too_small()

    def use_kv_slots(self, slots: KVSlots, *, nbytes: int) -> None:
        """Have each session on the device need a place of an engine, which keeps ``nbytes`` of it at most."""
        self.offloader.engine_nbytes, self.capacity.pool = nbytes, slots

    def fix_device_budget(self) -> None:
        """The rest of the device has been given away: from now on the budget can only become smaller."""
        self.capacity.fix_device_budget()

    def leave_disk(self) -> DiskTier | None:
        """Park nothing on the disk any more; the tier, if there was one, is the caller's to close."""
        disk, self.offloader.disk, self.offloader.spiller = self.offloader.disk, None, None
        return disk

    def flush_to_disk(self) -> None:
        """Move all that is parked in host memory on to the disk, as far as that goes. Never raises."""
        self.offloader.flush_to_disk()

    @contextmanager
    def lease(self, session_id: str | None) -> Iterator[SessionState]:
        """Use a session for the span of a ``with``: it is on the device and stays there.

        At the end its charge is settled, and after a use that succeeded idle sessions beyond the budget
        are parked. Several may hold a lease on one session.

        Raises:
            SessionRestoreFailedError: If it is parked and could not be brought back; it stays parked.
            SessionStateLostError: If it was lost and ``on_lost`` is ``"error"``.
            NoRoomError: If it is new, there is no room and ``on_lost`` is ``"error"``.
        """
        uses, key = self._uses, session_key(session_id)
        lease = uses.pins.get(key)
        try:
            try:
                if lease is None or not uses.take(lease):
                    lease = Lease(key)
                    uses.begin(key, lease)
                    self._table.tell()  # of one that was prepared it has been told
                yield lease.session
            finally:
                if lease is not None:
                    try:
                        uses.end(lease)
                    finally:
                        uses.end(lease)  # a stop of the process can come before the first one has begun
            self.capacity.enforce()
        finally:
            self._table.tell(ended=True)

    def get_or_create_session(self, session_id: str | None) -> SessionState:
        """The session of that id, made the most recently used one; a new empty one where there is none.

        For who holds a lease on it, or runs without a tier. A new session beyond ``max_sessions`` takes the
        least recently used one out of the table, counted and said, since that client's rollout starts over.
        Whoever changes the session calls ``settle()`` when done.

        Raises:
            SessionParkedError: If it is parked.
            SessionStateLostError: As for ``lease()``.
            NoRoomError: As for ``lease()``.
        """
        return self._uses.begin(session_key(session_id), None).session

    def prepare(self, session_id: str | None, *, new: bool = True) -> Lease | None:
        """Bring a session to the device, or make room for a new one, and pin it there.

        The next ``lease()`` takes the pin over; until then ``give_back()`` ends it. Ranks that park call this
        all at once, and tell each other where they have the session. Returns ``None`` for one that is not
        there, and with ``new`` off does not begin.

        Raises:
            SessionRestoreFailedError: As for ``lease()``, and so the others.
        """
        try:
            return self._uses.prepare(session_key(session_id), new=new)
        finally:
            self._table.tell()

    def give_back(self, session_id: str | None) -> None:
        """End the pin of a session, if ``prepare()`` made one and no lease has taken it over."""
        self._uses.give_back(session_key(session_id))

    def park(self, session_id: str | None, *, until: float | None = None) -> bool:
        """Park a session that nobody uses, also while the budgets have room for it; whether it is parked now.

        Raises:
            CannotParkError: It stays on the device, and the error says why. Also if it is still on its way at
                ``until``, by the monotonic clock.
        """
        return self.capacity.send(session_key(session_id), until=until)

    def mark_stale(self, session_id: str | None) -> bool:
        """Say that an idle session may go when room is wanted, until it is used; whether it is marked now."""
        return self.capacity.eviction.mark(session_key(session_id))

    def expect_marks(self) -> None:
        """Say that a server tells the time, and marks the sessions that are stale."""
        self.capacity.eviction.clock = True

    def restore(self, session_id: str | None) -> bool:
        """Bring a parked session back, or park it again if there is no room; whether it is on the device now.

        Raises as ``prepare()``.
        """
        try:
            pin = self._uses.prepare(session_key(session_id), new=False, count=False)
            if pin is not None:
                self._uses.end(pin)
            self.capacity.enforce()
        finally:
            self._table.tell()
        return (session := self.peek(session_id)) is not None and not session.parked

    def begin_restore(self, session_id: str | None) -> bool:
        """Read a session on the disk in the background, as its step is near; whether it is being read."""
        return self.offloader.begin(session_key(session_id))

    def settle(self, session: SessionState) -> None:
        """Charge a session for what it holds now. Never raises: it runs after a forward's own body."""
        charge_session(session, self._table, self.declaration)

    def charge_outside(self, name: str, *values: object) -> None:
        """Say what vLLM-Omni keeps of sessions outside of them, under a name of its own."""
        self._outside.charge(name, *values)

    def drop_session(self, session_id: str | None) -> bool:
        """End a session and free all it holds, also for whoever still holds it.

        While it is in use the end waits for the last lease. A session that was lost may begin anew. Returns
        whether there was such a session.
        """
        return self._uses.drop(session_key(session_id))

    def mark_lost(self, session_id: str | None, reason: Reason) -> None:
        """Say that a session was dropped although its client had not ended it; called after the drop."""
        key = session_key(session_id)
        with self._table.lock:
            self._table.losses.record(key, reason)
        self._table.tell()
        LOGGER.warning(
            "session %s is lost (%s): its rollout starts over at its next step", display_id(key), reason.value
        )

    def has_lost(self, session_id: str | None) -> bool:
        """Whether a session was lost and its client does not know it yet."""
        with self._table.lock:
            return self._table.losses.reason(session_key(session_id)) is not None

    def drop_all(self) -> int:
        """End every session; returns how many there were."""
        with self._table.lock:
            keys = list(self._table.entries)
        return sum(self.drop_session(key) for key in keys)

    def peek(self, session_id: str | None) -> SessionState | None:
        """The session of that id or ``None``; looking does not make it recently used."""
        entry = self._table.entries.get(session_key(session_id))
        return None if entry is None else entry.session

    def keys(self) -> tuple[str, ...]:
        """The key of every session: parked ones, then idle ones by last use, then those in use."""
        return self._table.keys()

    def inspect(self, key: str) -> Entry | None:
        """The session of that key with every value, ``None`` where there is none; it refreshes nobody."""
        entry = self._table.entries.get(key)
        return None if entry is None else entry_of(entry.session, self.declaration, entry.where)

    def listing(self) -> tuple[Entry, ...]:
        """Every session with every value, in the order of ``keys()``; listing refreshes nobody."""
        return tuple(entry for entry in map(self.inspect, self.keys()) if entry is not None)

    def used(self, session_id: str | None) -> bool:
        """Whether somebody uses the session of that id, or it is on its way."""
        entry = self._table.entries.get(session_key(session_id))
        return entry is not None and entry.used

    def stats(self) -> dict[str, int]:
        """Sessions, events and bytes, as the page on state has them, as of each session's last settlement.

        All ``nbytes:<device>``, and all ``tier_nbytes:<tier>:<kind>:<device>``, are ``total_nbytes``.
        """
        return {
            "max_sessions": self.capacity.max_sessions,
            **self._table.figures(),
            **self.offloader.figures(),
        }

    def nbytes_by_device(self) -> dict[str, int]:
        """Bytes of the table's sessions by device, each allocation once, as of their last settlement."""
        with self._table.lock:
            return self._table.accounts.held_by_device()

    def __len__(self) -> int:
        return len(self._table.entries)

    def __bool__(self) -> bool:
        """True also without sessions: an empty manager is a manager."""
        return True

    def __contains__(self, session_id: str | None) -> bool:
        return session_key(session_id) in self._table.entries

    def check(self) -> None:
        """Assert that every part is sound and that they agree. An expensive no-op."""
        self._table.check()
        self.offloader.check()

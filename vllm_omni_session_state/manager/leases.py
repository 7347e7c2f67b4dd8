"""How a use of a session begins and ends.

It begins once the session is on the device: whoever uses it waits for one that is on its way, has one that
is parked brought back, and has room made for a new one. When it ends the session is charged for what it
holds, and is the most recently used one.
"""

from __future__ import annotations

import functools

from vllm_omni_session_state.base.errors import SessionParkedError, SessionStateLostError
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.manager.capacity import DeviceCapacity
from vllm_omni_session_state.manager.charging import measure
from vllm_omni_session_state.manager.entry import PARKED, Entry, Lease
from vllm_omni_session_state.manager.offloader import Offloader, finished
from vllm_omni_session_state.manager.table import Table


class Leases:
    """The uses of one manager's sessions.

    Args:
        table: The sessions.
        offloader: Brings them back.
        room: Makes room for new ones.

    Attributes:
        pins: By session key, uses that were prepared and that nobody has taken over yet.
    """

    def __init__(self, table: Table, offloader: Offloader, room: DeviceCapacity) -> None:
        self._table = table
        self._offloader = offloader
        self._capacity = room
        self.pins: dict[str, Lease] = {}

    def prepare(self, key: str, *, new: bool, count: bool = True) -> Lease | None:
        """See ``SessionStateManager.prepare()``, which tells; ``count``: whether it is a hit or a miss."""
        pin = Lease(key)
        try:
            if not self._prepared(pin, new=new, count=count):
                return None
            earlier, self.pins[key] = self.pins.get(key), pin
            if earlier is not None:
                self.end(earlier)
        except BaseException:
            self.end(pin)
            raise
        return pin

    def _prepared(self, pin: Lease, *, new: bool, count: bool) -> bool:
        """Whether the session is there; then it is on the device, and in use from now on."""
        key, table, capacity = pin.key, self._table, self._capacity
        with table.lock:
            entry = table.wait_until_placed(key)
            parked = entry is not None and entry.parked
            if entry is not None and not (parked or self._offloader.ranks or (new and capacity.full(key))):
                entry.stale = False
                table.lend(entry, pin, count=count)
                return True
            place = table.place(key)
        if not parked:
            if self._offloader:  # else none is ever parked
                self._offloader.ranks.meet(key, place)
            if entry is None and not new:
                return False
            if entry is None:
                self.refuse_the_lost(key)
            why = capacity.reserve_kv_slot(key) if new else None
            if why is not None and capacity.eviction.loses_nobody:
                raise capacity.eviction.refusal(why)  # else the engine drops its oldest session
        self.begin(key, pin, count=count)
        return True

    def take(self, pin: Lease) -> bool:
        """Take a use over from who prepared it; whether nobody has by now."""
        with self._table.lock:
            return self.pins.get(pin.key) is pin and self.pins.pop(pin.key) is pin

    def give_back(self, key: str) -> None:
        """End a use that was prepared and that nobody took over, if there is one."""
        if (pin := self.pins.get(key)) is not None:
            self.end(pin)
            self._table.tell(ended=True)

    def drop(self, key: str, *, clear: bool = True) -> bool:
        """End a session, once nobody uses it; whether there is one. ``clear``: it may begin anew if lost."""
        entry = self._table.remove(key, clear=clear)
        if entry is None:
            return False
        if not entry.leases:
            self._offloader.forget(entry)
            entry.session.reset()
        self._table.tell()
        return True

    def begin(self, key: str, lease: Lease | None, *, count: bool = True) -> Entry:
        """The entry of a session that is on the device; waits, restores and makes room as it must.

        Args:
            key: The session's.
            lease: The use, until ``end()``; ``None`` where it is for this moment only.
            count: Whether it counts as a hit or a miss.

        Raises:
            SessionParkedError: If it is parked, and the use is for this moment only.
            SessionRestoreFailedError: If it could not be brought back; it stays parked.
            SessionStateLostError: If it was lost and ``on_lost`` is ``"error"``.
            NoRoomError: If it is new, there is no room and nobody may be lost.
        """
        asked, paid, why = False, False, None
        coming: list[Entry] = []
        try:
            while True:
                entry, there = self._seat(
                    key, lease, count=count, paid=paid, coming=coming if asked else None
                )
                if entry is None:
                    paid = self._capacity.make() or paid
                elif there:
                    return entry
                elif coming and lease is not None:
                    self._offloader.restore(entry, lease, no_place=why)
                    return entry
                else:
                    why, asked = self._capacity.reserve_kv_slot(key), True
        except BaseException as error:
            self._offloader.stopped(error, coming)
            raise

    def _seat(
        self, key: str, lease: Lease | None, *, count: bool, paid: bool, coming: list[Entry] | None
    ) -> tuple[Entry | None, bool]:
        """The entry of a session, and whether it is on the device, and so used now; ``None`` for no room.

        Args:
            key: The session's.
            lease: As for ``begin()``.
            count: As for ``begin()``.
            paid: As for ``DeviceCapacity.over_capacity()``.
            coming: Where to note that a parked one is on its way back from now on; ``None``: it stays.
        """
        table = self._table
        with table.lock:
            entry = table.wait_until_placed(key)
            if entry is None:
                self.refuse_the_lost(key)
                if self._capacity.over_capacity(paid=paid):
                    return None, False
                entry, count = table.open(key), False
            entry.stale = False
            if entry.placement not in PARKED:
                table.lend(entry, lease, count=count)
                return entry, True
            if lease is None:
                raise SessionParkedError(display_id(key))
            if coming is not None:
                coming.append(entry)
                table.transition(entry, entry.placement.away)
            return entry, False

    def refuse_the_lost(self, key: str) -> None:
        """Raise where a new session would be one that was lost, and may not start over in silence.

        Raises:
            SessionStateLostError: If it was, and ``on_lost`` is ``"error"``.
        """
        reason = self._table.losses.reason(key)
        if reason is not None and self._capacity.eviction.on_lost == "error":
            raise SessionStateLostError(display_id(key), reason.value)

    def end(self, lease: Lease) -> None:
        """End a use, if it has begun. Never raises: it runs after a forward's own body."""
        entry, charge = lease.entry, None
        if entry is not None and lease in entry.leases:
            try:
                charge = measure(entry.session, self._offloader.declaration)
            finally:
                ended = finished(functools.partial(self._table.end_lease, entry, lease), charge)
            if ended:  # what was said of it meanwhile, that it is lost, stays said
                self.drop(lease.key, clear=False)
        if self.pins.get(lease.key) is lease:
            del self.pins[lease.key]

"""How a use of a session begins and ends.

It begins once the session is on the device: whoever uses it waits for one that is on its way, has one that
is parked brought back, and has room made for a new one. When it ends the session is charged for what it
holds, and is the most recently used one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_omni_session_state.base.errors import SessionParkedError, SessionStateLostError
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.manager.capacity import DeviceCapacity
from vllm_omni_session_state.manager.charging import Charge, measure
from vllm_omni_session_state.manager.entry import Entry
from vllm_omni_session_state.manager.offloader import Offloader, finished
from vllm_omni_session_state.manager.table import Table
from vllm_omni_session_state.state.session import SessionState


class Leases:
    """The uses of one manager's sessions.

    Args:
        table: The sessions.
        offloader: Brings them back.
        room: Makes room for new ones.
    """

    def __init__(self, table: Table, offloader: Offloader, room: DeviceCapacity) -> None:
        self._table = table
        self._offloader = offloader
        self._capacity = room

    @contextmanager
    def span(self, key: str, *, count: bool = True) -> Iterator[SessionState]:
        """Use a session for the span of a ``with``. See ``begin()``."""
        lease = object()
        try:
            yield self.begin(key, lease, count=count).session
        finally:
            try:
                self._end(key, lease)
            finally:
                self._end(key, lease)  # a stop of the process can come before the first one has begun

    def _end(self, key: str, lease: object) -> None:
        if self.end(key, lease):
            self.drop(key)

    def prepare(self, key: str, *, new: bool) -> bool:
        """Bring a session to the device, or make room for a new one. See ``prepare()`` there."""
        with self._table.lock:
            entry, place = self._table.wait_until_placed(key), self._table.place(key)
            parked = entry is not None and entry.parked
        if not parked:
            if self._offloader:  # else none is ever parked
                self._offloader.ranks.meet(key, place)
            if not new:
                return entry is not None
            if entry is None:
                self.refuse_the_lost(key)
            why = self._capacity.reserve_kv_slot(key)
            if why is not None and self._capacity.eviction.loses_nobody:
                raise self._capacity.eviction.refusal(why)  # else the engine drops its oldest session
        if parked or entry is None:
            with self.span(key, count=False):
                pass
        return True

    def drop(self, key: str) -> bool:
        """End a session, once nobody uses it; whether there is one."""
        entry = self._table.remove(key)
        if entry is None:
            return False
        if not entry.leases:
            self._offloader.forget(entry)
            entry.session.reset()
        self._table.tell()
        return True

    def begin(self, key: str, lease: object | None, *, count: bool = True) -> Entry:
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
                entry = self._seat(key, lease, count=count, paid=paid, coming=coming if asked else None)
                if entry is None:
                    paid = self._capacity.make() or paid
                elif coming:
                    self._offloader.restore(entry, lease, no_place=why)
                    return entry
                elif not entry.parked:
                    return entry
                else:
                    why, asked = self._capacity.reserve_kv_slot(key), True
        except BaseException as error:
            self._offloader.stopped(error, coming)
            raise

    def _seat(
        self, key: str, lease: object | None, *, count: bool, paid: bool, coming: list[Entry] | None
    ) -> Entry | None:
        """The entry of a session, used from now on where it is on the device; ``None`` for no room.

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
                entry = self._newcomer(key, paid=paid)
            if entry is None:
                return None
            entry.stale = False
            if not entry.parked:
                table.lend(entry, lease, count=count)
            elif lease is None:
                raise SessionParkedError(display_id(key))
            elif coming is not None:
                coming.append(entry)
                table.transition(entry, entry.placement.away)
            return entry

    def _newcomer(self, key: str, *, paid: bool) -> Entry | None:
        """A new session's entry; ``None`` while there is no room for one. Lock held."""
        self.refuse_the_lost(key)
        return None if self._capacity.over_capacity(paid=paid) else self._table.open(key)

    def refuse_the_lost(self, key: str) -> None:
        """Raise where a new session would be one that was lost, and may not start over in silence.

        Raises:
            SessionStateLostError: If it was, and ``on_lost`` is ``"error"``.
        """
        reason = self._table.losses.reason(key)
        if reason is not None and self._capacity.eviction.on_lost == "error":
            raise SessionStateLostError(display_id(key), reason.value)

    def end(self, key: str, lease: object) -> bool:
        """End a use, if it has begun. Never raises: it runs after a forward's own body.

        Returns:
            Whether a drop was waiting for this.
        """
        entry = self._table.entries.get(key)
        if entry is None or lease not in entry.leases:
            return False
        charge: Charge | None = None
        try:
            charge = measure(entry.session, self._offloader.declaration)
        finally:
            ended = finished(
                lambda: self._table.end_lease(entry, lease, charge),
                lambda: self._table.end_lease(entry, lease, None),
            )
        return ended

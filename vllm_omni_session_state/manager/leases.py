"""How a use of a session begins and ends.

It begins once the session is on the device: whoever uses it waits for one that is on its way, has one that
is parked brought back, and has room made for a new one. When it ends the session is charged for what it
holds, and is the most recently used one.
"""

from __future__ import annotations

from vllm_omni_session_state.manager.offloader import Offloader, finished
from vllm_omni_session_state.base.errors import SessionParkedError, SessionStateLostError
from vllm_omni_session_state.accounting.append_tracking import RegionLog
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.manager.entry import Seat
from vllm_omni_session_state.accounting.regions import Region
from vllm_omni_session_state.manager.capacity import DeviceCapacity
from vllm_omni_session_state.manager.charging import charge_session
from vllm_omni_session_state.manager.table import Table


class Leases:
    """The uses of one manager's sessions.

    Args:
        table: The sessions.
        cascade: Brings them back.
        room: Makes room for new ones.
    """

    def __init__(self, table: Table, cascade: Offloader, room: DeviceCapacity) -> None:
        self._table = table
        self._cascade = cascade
        self._room = room

    def begin(self, key: str, lease: object | None, *, count: bool = True) -> Seat:
        """The seat of a session that is on the device; waits, restores and makes room as it must.

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
        coming: list[Seat] = []
        try:
            while True:
                seat = self._seat(key, lease, count=count, paid=paid, coming=coming if asked else None)
                if seat is None:
                    paid = self._room.make() or paid
                elif coming:
                    self._cascade.back(seat, lease, no_place=why)
                    return seat
                elif seat.parked is None:
                    return seat
                else:
                    why, asked = self._room.make_place(key), True
        except BaseException as error:
            self._cascade.stopped(error, coming)
            raise

    def _seat(
        self, key: str, lease: object | None, *, count: bool, paid: bool, coming: list[Seat] | None
    ) -> Seat | None:
        """The seat of a session, used from now on where it is on the device; ``None`` where there is no room.

        Args:
            key: The session's.
            lease: As for ``begin()``.
            count: As for ``begin()``.
            paid: As for ``Room.crowded()``.
            coming: Where to note that a parked one is on its way back from now on; ``None``: it stays.
        """
        table = self._table
        with table.lock:
            seat = table.arrived(key)
            if seat is None:
                seat = self._newcomer(key, paid=paid)
            if seat is None:
                return None
            seat.stale = False
            if seat.parked is None:
                table.touch(seat, lease=lease, count=count)
            elif lease is None:
                raise SessionParkedError(display_id(key))
            elif coming is not None:
                coming.append(seat)
                table.fetch(seat)
            return seat

    def _newcomer(self, key: str, *, paid: bool) -> Seat | None:
        """A new session's seat; ``None`` while there is no room for one. Lock held."""
        self.refuse_the_lost(key)
        return None if self._room.crowded(paid=paid) else self._table.open(key)

    def refuse_the_lost(self, key: str) -> None:
        """Raise where a new session would be one that was lost, and may not start over in silence.

        Raises:
            SessionStateLostError: If it was, and ``on_lost`` is ``"error"``.
        """
        reason = self._table.losses.reason(key)
        if reason is not None and self._room.eviction.on_lost == "error":
            raise SessionStateLostError(display_id(key), reason.value)

    def end(self, key: str, lease: object) -> bool:
        """End a use, if it has begun. Never raises: it runs after a forward's own body.

        Returns:
            Whether a drop was waiting for this.
        """
        seat = self._table.seats.get(key)
        if seat is None or lease not in seat.leases:
            return False
        held: tuple[tuple[Region, ...], RegionLog | None] = (), None
        try:
            held = charge_session(seat.session, self._table, self._cascade.declaration)
        finally:
            ended = finished(lambda: self._table.end_lease(seat, lease, *held))
        return ended

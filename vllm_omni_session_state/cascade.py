"""The tiers below the device, the upper one first: how one session goes down and how it comes back.

Decide under the table's lock, move outside of it, settle under it. The new place holds the data before the
old one lets go, and a move that fails leaves the session where it was. Where host memory has no room, what
lies there longest goes on to the disk; a full lowest tier refuses what comes, and drops nobody.

Several ranks decide alike: by the order of requests and by declared sizes, never by bytes of their own.
What is parked is parked on all of them, in the same tier. A rank that cannot move its part keeps the bytes
where they are, and says so; before a session is used again, all ranks tell each other whether they have it.
"""

from __future__ import annotations

import dataclasses
import logging
from time import perf_counter

from vllm_omni_session_state.errors import (
    CannotParkError,
    NotWritableError,
    SessionRestoreFailedError,
    SessionStateError,
    TierFaultError,
    TierFullError,
    without_frames,
)
from vllm_omni_session_state.events import LOGGER, say_once
from vllm_omni_session_state.exchange import Exchange, Ranks
from vllm_omni_session_state.footprint import footprint
from vllm_omni_session_state.ids import shown
from vllm_omni_session_state.lease import Seat
from vllm_omni_session_state.moves import Move, Moves
from vllm_omni_session_state.parking import (
    Filed,
    Level,
    Parked,
    Part,
    fetch,
    lent_by,
    park,
    park_in_place,
    park_on_disk,
    sink,
)
from vllm_omni_session_state.session import Declaration, host_fields
from vllm_omni_session_state.settlement import held_of
from vllm_omni_session_state.spill import Spiller
from vllm_omni_session_state.table import Table
from vllm_omni_session_state.tiers.disk import FIGURES, DiskTier
from vllm_omni_session_state.tiers.host import HostTier, Parcel


class Cascade:
    """The tiers of one manager, and the moves between them.

    Args:
        table: Whose sessions.
        host: Host memory, ``None``: none is parked there.
        disk: Files, ``None``: none is parked there.
        max_parked: Sessions that may be parked at once.
        exchange: How the ranks tell each other; ``None`` where there is one.

    Attributes:
        spiller: Moves older items of a session's lists to the disk, where there is one.
        moves: How long moves took, and how much moved.
        declaration: What the model declared of one session.
        engine_nbytes: What an engine keeps of one session in its pool at most, which moves with the rest.
        ranks: Of which this process is one.
    """

    def __init__(
        self,
        table: Table,
        *,
        host: HostTier | None,
        disk: DiskTier | None,
        max_parked: int,
        exchange: Exchange | None,
    ) -> None:
        self.host = host
        self.disk = disk
        self.spiller = None if disk is None else Spiller(disk)
        self.max_parked = max_parked
        self.declaration: Declaration | None = None
        self.engine_nbytes = 0
        self.ranks = Ranks(exchange)
        self._table = table
        self.moves = Moves()

    def __bool__(self) -> bool:
        """Whether there is a tier at all."""
        return self.host is not None or self.disk is not None

    def figures(self) -> dict[str, int]:
        """Bytes in each tier, of these what sessions have spilled, and what is and was read ahead."""
        return {
            "host_parked_nbytes": 0 if self.host is None else self.host.nbytes,
            **(dict.fromkeys(FIGURES, 0) if self.disk is None else self.disk.figures()),
            "spilled_nbytes": 0 if self.spiller is None else self.spiller.nbytes,
        }

    def begin(self, key: str) -> bool:
        """Begin to bring a session's file into host memory; whether there is one that is not on its way."""
        with self._table.lock:
            seat = self._table.seats.get(key)
            held = None if seat is None or seat.moving or seat.parked is None else seat.parked.held
        return isinstance(held, Filed) and self.disk is not None and self.disk.begin(held.ticket)

    @property
    def on_host(self) -> frozenset[str]:
        """Names of the values that the model keeps in host memory itself."""
        return host_fields(self.declaration)

    @property
    def declared_nbytes(self) -> int | None:
        """What one session counts on the device where ranks must agree; ``None`` where each is as it is."""
        if not self.ranks:
            return None
        return 0 if self.declaration is None else self.declaration.device_nbytes

    def down(self, seat: Seat, *, swap: Parked | None = None) -> Exception | None:
        """Park a session that was taken from the order; returns what refused it, or ``None``.

        Args:
            seat: The session's.
            swap: Where one is that comes up in its place right after. Its tier holds both meanwhile, beyond
                its budget by no more than that one.
        """
        table, session = self._table, seat.session
        refused: Exception | None = None
        parked: Parked | None = None
        began = perf_counter()
        try:
            parked = self._move(seat, swap)
            self._note_move("park", parked, began)
        except Exception as error:  # noqa: BLE001 - a copy can fail in any way, and nothing has changed then
            refused = without_frames(error)  # they hold what should have moved
            self._note(seat, refused)
            self.moves.note_failed(Move.PARK_DISK if self.host is None else Move.PARK_HOST)
            device = footprint(*session.contents(without=self.on_host | session.engine_names)).regions
        held = None if parked is None else held_of(seat, parked)
        with table.lock:
            seat.moving = False
            if parked is None or held is None:
                table.order.put_back(session.key, seat.place)
                table.accounts.idle(session.serial, device)
            else:
                table.shelve(seat, parked)
                held.charge(table, session.serial)
            table.moved.notify_all()
        return refused

    def relieve(self) -> None:
        """Move on from host memory what lies there longest, until the rest fits its budget. Never raises."""
        host = self.host
        try:
            if host is not None:
                host.trim(self._live_nbytes())
            while host is not None and self.disk is not None and self.declared_nbytes is None:
                if host.room(self._live_nbytes()) >= 0 or not self._sink_oldest():
                    return
        except Exception as error:  # noqa: BLE001 - it runs after a forward's own body
            kind = type(error).__name__
            say_once(
                logging.WARNING, ("relieve", kind), "host memory is over host_budget: %s: %s", kind, error
            )

    def leave_memory(self) -> None:
        """Move all that is parked in host memory on to the disk, as far as that goes. Never raises."""
        try:
            while self._sink_oldest():
                pass
        except Exception as error:  # noqa: BLE001 - the rest stays where it is
            LOGGER.warning("%d sessions stay in host memory: %s", len(self._table.hosted), error)

    def back(self, seat: Seat, *, no_place: str | None) -> None:
        """Restore a session that was fetched from the table, into a lease of the caller.

        Args:
            seat: The session's.
            no_place: Why it has no place in an engine's pool; then nothing is copied.

        Raises:
            SessionRestoreFailedError: It stays parked, whole; with several ranks on all of them.
        """
        table, session, parked = self._table, seat.session, seat.parked
        failed: Exception | None = None if no_place is None else SessionStateError(no_place)
        assert parked is not None, "only a parked session is brought back"
        part: Part | None = None
        began = perf_counter()
        try:
            if failed is None:
                part = fetch(parked, self.host, self.disk)
                session.put_back(part)
        except Exception as error:  # noqa: BLE001 - as above
            failed, part = without_frames(error), None
        failed = self.ranks.agree(session.key, parked.level.value, failed)
        if failed is None:
            self._note_move("restore", parked, began)
            self._discard(parked)
        else:
            self.moves.note_failed(Move(f"restore:{parked.level.value}"))
            if part is not None:
                session.let_go(part)  # another rank could not
        with table.lock:
            seat.moving = False
            if failed is None:
                table.unshelve(seat)
                seat.leases += 1
            else:
                table.shelve(seat, parked)
            table.moved.notify_all()
        if failed is not None:
            raise SessionRestoreFailedError(shown(session.key), failed) from failed

    def forget(self, seat: Seat) -> None:
        """A session has ended: what is parked of it goes."""
        if seat.parked is not None:
            self._discard(seat.parked)
            seat.parked = None

    def check(self) -> None:
        """Assert that the tiers are sound and hold what the table says. An expensive no-op."""
        with self._table.lock:
            parked = [seat.parked for seat in self._table.seats.values() if seat.parked is not None]
        for tier in (self.host, self.disk):
            if tier is not None:
                tier.check()
        if self.disk is not None:
            files = [each.held.ticket.nbytes for each in parked if isinstance(each.held, Filed)]
            assert self.disk.nbytes >= sum(files), "a parked session has no file"

    def _move(self, seat: Seat, swap: Parked | None) -> Parked:
        """Park a session in the upper tier, for which others go on, else in the lower one."""
        session, host, disk, table = seat.session, self.host, self.disk, self._table
        if session.staging:
            raise CannotParkError(shown(session.key), "it has a window in progress")
        if table.parked - (swap is not None) >= self.max_parked:
            raise CannotParkError(shown(session.key), f"{table.parked} sessions are parked (max_parked)")
        while host is not None:
            try:
                self._agree(Level.HOST, host, len(table.hosted), swap)
                live = self._live_nbytes() - lent_by(swap, Level.HOST)
                return self.ranks.moved_or_left(
                    lambda: park(session, host, on_host=self.on_host, live_nbytes=live),  # noqa: B023
                    lambda: park_in_place(session, Level.HOST, on_host=self.on_host),
                )
            except TierFullError as error:
                full = without_frames(error)
            if disk is None:
                raise full
            if full.wanted > host.budget or not self._sink_oldest(swap):
                break
        assert disk is not None, "there is a tier"
        self._agree(Level.DISK, disk, table.on_disk, swap)
        lent = lent_by(swap, Level.DISK)
        return self.ranks.moved_or_left(
            lambda: park_on_disk(session, disk, on_host=self.on_host, lent=lent),
            lambda: park_in_place(session, Level.DISK, on_host=self.on_host),
        )

    def _sink_oldest(self, swap: Parked | None = None) -> bool:
        """Move on to the disk what lies in host memory longest; whether there is one to ask.

        Raises:
            TierFullError: If the disk has no room; nothing has changed.
            TierFaultError: If it cannot be written; nothing has changed.
            MemoryError: If the machine has no room; nothing has changed.
        """
        table, disk, on_host = self._table, self.disk, self.on_host
        with table.lock:
            seats = (table.seats[key] for key in table.hosted)
            seat = next((seat for seat in seats if not seat.unwritable and seat.parked is not swap), None)
            if seat is None or disk is None:
                return False
            there = seat.parked
            assert there is not None, "it is parked"
            table.fetch(seat)
        session, here, refused = seat.session, there, None
        began = perf_counter()
        try:
            self._agree(Level.DISK, disk, table.on_disk, swap)
            lent = lent_by(swap, Level.DISK)
            here = self.ranks.moved_or_left(
                lambda: sink(session, there, disk, on_host=on_host, lent=lent),
                lambda: dataclasses.replace(there, level=Level.DISK),
            )
            self._note_move("sink", here, began)
        except Exception as error:  # noqa: BLE001 - as above
            refused = without_frames(error)
        held = held_of(seat, here)
        with table.lock:
            seat.moving = False
            table.shelve(seat, here)
            held.charge(table, session.serial)
            table.moved.notify_all()
        if here.held is not there.held:
            self._discard(there)
        if refused is not None:
            self._note(seat, refused)
            self.moves.note_failed(Move.SINK)
            if not isinstance(refused, NotWritableError):
                raise refused
        return True

    def _live_nbytes(self) -> int:
        with self._table.lock:
            return self._table.accounts.host_nbytes()

    def _agree(self, level: Level, tier: HostTier | DiskTier, count: int, swap: Parked | None) -> None:
        """Refuse by declared sizes what every rank would refuse."""
        count -= swap is not None and swap.level is level
        declared = self.declared_nbytes
        if declared is None:
            return
        wanted = tier.charge(declared + self.engine_nbytes)
        room = max(0, tier.budget - count * wanted)
        if wanted > room:
            raise TierFullError(level.value, wanted=wanted, room=room, setting=_SETTINGS[level])

    def _note_move(self, how: str, parked: Parked, began: float) -> None:
        move = Move(f"{how}:{parked.level.value}")
        self.moves.note(move, seconds=perf_counter() - began, nbytes=parked.nbytes)

    def _note(self, seat: Seat, refused: Exception) -> None:
        """Say of a refusal what an operator must know, once."""
        if isinstance(refused, NotWritableError):
            seat.unwritable = True
            say_once(
                logging.WARNING,
                ("unwritable", refused.path, refused.kind),
                "sessions of this model are not parked on the disk: %s",
                refused,
            )
        elif isinstance(refused, TierFaultError):
            say_once(logging.WARNING, ("tier", refused.purpose, refused.why), "%s", refused)

    def _discard(self, parked: Parked) -> None:
        """What was parked is elsewhere now, or has ended."""
        if isinstance(parked.held, Parcel) and self.host is not None:
            self.host.drop(parked.held)
        elif isinstance(parked.held, Filed) and self.disk is not None:
            self.disk.drop(parked.held.ticket)


_SETTINGS = {Level.HOST: "host_budget", Level.DISK: "disk.budget"}

"""The tiers below the device, the upper one first: how one session goes down and how it comes back.

Decide under the table's lock, move outside of it, settle under it. The new place holds the data before the
old one lets go, and a move that fails leaves the session where it was. Where host memory has no room, what
lies there longest goes on to the disk; a full lowest tier refuses what comes, and drops nobody.

Several ranks decide alike: by the order of requests and by declared sizes, never by bytes of their own.
What is parked is parked on all of them, in the same tier. A rank that cannot move its part keeps the bytes
where they are, and says so; before a session is used again, all ranks tell each other whether they have it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TypeVar

from vllm_omni_session_state.base.errors import (
    CannotParkError,
    NotWritableError,
    SessionRestoreFailedError,
    SessionStateError,
    TierFaultError,
    TierFullError,
    without_frames,
)
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.base.log import LOGGER, log_once
from vllm_omni_session_state.manager.charging import Charge, charge_of, measure
from vllm_omni_session_state.manager.entry import Entry, Lease, Placement
from vllm_omni_session_state.manager.move_stats import Move
from vllm_omni_session_state.manager.tiers import Tiers
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.host_tier import HostAllocation
from vllm_omni_session_state.offload.parking import (
    DiskLocation,
    Level,
    Parked,
    Part,
    count_on_disk,
    demote,
    overdraft_of,
    park,
    park_in_place,
    park_on_disk,
    restore,
)

T = TypeVar("T")


def finished(act: Callable[[Charge | None], T], charge: Charge | None = None) -> T:
    """Do a short thing to its end, also where the process is stopped in the middle of it.

    A signal's exception comes at any line, and once. Then the thing is done again, and the exception goes on.

    Args:
        act: The thing; of which a second time changes nothing that the first has done.
        charge: What it charges the first time.
    """
    try:
        return act(charge)
    except BaseException as error:
        if not isinstance(error, Exception):
            act(None)
        raise


class Offloader(Tiers):
    """The tiers of one manager, and the moves between them; arguments as for ``Tiers``."""

    def begin(self, key: str) -> bool:
        """Begin to bring a session's file into host memory; whether there is one that is not on its way."""
        with self._table.lock:
            entry = self._table.entries.get(key)
            gone_to = entry.gone_to if entry is not None and entry.placement is Placement.ON_DISK else None
            held = None if gone_to is None else gone_to.held
        return isinstance(held, DiskLocation) and self.disk is not None and self.disk.begin(held.ticket)

    def offload(self, entry: Entry, *, swap: Parked | None = None) -> Exception | None:
        """Park a session that was taken from the order; returns what refused it, or ``None``.

        Args:
            entry: The session's.
            swap: Where one is that comes up in its place right after. Its tier holds both meanwhile, beyond
                its budget by no more than that one.
        """
        refused: Exception | None = None
        began = perf_counter()
        try:
            parked = self._move(entry, swap)
            self._note_move("park", parked, began)
        except Exception as error:  # noqa: BLE001 - a copy can fail in any way, and nothing has changed then
            refused = without_frames(error)  # they hold what should have moved
            self._note(entry, refused)
            self.moves.note_failed(Move.PARK_DISK if self.host is None else Move.PARK_HOST)
        finally:
            self.arrive(entry)
        return None if entry.session.parked else refused

    def arrive(self, entry: Entry) -> None:
        """A session is on its way no longer: it counts from now on where it is, however its move ended."""
        charge = None
        try:
            charge = self._charge(entry)
        finally:
            finished(functools.partial(self._arrive, entry), charge)
        self._table.tell()

    def stopped(self, error: BaseException, moving: Iterable[Entry]) -> None:
        """Where the process is stopped, settle what was on its way by the hand of the one who is stopped."""
        for entry in () if isinstance(error, Exception) else moving:
            if entry.moving:
                self.arrive(entry)

    def _charge(self, entry: Entry) -> Charge:
        session, parked = entry.session, entry.gone_to
        return measure(session, self.declaration) if parked is None else charge_of(session, parked)

    def _arrive(self, entry: Entry, charge: Charge | None) -> None:
        parked, to = entry.gone_to, Placement.IDLE
        if parked is not None:
            to = Placement.ON_DISK if parked.level is Level.DISK else Placement.ON_HOST
        with self._table.lock:
            self._table.transition(entry, to, charge)

    def enforce_host_budget(self) -> None:
        """Move on from host memory what lies there longest, until the rest fits its budget. Never raises."""
        host = self.host
        try:
            if host is not None:
                host.trim(self._live_nbytes())
            while host is not None and self.disk is not None and self.declared_nbytes is None:
                if host.room(self._live_nbytes()) >= 0 or not self._demote_oldest():
                    return
        except Exception as error:  # noqa: BLE001 - it runs after a forward's own body
            kind = type(error).__name__
            log_once(
                logging.WARNING,
                ("enforce_host_budget", kind),
                "host memory is over host_budget: %s: %s",
                kind,
                error,
            )

    def flush_to_disk(self) -> None:
        """Move all that is parked in host memory on to the disk, as far as that goes. Never raises."""
        try:
            while self._demote_oldest():
                pass
        except Exception as error:  # noqa: BLE001 - the rest stays where it is
            LOGGER.warning("%d sessions stay in host memory: %s", len(self._table.host_lru), error)

    def restore(self, entry: Entry, lease: Lease, *, no_place: str | None) -> None:
        """Restore a session that was fetched from the table, into a lease of the caller.

        Args:
            entry: The session's.
            lease: The caller's.
            no_place: Why it has no place in an engine's pool; then nothing is copied.

        Raises:
            SessionRestoreFailedError: It stays parked, whole; with several ranks on all of them.
        """
        session, parked = entry.session, entry.gone_to
        failed: Exception | None = None if no_place is None else SessionStateError(no_place)
        assert parked is not None, "only a parked session is brought back"
        part: Part | None = None
        back = False
        began = perf_counter()
        try:
            try:
                if failed is None:
                    part = restore(parked, self.host, self.disk)
                    session.put_back(part)
            except Exception as error:  # noqa: BLE001 - as above
                failed = without_frames(error)
            failed = self.ranks.agree(session.key, parked.level.value, failed)
            if failed is None:
                back = True
                self._note_move("restore", parked, began)
            else:
                self.moves.note_failed(Move(f"restore:{parked.level.value}"))
        finally:
            if not back and part is not None and not session.parked:
                session.let_go(part, parked)  # another rank could not, or the process is stopped
            part = None
            if back:
                self._discard(parked)
                finished(functools.partial(self._lend, entry, lease))
            else:
                self.arrive(entry)
        if failed is not None:
            raise SessionRestoreFailedError(display_id(session.key), failed) from failed

    def _lend(self, entry: Entry, lease: Lease, _: Charge | None) -> None:
        with self._table.lock:
            self._table.lend(entry, lease)

    def forget(self, entry: Entry) -> None:
        """A session has ended: what is parked of it goes."""
        if (parked := entry.gone_to) is not None:
            self._discard(parked)

    def check(self) -> None:
        """Assert that the tiers are sound and hold what the table says. An expensive no-op."""
        with self._table.lock:
            there = [entry.gone_to for entry in self._table.entries.values()]
        for tier in (self.host, self.disk):
            if tier is not None:
                tier.check()
        if self.disk is not None:
            held = [each.held for each in there if each is not None]
            files = [each.ticket.nbytes for each in held if isinstance(each, DiskLocation)]
            assert self.disk.nbytes >= sum(files), "a parked session has no file"

    def _move(self, entry: Entry, swap: Parked | None) -> Parked:
        """Park a session in the upper tier, for which others go on, else in the lower one."""
        session, host, disk, table = entry.session, self.host, self.disk, self._table
        full: TierFullError | None = None
        if session.staging:
            raise CannotParkError(display_id(session.key), "it has a window in progress")
        if table.parked - (swap is not None) >= self.max_parked:
            raise CannotParkError(display_id(session.key), f"{table.parked} sessions are parked (max_parked)")
        while host is not None:
            try:
                self._agree(Level.HOST, host, swap)
                live = self._live_nbytes() - overdraft_of(swap, Level.HOST)
                return self.ranks.moved_or_left(
                    lambda: park(session, host, on_host=self.on_host, live_nbytes=live),  # noqa: B023
                    lambda: park_in_place(session, Level.HOST, on_host=self.on_host),
                )
            except TierFullError as error:
                full = without_frames(error)
            if disk is None:
                raise full
            try:
                if full.wanted > host.budget or not self._demote_oldest(swap):
                    break
            except Exception as error:
                raise error from full
        assert disk is not None, "there is a tier"
        try:
            self._agree(Level.DISK, disk, swap)
            overdraft = overdraft_of(swap, Level.DISK)
            return self.ranks.moved_or_left(
                lambda: park_on_disk(session, disk, on_host=self.on_host, overdraft=overdraft),
                lambda: park_in_place(session, Level.DISK, on_host=self.on_host),
            )
        except TierFullError as error:
            raise error from full

    def _demote_oldest(self, swap: Parked | None = None) -> bool:
        """Move on to the disk what lies in host memory longest; whether there is one to ask.

        Raises:
            TierFullError: If the disk has no room; nothing has changed.
            TierFaultError: If it cannot be written; nothing has changed.
            MemoryError: If the machine has no room; nothing has changed.
        """
        table = self._table
        going: list[Entry] = []
        try:
            with table.lock:
                entries = (table.entries[key] for key in table.host_lru)
                entry = next(
                    (entry for entry in entries if not entry.unwritable and entry.gone_to is not swap), None
                )
                if entry is None or self.disk is None:
                    return False
                going.append(entry)
                table.transition(entry, entry.placement.away)
            refused = self._sink(entry, self.disk, swap)
        except BaseException as error:
            self.stopped(error, going)
            raise
        if refused is not None and not isinstance(refused, NotWritableError):
            raise refused
        return True

    def _sink(self, entry: Entry, disk: DiskTier, swap: Parked | None) -> Exception | None:
        """Move a session that was fetched from host memory on to the disk; what refused it, or ``None``."""
        session, there, on_host = entry.session, entry.gone_to, self.on_host
        assert there is not None, "it is parked"
        refused: Exception | None = None
        began = perf_counter()
        try:
            self._agree(Level.DISK, disk, swap)
            overdraft = overdraft_of(swap, Level.DISK)
            moved = self.ranks.moved_or_left(
                lambda: demote(session, there, disk, on_host=on_host, overdraft=overdraft),
                lambda: count_on_disk(session, there),
            )
            self._note_move("sink", moved, began)
        except Exception as error:  # noqa: BLE001 - as above
            refused = without_frames(error)
            self._note(entry, refused)
            self.moves.note_failed(Move.SINK)
        finally:
            self.arrive(entry)
        here = session.gone_to
        if isinstance(here, Parked) and here.held is not there.held:
            self._discard(there)
        return refused

    def _note_move(self, how: str, parked: Parked, began: float) -> None:
        move = Move(f"{how}:{parked.level.value}")
        self.moves.note(move, seconds=perf_counter() - began, nbytes=parked.nbytes)

    def _note(self, entry: Entry, refused: Exception) -> None:
        """Say of a refusal what an operator must know, once."""
        if isinstance(refused, NotWritableError):
            entry.unwritable = True
            log_once(
                logging.WARNING,
                ("unwritable", refused.path, refused.kind),
                "sessions of this model are not parked on the disk: %s",
                refused,
            )
        elif isinstance(refused, TierFaultError):
            log_once(logging.WARNING, ("tier", refused.purpose, refused.why), "%s", refused)

    def _discard(self, parked: Parked) -> None:
        """What was parked is elsewhere now, or has ended."""
        if isinstance(parked.held, HostAllocation) and self.host is not None:
            self.host.drop(parked.held)
        elif isinstance(parked.held, DiskLocation) and self.disk is not None:
            self.disk.drop(parked.held.ticket)

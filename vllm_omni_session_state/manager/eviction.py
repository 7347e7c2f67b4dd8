"""Who is lost where nobody can leave the device unharmed: who was not used for longest, wherever it is.

As many of the oldest as make the room and no more, or none where that would not do; so nobody is lost who
was used later than one that stays. Where nobody may be lost, only those go that the server's clock has
marked stale, again the oldest first. Several ranks choose alike: marks come to all of them between two
steps, and what others give back counts as declared.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from vllm_omni_session_state.base.errors import NoRoomError
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.base.log import LOGGER, log_rarely
from vllm_omni_session_state.manager.charging import charge_session
from vllm_omni_session_state.manager.entry import Entry
from vllm_omni_session_state.manager.losses import Reason
from vllm_omni_session_state.manager.offloader import Offloader
from vllm_omni_session_state.manager.table import Table
from vllm_omni_session_state.offload.parking import Parked

Met = Callable[[Sequence[Entry]], bool]
"""Whether there is room once these sessions are on the device no more. Called with the table's lock held."""


class Refused(NamedTuple):
    """A session that could not leave the device, and why."""

    entry: Entry
    why: Exception


class EvictionPolicy:
    """What is lost of one manager.

    Args:
        table: Whose sessions.
        offloader: Where they are.
        on_lost: ``"error"``: nobody is lost to make room; with a disk tier nobody is either.
        idle_drop_s: Seconds after which the server marks a session stale, 0: never.

    Attributes:
        clock: Whether a server has told that it marks sessions.
    """

    def __init__(
        self, table: Table, offloader: Offloader, *, on_lost: Literal["warn", "error"], idle_drop_s: float
    ) -> None:
        self.on_lost = on_lost
        self.clock = False
        self._idle_drop_s = idle_drop_s
        self._table = table
        self._offloader = offloader

    @property
    def loses_nobody(self) -> bool:
        """Whether a new session is refused rather than another one lost that is not stale."""
        return self.on_lost == "error" or self._offloader.disk is not None

    def mark(self, key: str) -> bool:
        """Mark a session stale, unless somebody uses it; the next use unmarks it. Takes the lock."""
        with self._table.lock:
            entry = self._table.wait_until_placed(key)
            if entry is None or not entry.resting:
                return False
            entry.stale = True
            return True

    def make(
        self,
        met: Met,
        park: Callable[[Entry], Exception | None],
        refused: Sequence[Refused],
        *,
        why: str,
        but: str | None = None,
        swap: Parked | None = None,
    ) -> bool:
        """Lose sessions until there is room.

        Args:
            met: Whether there is.
            park: Parks one that is still idle; what refused it.
            refused: Those that could not be parked, longest unused first.
            why: What is full, for the log.
            but: The key of a session that is not lost.
            swap: As for ``Offloader.offload()``.

        Returns:
            Whether somebody was lost.
        """
        waiting = list(refused)
        lost = 0
        while True:
            with self._table.lock:
                there = self._table.resting(but=but, stale=self.loses_nobody)
                if met(()) or not there or not (lost or self._would_do(met, there, waiting, swap)):
                    return lost > 0
                entry = there[0]
                reason = self._reason(entry)
                self._table.lose(entry, reason)
            lost += 1
            self._end(entry)
            LOGGER.warning(
                "session %s is lost (%s): room was wanted and %s; its rollout starts over at its next step",
                display_id(entry.session.key),
                reason.value,
                why,
            )
            waiting = self._parked_now(met, park, waiting, swap)

    def refusal(self, why: str) -> NoRoomError:
        """The error for a new session, and the same once a minute at WARNING.

        Args:
            why: What is full.
        """
        with self._table.lock:
            parked = [entry.used_at for entry in self._table.entries.values() if entry.parked]
        resting = ""
        if parked:
            since = _age(time.monotonic() - min(parked))
            resting = f"{len(parked)} sessions lie parked, the longest unused for {since}; {self._remedy()}"
        error = NoRoomError(why, resting=resting)
        log_rarely(logging.WARNING, ("refused",), "%s", error)
        return error

    def _remedy(self) -> str:
        if not self._idle_drop_s:
            return "idle_drop_s would let those go that nobody has stepped for so long"
        if not self.clock:
            return (
                f"idle_drop_s={self._idle_drop_s:g} lets none of them go: no API server tells the time here"
            )
        return f"idle_drop_s={self._idle_drop_s:g} lets none of them go yet"

    def _reason(self, entry: Entry) -> Reason:
        if entry.stale:
            return Reason.STALE
        return Reason.TIER_FULL if self._offloader else Reason.COUNT

    def _would_do(
        self, met: Met, there: Sequence[Entry], refused: Sequence[Refused], swap: Parked | None
    ) -> bool:
        """Whether there would be room if all of these were lost, and those parked that then can be."""
        takes = functools.partial(self._offloader.takes, gone=there, swap=swap)
        parkable = [
            entry for entry, why in refused if entry.idle and entry not in there and takes(entry, why)
        ]
        return met([*there, *parkable])

    def _parked_now(
        self,
        met: Met,
        park: Callable[[Entry], Exception | None],
        waiting: Sequence[Refused],
        swap: Parked | None,
    ) -> list[Refused]:
        """Park those for whom there is room now, until enough is there; those that wait still."""
        left = []
        for entry, why in waiting:
            with self._table.lock:
                there = self._table.entries.get(entry.session.key) is entry and entry.idle
                tries = there and not met(()) and self._offloader.takes(entry, why, swap=swap)
            refused = park(entry) if tries else why
            if there and refused is not None:
                left.append(Refused(entry, refused))
        return left

    def _end(self, entry: Entry) -> None:
        """Free what a lost session has: what is parked of it, and its place in an engine's pool."""
        session = entry.session
        if entry.gone_to is not None:
            self._offloader.forget(entry)
            session.reset()
            return
        for name in session.engine_names:
            session.objects[name].evict()
        charge_session(
            session, self._table, self._offloader.declaration
        )  # what it is charged for is less now


def _age(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return "less than two minutes"

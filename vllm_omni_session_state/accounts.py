"""Whose bytes are where: the ledgers of one manager, settled as sessions change and read at no cost.

Four ledgers stand apart, because their bytes answer different questions: what the table's sessions hold,
what sessions hold that left the table while somebody still uses them, what is staged, and what the host
keeps of a session outside of it. A session is an owner by its serial number, so that one that left the
table and a newer one under its key are two.

Not locked: the manager holds its lock around every call. The one exception is the end of a detached
session, which the garbage collector may announce at any time in any thread: its serial number waits in
a queue until the next call.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable

from vllm_omni_session_state.ledger import Ledger
from vllm_omni_session_state.regions import Region


class Accounts:
    """The charges of a manager's sessions."""

    __slots__ = ("_detached", "_ended", "_outside", "_staged", "_table")

    def __init__(self) -> None:
        self._table = Ledger()
        self._detached = Ledger()
        self._staged = Ledger()
        self._outside = Ledger()
        self._ended: deque[int] = deque()

    def open(self, owner: int) -> None:
        """A session of the table begins, holding nothing."""
        self._table.charge(owner, ())
        self._staged.charge(owner, ())

    def settle(self, owner: int, *, held: Iterable[Region], staged: Iterable[Region]) -> None:
        """Replace a session's charge by what it holds now; one that has ended is charged no more."""
        self._close_ended()
        for ledger in (self._table, self._detached):
            if owner in ledger:
                ledger.charge(owner, held)
                self._staged.charge(owner, staged)

    def detach(self, owner: int, session: object) -> None:
        """A session leaves the table; its charge lives on for as long as somebody holds it."""
        self._close_ended()
        self._detached.charge(owner, self._table.regions(owner))
        self._table.release(owner)
        weakref.finalize(session, self._ended.append, owner).atexit = False

    def close(self, owner: int) -> dict[str, int]:
        """A session of the table ends; returns the bytes by device that no other one reaches."""
        self._staged.release(owner)
        return self._table.release(owner)

    def charge_outside(self, name: str, regions: Iterable[Region]) -> None:
        """Say what the host keeps under ``name`` beside the sessions; no regions: nothing any more."""
        self._outside.charge(name, regions)

    def held_by_device(self) -> dict[str, int]:
        """Bytes of the table's sessions by device, each region once."""
        return self._table.nbytes_by_device()

    def figures(self) -> dict[str, int]:
        """All totals in bytes, under the keys that ``SessionStateManager.stats()`` has."""
        self._close_ended()
        by_device = self.held_by_device()
        return {
            "total_nbytes": sum(by_device.values()),
            **{f"nbytes:{device}": count for device, count in sorted(by_device.items())},
            "shared_nbytes": sum(self._table.shared_nbytes_by_device().values()),
            "staged_nbytes": sum(self._staged.nbytes_by_device().values()),
            "detached_sessions": len(self._detached.owners()),
            "detached_nbytes": sum(self._detached.nbytes_by_device().values()),
            "outside": sum(self._outside.nbytes_by_device().values()),
        }

    def check(self, owners: Iterable[int]) -> None:
        """Assert that every ledger is sound and that the table's is of exactly these owners."""
        self._close_ended()
        for ledger in (self._table, self._detached, self._staged, self._outside):
            ledger.check()
        assert set(self._table.owners()) == set(owners), (
            "the ledger and the table speak of different sessions"
        )
        everybody = {*self._table.owners(), *self._detached.owners()}
        assert set(self._staged.owners()) == everybody, "staged bytes of nobody"

    def _close_ended(self) -> None:
        while self._ended:
            owner = self._ended.popleft()
            self._detached.release(owner)
            self._staged.release(owner)

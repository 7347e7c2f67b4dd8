"""What has changed in a listing, for who keeps a copy of it elsewhere.

Nothing is walked: a row has what its session is charged for. While nobody watches, nothing is noted.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_omni_session_state.base.ids import digest, display_id
from vllm_omni_session_state.manager.entry import Entry
from vllm_omni_session_state.manager.rows import Row
from vllm_omni_session_state.manager.table import Table
from vllm_omni_session_state.offload.parking import DiskLocation


class Changes:
    """The one watcher of a table.

    Args:
        table: Whose sessions.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._over: Callable[[], None] | None = None

    def begin(self, notice: Callable[[bool], None], over: Callable[[], None]) -> None:
        """Have a watcher told after each use, end and move, outside of the lock. All rows are new to it.

        Args:
            notice: Gets whether a use has ended, which all ranks of a model see alike. It must not raise.
            over: Called when the manager's process ends its work. It must not raise.
        """
        with self._table.lock:
            self._table.changed = set(self._table.entries)
        self._table.notice, self._over = notice, over

    def end(self) -> None:
        """The watcher is told nothing any more."""
        self._table.notice = self._over = None
        with self._table.lock:
            self._table.changed = None

    def close(self) -> None:
        """The process ends its work: the watcher is told that, and nothing any more."""
        over = self._over
        self.end()
        if over is not None:
            over()

    def rows(self) -> dict[str, Row]:
        """All rows, by key; whoever watches has seen none of them by that."""
        with self._table.lock:
            return {key: self._row(key, entry) for key, entry in self._table.entries.items()}

    def changed_rows(self) -> dict[str, Row | None]:
        """The rows that changed since this was last asked, by key; ``None`` for a session that has left."""
        table = self._table
        with table.lock:
            changed, table.changed = table.changed or (), set()
            entries = ((key, table.entries.get(key)) for key in changed)
            return {key: None if entry is None else self._row(key, entry) for key, entry in entries}

    def _row(self, key: str, entry: Entry) -> Row:
        nbytes = self._table.accounts.held_by(entry.session.serial)
        gone_to = entry.gone_to
        if gone_to is not None and isinstance(gone_to.held, DiskLocation):
            nbytes.update(gone_to.nbytes_by_device)
        return Row(display_id(key), digest(key), entry.tier, entry.used, entry.turn, nbytes)

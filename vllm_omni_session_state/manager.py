"""The heart: which sessions there are, and what each of them holds.

Synchronization: one lock guards the table, the order and the accounts. Under it only look-ups and choices
are made; nothing is copied, freed, walked or logged there.

Ownership: the table owns a session. Whoever got one from here may hold it longer: the count cap takes a
session out of the table only, and its holder keeps what it holds. ``drop_session()`` ends a session and
frees all of it, whoever still holds it.

Accounting: a session's charge is settled when its use ends, never by a reader. Figures are those of the
last settlement; reading them walks nothing and costs the same for one session and for a thousand.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_omni_session_state.accounts import Accounts
from vllm_omni_session_state.config import DEFAULT_MAX_SESSIONS, ENV_MAX_SESSIONS
from vllm_omni_session_state.events import LOGGER, say_once
from vllm_omni_session_state.footprint import footprint
from vllm_omni_session_state.ids import session_key, shown
from vllm_omni_session_state.listing import Entry, entry_of
from vllm_omni_session_state.order import RecencyOrder
from vllm_omni_session_state.session import Declaration, SessionState


class SessionStateManager:
    """Owns the sessions of one model in one worker process.

    Args:
        max_sessions: Sessions kept in the table, at least 1; beyond it the least recently used leaves.
        declaration: What the model declared of one session; a session that is found to hold more is said
            once at WARNING.

    Raises:
        ValueError: For a ``max_sessions`` that is not a positive whole number.
    """

    def __init__(
        self, *, max_sessions: int = DEFAULT_MAX_SESSIONS, declaration: Declaration | None = None
    ) -> None:
        if type(max_sessions) is not int or max_sessions < 1:
            raise ValueError(
                f"max_sessions={max_sessions!r} keeps no session; set {ENV_MAX_SESSIONS} to 1 or more"
            )
        self.max_sessions = max_sessions
        self.declaration = declaration
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._lock = threading.Lock()
        self._table: dict[str, SessionState] = {}
        self._order = RecencyOrder()
        self._accounts = Accounts()

    @contextmanager
    def use(self, session_id: str | None) -> Iterator[SessionState]:
        """The session of that id for the span of a ``with``; its charge is settled at the end."""
        session = self.get_or_create_session(session_id)
        try:
            yield session
        finally:
            self.settle(session)

    def get_or_create_session(self, session_id: str | None) -> SessionState:
        """The session of that id, made the most recently used one; a new empty one where there is none.

        A new session beyond ``max_sessions`` takes the least recently used ones out of the table, counted
        as evictions and said at WARNING, since those clients' rollouts start over. Whoever changes the
        session calls ``settle()`` when done, or uses ``use()``.

        Raises:
            TypeError: For an id that is no string.
        """
        key = session_key(session_id)
        evicted: list[SessionState] = []
        with self._lock:
            session = self._table.get(key)
            if session is not None:
                self.hits += 1
            else:
                self.misses += 1
                while len(self._table) >= self.max_sessions:
                    evicted.append(self._take_oldest())
                self.evictions += len(evicted)
                session = self._table[key] = SessionState(key)
                self._accounts.open(session.serial)
            self._order.use(key)
        for lost in evicted:
            LOGGER.warning(
                "session %s is lost (count): %d are kept and a new one came; its rollout starts over at its "
                "next step. Raise %s to keep more",
                shown(lost.key),
                self.max_sessions,
                ENV_MAX_SESSIONS,
            )
        return session

    def _take_oldest(self) -> SessionState:
        """Take the least recently used session out of the table; under the lock."""
        key = self._order.oldest()
        assert key is not None, "a full table has an oldest session"
        self._order.remove(key)
        session = self._table.pop(key)
        self._accounts.detach(session.serial, session)
        return session

    def settle(self, session: SessionState) -> None:
        """Charge a session for what it holds now. Never raises: it runs after a forward's own body."""
        declared = self.declaration
        on_host = frozenset() if declared is None else declared.host_fields
        device = footprint(*session.contents(without=on_host))
        host = footprint(*session.contents(only=on_host)) if on_host else footprint()
        staged = session.staged_footprint()
        with self._lock:
            self._accounts.settle(session.serial, held=device.regions + host.regions, staged=staged.regions)
        if declared is not None and device.nbytes > declared.device_nbytes:
            say_once(
                logging.WARNING,
                ("declared",),
                "session %s holds %d bytes on the device and its model declared %d: the host reserves too "
                "little, and a full pool can run out of memory",
                shown(session.key),
                device.nbytes,
                declared.device_nbytes,
            )

    def charge_outside(self, name: str, *values: object) -> None:
        """Say what the host keeps of sessions outside of them, under a name of its own."""
        regions = footprint(*values).regions
        with self._lock:
            self._accounts.charge_outside(name, regions)

    def drop_session(self, session_id: str | None) -> bool:
        """End a session and free all it holds, also for whoever still holds it.

        Returns:
            Whether there was such a session.

        Raises:
            TypeError: For an id that is no string.
        """
        key = session_key(session_id)
        with self._lock:
            session = self._table.pop(key, None)
            if session is None:
                return False
            self._order.remove(key)
            self._accounts.close(session.serial)
        session.reset()
        return True

    def drop_all(self) -> int:
        """End every session; returns how many there were."""
        with self._lock:
            keys = list(self._table)
        return sum(self.drop_session(key) for key in keys)

    def peek(self, session_id: str | None) -> SessionState | None:
        """The session of that id or ``None``; looking does not make it recently used."""
        key = session_key(session_id)
        with self._lock:
            return self._table.get(key)

    def listing(self) -> tuple[Entry, ...]:
        """Every session with every value, least recently used first; listing refreshes nobody."""
        with self._lock:
            sessions = [self._table[key] for key in self._order]
        return tuple(entry_of(session, self.declaration) for session in sessions)

    def stats(self) -> dict[str, int]:
        """Counters, and bytes as of each session's last settlement.

        Returns:
            ``sessions``, ``max_sessions``, ``hits``, ``misses``, ``evictions``; ``total_nbytes`` and one
            ``nbytes:<device>`` per device, over the table's sessions, each region once. Apart from these:
            ``shared_nbytes`` (reached by two or more of them), ``staged_nbytes``, ``detached_sessions`` and
            ``detached_nbytes`` (left the table, still held by somebody), ``outside`` (what the host keeps of
            sessions outside of them).
        """
        with self._lock:
            counters = {
                "sessions": len(self._table),
                "max_sessions": self.max_sessions,
                "hits": self.hits,
                "misses": self.misses,
                "evictions": self.evictions,
            }
            return counters | self._accounts.figures()

    def nbytes_by_device(self) -> dict[str, int]:
        """Bytes of the table's sessions by device, each region once, as of their last settlement."""
        with self._lock:
            return self._accounts.held_by_device()

    def __len__(self) -> int:
        with self._lock:
            return len(self._table)

    def __bool__(self) -> bool:
        """True also without sessions: an empty manager is a manager."""
        return True

    def __contains__(self, session_id: str | None) -> bool:
        key = session_key(session_id)
        with self._lock:
            return key in self._table

    def check(self) -> None:
        """Assert that table, order and accounts speak of the same sessions. An expensive no-op."""
        with self._lock:
            assert set(self._table) == set(self._order), "table and order differ"
            assert len(self._order) == len(self._table) <= self.max_sessions, "the cap is not held"
            assert all(key == session.key for key, session in self._table.items()), "a session is misfiled"
            self._accounts.check(session.serial for session in self._table.values())

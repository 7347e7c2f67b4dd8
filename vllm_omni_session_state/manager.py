"""The heart: which sessions there are, and what each of them holds.

Synchronization: one lock guards the table and the order. Under it only look-ups and choices are made;
nothing is copied, freed, walked or logged there.

Ownership: the table owns a session. Whoever got one from here may hold it longer: the count cap takes a
session out of the table only, and its holder keeps what it holds. ``drop_session()`` ends a session and
frees all of it, whoever still holds it.
"""

from __future__ import annotations

import threading

from vllm_omni_session_state.config import DEFAULT_MAX_SESSIONS, ENV_MAX_SESSIONS
from vllm_omni_session_state.events import LOGGER
from vllm_omni_session_state.footprint import Footprint, footprint
from vllm_omni_session_state.ids import find, session_key, shown
from vllm_omni_session_state.listing import Entry, entry_of
from vllm_omni_session_state.order import RecencyOrder
from vllm_omni_session_state.session import SessionState


class SessionStateManager:
    """Owns the sessions of one model in one worker process.

    Args:
        max_sessions: Sessions kept in the table, at least 1; beyond it the least recently used leaves.

    Raises:
        ValueError: For a ``max_sessions`` that is not a positive whole number.
    """

    def __init__(self, *, max_sessions: int = DEFAULT_MAX_SESSIONS) -> None:
        if type(max_sessions) is not int or max_sessions < 1:
            raise ValueError(
                f"max_sessions={max_sessions!r} keeps no session; set {ENV_MAX_SESSIONS} to 1 or more"
            )
        self.max_sessions = max_sessions
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._lock = threading.Lock()
        self._table: dict[str, SessionState] = {}
        self._order = RecencyOrder()

    def get_or_create_session(self, session_id: str | None) -> SessionState:
        """The session of that id, made the most recently used one; a new empty one where there is none.

        A new session beyond ``max_sessions`` takes the least recently used ones out of the table, counted
        as evictions and said at WARNING, since those clients' rollouts start over.

        Raises:
            TypeError: For an id that is no string.
        """
        key = session_key(session_id)
        evicted: list[str] = []
        with self._lock:
            session = self._table.get(key)
            if session is not None:
                self.hits += 1
            else:
                self.misses += 1
                while len(self._table) >= self.max_sessions:
                    oldest = self._order.oldest()
                    assert oldest is not None, "a full table has an oldest session"
                    self._order.remove(oldest)
                    del self._table[oldest]
                    evicted.append(oldest)
                self.evictions += len(evicted)
                session = self._table[key] = SessionState(key)
            self._order.use(key)
        for lost in evicted:
            LOGGER.warning(
                "session %s is lost (count): %d are kept and a new one came; its rollout starts over at its "
                "next step. Raise %s to keep more",
                shown(lost),
                self.max_sessions,
                ENV_MAX_SESSIONS,
            )
        return session

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
        session.reset()
        return True

    def drop_all(self) -> int:
        """End every session; returns how many there were."""
        with self._lock:
            sessions = list(self._table.values())
            for session in sessions:
                self._order.remove(session.key)
            self._table.clear()
        for session in sessions:
            session.reset()
        return len(sessions)

    def peek(self, session_id: str | None) -> SessionState | None:
        """The session of that id or ``None``; looking does not make it recently used."""
        key = session_key(session_id)
        with self._lock:
            return self._table.get(key)

    def find(self, name: str | None) -> str | None:
        """The key of the session that ``name`` means, an id or one as it is shown, or ``None``."""
        with self._lock:
            keys = list(self._table)
        return find(name, keys)

    def keys(self) -> tuple[str, ...]:
        """The key of every session, least recently used first."""
        with self._lock:
            return tuple(self._order)

    def listing(self) -> tuple[Entry, ...]:
        """Every session with every value, least recently used first; listing refreshes nobody."""
        with self._lock:
            sessions = [self._table[key] for key in self._order]
        return tuple(entry_of(session) for session in sessions)

    def stats(self) -> dict[str, int]:
        """Counters and bytes.

        Returns:
            ``sessions``, ``max_sessions``, ``hits``, ``misses``, ``evictions``; ``total_nbytes`` and one
            ``nbytes:<device>`` per device, over the table's sessions, each region once.
        """
        with self._lock:
            sessions = list(self._table.values())
            counters = {
                "sessions": len(sessions),
                "max_sessions": self.max_sessions,
                "hits": self.hits,
                "misses": self.misses,
                "evictions": self.evictions,
            }
        held = _union(sessions)
        by_device = {f"nbytes:{device}": count for device, count in sorted(held.nbytes_by_device().items())}
        return {**counters, "total_nbytes": held.nbytes, **by_device}

    def nbytes_by_device(self) -> dict[str, int]:
        """Bytes of the table's sessions by device, each region once."""
        with self._lock:
            sessions = list(self._table.values())
        return _union(sessions).nbytes_by_device()

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
        """Assert that the table and the order speak of the same sessions. An expensive no-op."""
        with self._lock:
            assert set(self._table) == set(self._order), "table and order differ"
            assert len(self._order) == len(self._table) <= self.max_sessions, "the cap is not held"
            assert all(key == session.key for key, session in self._table.items()), (
                "a session under another's key"
            )


def _union(sessions: list[SessionState]) -> Footprint:
    return footprint(*(content for session in sessions for content in session.contents()))

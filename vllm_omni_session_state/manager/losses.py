"""Who was lost and why: counted, and remembered for as long as there is room, by a keyed hash."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

from vllm_omni_session_state.base.ids import fingerprint

REMEMBERED = 65_536
"""Lost sessions that are remembered; beyond it the longest lost one is forgotten, its count stays."""


class Reason(Enum):
    """Why a session was dropped although its client had not ended it."""

    COUNT = "count"
    KV_EVICTION = "kv_eviction"
    FORWARD_EXCEPTION = "forward_exception"
    TIER_FULL = "tier_full"
    EXPIRED = "expired"
    REPLICA = "replica"
    STALE = "stale"


class Losses:
    """The losses of one manager. Not locked: the manager holds its lock around every call."""

    __slots__ = ("_remembered", "counts")

    def __init__(self) -> None:
        self.counts: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self._remembered: OrderedDict[bytes, Reason] = OrderedDict()

    def record(self, key: str, reason: Reason) -> None:
        """A session is lost."""
        self.counts[reason] += 1
        mark = fingerprint(key)
        self._remembered[mark] = reason
        self._remembered.move_to_end(mark)
        while len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)

    def reason(self, key: str) -> Reason | None:
        """Why the last session of that key was lost, if it was and nobody has started over since."""
        return self._remembered.get(fingerprint(key))

    def clear(self, key: str) -> None:
        """The client knows: it reset, closed or began anew."""
        self._remembered.pop(fingerprint(key), None)

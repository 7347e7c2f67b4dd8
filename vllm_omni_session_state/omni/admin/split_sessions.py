"""Sessions that are in several replicas: how many there are, each said once.

Replicas answer one after the other. A session that ends in one and begins anew in another meanwhile is in
both answers, for that one look. So what counts is what was seen in two looks, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_omni_session_state.base.log import LOGGER
from vllm_omni_session_state.omni.admin.aggregate import Row, split


class SplitSessions:
    """What was seen of the sessions of one server. It remembers those that are split now and no other."""

    def __init__(self) -> None:
        self._looks: dict[str, int] = {}

    def look(self, rows: Iterable[Row]) -> int:
        """Note what ``aggregate.rows()`` of all replicas say: how many sessions are split."""
        found = split(rows)
        self._looks = {row["session"]: min(3, self._looks.get(row["session"], 0) + 1) for row in found}
        for row in found:
            if self._looks[row["session"]] == 2:
                LOGGER.warning(
                    "session %s is in replicas %s at once: its steps went now to one, now to another, and "
                    "its outputs are wrong. Have its client reset it, or close it",
                    row["session"],
                    ", ".join(map(str, row["replicas"])),
                )
        return sum(looks > 1 for looks in self._looks.values())

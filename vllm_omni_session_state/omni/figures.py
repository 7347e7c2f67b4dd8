"""The last known figures of the workers, kept in the API server: who asks for them never waits for a step.

While somebody asks, they are renewed in the background, a second after the last answer at the earliest and
one call at a time: a call that waits behind a running step is the only one.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

from vllm_omni_session_state.events import LOGGER
from vllm_omni_session_state.omni.merged import Answers, Row, rows
from vllm_omni_session_state.omni.splits import Splits
from vllm_omni_session_state.omni.workers import Workers

EVERY_S = 1.0
"""Between an answer and the next call."""

LISTED_EVERY_S = 10.0
"""Between two listings, which only several replicas are asked for: they walk all sessions."""

LINGER_S = 60.0
"""For so long after the last scrape they are renewed."""


@dataclass(frozen=True, slots=True)
class Known:
    """Figures, and when they came.

    Attributes:
        answers: What each replica's ranks answered.
        at: By ``time.monotonic()``.
    """

    answers: Answers
    at: float

    @property
    def age_s(self) -> float:
        """Seconds since they came."""
        return max(0.0, time.monotonic() - self.at)


class Figures:
    """The figures of some workers.

    Args:
        workers: Which.
        loop: The API server's.

    Attributes:
        known: The last ones; ``None`` before the first answer.
        split: How many sessions are in several replicas; ``None`` as long as no listing tells.
    """

    def __init__(self, workers: Workers, loop: asyncio.AbstractEventLoop) -> None:
        self.known: Known | None = None
        self.split: int | None = None
        self._workers = workers
        self._loop = loop
        self._until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._splits = Splits()
        self._listed_at = -math.inf

    def want(self, *, linger_s: float = 0.0) -> None:
        """Have them renewed, at once and for a while; from any thread, and it never waits.

        Args:
            linger_s: For how long.
        """
        self._until = max(self._until, time.monotonic() + linger_s)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin)

    def saw(self, listed: list[Row]) -> None:
        """Note what a listing said that all replicas answered."""
        self.split = self._splits.look(listed)

    def _begin(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            begun = time.monotonic()
            if self.known is None or self.known.age_s >= EVERY_S:
                await self._renew()
            await asyncio.sleep(EVERY_S)
            if self._until <= begun:
                return

    async def _renew(self) -> None:
        try:
            asked = await self._workers.ask("session_state_stats")
            if asked.answers:
                self.known = Known(asked.answers, time.monotonic())
            await self._look_for_splits(len(asked.answers) + len(asked.failures))
        except Exception as error:  # noqa: BLE001 - the last ones stay, and their age tells
            LOGGER.debug("no figures came: %s: %s", type(error).__name__, error)

    async def _look_for_splits(self, replicas: int) -> None:
        if replicas < 2:
            self.saw([])
        elif time.monotonic() - self._listed_at >= LISTED_EVERY_S:
            asked = await self._workers.ask("session_state_list")
            self._listed_at = time.monotonic()
            if asked.whole:
                self.saw(rows(asked.answers))

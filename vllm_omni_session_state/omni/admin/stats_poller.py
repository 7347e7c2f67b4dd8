"""What all ranks say of their sessions, as the API server knows it: who looks never waits for a step.

Each worker writes it to a file (``publish``), found by one call at the server's start. A worker whose file is
not here, since it runs on another machine or cannot write one, is asked again while somebody wants to know,
when nothing runs, or every 30 seconds: a call waits for the step that runs, and others for the call.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from vllm_omni_session_state.base.errors import error_text
from vllm_omni_session_state.base.log import LOGGER
from vllm_omni_session_state.omni.admin.aggregate import Row, rows, split
from vllm_omni_session_state.omni.admin.stats_source import Reading, StatsSource
from vllm_omni_session_state.omni.replicas.calls import Asked
from vllm_omni_session_state.omni.server.worker_client import WorkerClient

EVERY_S = 1.0
"""Between two calls while nothing runs,"""

BUSY_EVERY_S = 30.0
"""and while something does; also where a worker is gone, whose place another one may have taken."""

LISTED_EVERY_S = 10.0
"""Between two looks at the rows of several replicas."""

LINGER_S = 60.0
"""For so long after somebody wanted to know they are made."""

_TRIES = 3


class StatsPoller:
    """The figures of some workers, on the API server's loop.

    Attributes:
        split: How many sessions are in several replicas; ``None`` as long as no listing tells.
    """

    def __init__(self, workers: WorkerClient, loop: asyncio.AbstractEventLoop) -> None:
        self.split: int | None = None
        self._workers = workers
        self._loop = loop
        self._until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._asked_at: float | None = None
        self._replicas: dict[int, tuple[bool, list[StatsSource]]] = {}  # with whether ranks agreed when asked
        self._failures: list[str] = []
        self._split_looks: dict[str, int] = {}  # by split session, at how many looks it was
        self._listed_at = -math.inf

    def want(self, *, linger_s: float = 0.0) -> None:
        """Have those renewed for so long that must be asked for; from any thread, and it never waits."""
        self._until = max(self._until, time.monotonic() + linger_s)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin)

    def look(self, *, rows: bool = False) -> Asked | None:
        """What all ranks say, as if asked by ``session_state_figures``, with their ``rows`` or without.

        From any thread, and it waits for no worker; ``None`` before the first answer. Ranks of a replica are
        judged to agree by what each of them was after the same step.
        """
        answers: dict[int, Any] = {}
        now = oldest = time.monotonic()
        for replica, (agreed, sources) in list(self._replicas.items()):
            looks, agree = _looked(sources, rows=rows)
            ranks = [look.rank for look in looks]
            answers[replica] = {"agree": agreed if agree is None else agree, "ranks": ranks}
            oldest = min(oldest, *(look.at for look in looks))
        return Asked(answers, self._failures, now - oldest) if answers else None

    def saw(self, listed: list[Row]) -> None:
        """Note what a listing of all replicas says.

        Replicas answer one after the other. A session that ends in one and begins anew in another meanwhile
        is in both answers, for that one look. So a split one counts, and is said, from its second look on.
        """
        found = split(listed)
        self._split_looks = {
            row["session"]: min(3, self._split_looks.get(row["session"], 0) + 1) for row in found
        }
        for row in found:
            if self._split_looks[row["session"]] == 2:
                LOGGER.warning(
                    "session %s is in replicas %s at once: its steps went now to one, now to another, and "
                    "its outputs are wrong. Have its client reset it, or close it",
                    row["session"],
                    ", ".join(map(str, row["replicas"])),
                )
        self.split = sum(looks > 1 for looks in self._split_looks.values())

    async def fresh(self) -> None:
        """Wait for an answer where there is none yet, or of a replica that has joined, or while nothing runs.

        Raises as the call does.
        """
        if self._asked_at is None or self._joined or (not self._filed and self._workers.idle):
            await self.ask()

    async def ask(self) -> None:
        """Ask all workers; who asks meanwhile has the same answer. Raises as the call does."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        asked = await self._workers.ask("session_state_figures")
        self._asked_at = time.monotonic()
        self._failures = asked.failures
        found = {
            number: (answer["agree"], [StatsSource(rank) for rank in answer["ranks"]])
            for number, answer in asked.answers.items()
        }
        # One that is gone is shown as such until another takes its place.
        gone = {n: known for n, known in self._replicas.items() if all(source.gone for source in known[1])}
        self._replicas = {**gone, **found}

    @property
    def _sources(self) -> list[StatsSource]:
        return [source for _, sources in self._replicas.values() for source in sources]

    @property
    def _joined(self) -> bool:
        """Whether there is a replica that was never asked."""
        attached = self._workers.attached
        return attached is not None and not attached <= self._replicas.keys()

    @property
    def _filed(self) -> bool:
        return all(source.filed for source in self._sources)

    def _begin(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            begun = time.monotonic()
            if self._due(begun):
                try:
                    await self.ask()
                except Exception as error:  # noqa: BLE001 - the last ones stay, and their age tells
                    LOGGER.debug("no figures came: %s", error_text(error))
            await self._look_for_splits()
            await asyncio.sleep(EVERY_S)
            if self._until <= begun:
                return

    async def _look_for_splits(self) -> None:
        if len(self._replicas) < 2:
            self.saw([])
        elif time.monotonic() - self._listed_at >= LISTED_EVERY_S:
            self._listed_at = time.monotonic()
            known = await asyncio.to_thread(self.look, rows=True)
            if known is not None and known.whole:
                self.saw(rows(known.answers))

    def _due(self, now: float) -> bool:
        if self._asked_at is None:
            return True
        since = now - self._asked_at
        if self._joined or not self._filed:
            return since >= (EVERY_S if self._joined or self._workers.idle else BUSY_EVERY_S)
        gone = any(source.gone for source in self._sources)
        return gone and self._workers.idle and since >= BUSY_EVERY_S


def _looked(sources: list[StatsSource], *, rows: bool) -> tuple[list[Reading], bool | None]:
    """What the ranks of one replica say, and whether they agree; ``None``: as when they were asked."""
    for _ in range(_TRIES):
        looks = [source.look(rows=rows) for source in sources]
        if not all(look.rank["ok"] for look in looks):
            return looks, False
        steps = [look.steps for look in looks if look.steps is not None]
        if len(steps) < len(looks):
            return looks, None
        # One may be a step ahead; they are compared after the last that all of them have done.
        common = set(steps[0]).intersection(*steps)
        if common:
            break
    else:
        return looks, False  # one is far behind the others
    last = max(common)
    return looks, len({each[last] for each in steps}) == 1

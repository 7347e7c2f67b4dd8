"""The workers as an API server process reaches them: the remote calls that it makes about its sessions.

One call is under way at a time. The host runs it between two steps and holds a thread of its pool for it,
so what comes meanwhile goes together in the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_omni_session_state.errors import SessionStateError
from vllm_omni_session_state.events import LOGGER
from vllm_omni_session_state.omni import seams
from vllm_omni_session_state.omni.ends import WorkersStoppedError


@dataclass(frozen=True, slots=True)
class _Said:
    """What replicas said of one session in a call about several.

    Attributes:
        replicas: One list a replica that answered, with what each of its ranks said of this session.
        failures: What went wrong with it, and what went wrong with the whole call somewhere.
        refused: Whether all of these are refusals.
    """

    replicas: list[list[Mapping[str, Any]]]
    failures: list[str]
    refused: bool

    def done(self) -> _Said:
        """The same, where nothing went wrong.

        Raises:
            SessionStateError: If it was refused.
            RuntimeError: If it failed in another way.
        """
        if self.failures:
            raise (SessionStateError if self.refused else RuntimeError)("; ".join(self.failures))
        return self


class _Batch:
    """Ids that go in one call, and what came of it."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.sent: asyncio.Task[Asked] | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of a question.

    Attributes:
        answers: By the number of the replica, of all stages in their order; what ranks say that failed is
            in them.
        failures: What those replicas said from which no answer came.
    """

    answers: dict[int, Mapping[str, Any]]
    failures: list[str]

    @property
    def whole(self) -> bool:
        """Whether every rank of every replica did well."""
        ranks = (rank for answer in self.answers.values() for rank in answer["ranks"])
        return not self.failures and all(rank["ok"] for rank in ranks)


class Workers:
    """The workers of some stages, with all their replicas and ranks.

    Args:
        engine_client: The host's ``AsyncOmni``.
        stage_ids: The stages.
    """

    def __init__(self, engine_client: Any, stage_ids: list[int]) -> None:
        self._engine_client = engine_client
        self._stage_ids = stage_ids
        self._turn = asyncio.Lock()
        self._open: dict[str, _Batch] = {}
        self._deaf = False

    async def close(self, key: str) -> None:
        """End a session wherever it is.

        Raises:
            SessionStateError: If a rank refused it; so for all methods here.
            RuntimeError: If a replica or a rank did not do it; the others have.
            WorkersStoppedError: If the server stops, and its workers with it.
        """
        (await self._together("session_state_close", key)).done()

    async def park(self, key: str) -> None:
        """Park a session wherever nobody uses it. Raises as ``close()`` does."""
        (await self._together("session_state_park", key)).done()

    async def begin_restore(self, key: str) -> None:
        """Begin to bring a session back that is parked on the disk. Raises as ``close()`` does."""
        (await self._together("session_state_begin_restore", key)).done()

    async def expire(self, key: str) -> bool:
        """End a session that is parked; whether it is gone everywhere. Raises as ``close()`` does."""
        said = (await self._together("session_state_expire", key)).done()
        return all(rank["gone"] for ranks in said.replicas for rank in ranks)

    async def holds(self, key: str) -> bool:
        """Whether some replica has the session on all its ranks. Raises as ``close()`` does, if none has."""
        said = await self._together("session_state_holds", key)
        if any(all(rank.get("found") for rank in ranks) for ranks in said.replicas):
            return True
        said.done()
        return False

    async def _together(self, method: str, key: str) -> _Said:
        """Have a call about a session made, with those about others that come meanwhile."""
        batch = self._open.get(method)
        if batch is None:
            batch = self._open[method] = _Batch()
            batch.sent = asyncio.get_running_loop().create_task(self._send(method, batch))
        batch.keys.append(key)
        at = len(batch.keys) - 1
        assert batch.sent is not None, "a batch is made with its task"
        return _said_of(at, await asyncio.shield(batch.sent))

    async def _send(self, method: str, batch: _Batch) -> Asked:
        async with self._turn:
            del self._open[method]
            if self._deaf:
                return Asked({}, [])
            try:
                asked = await self._replies(method, tuple(batch.keys), {"only_id": True})
            except Exception as error:  # noqa: BLE001 - it goes on
                raise (WorkersStoppedError() if self._stopped else error) from None
            if asked.failures and self._stopped:
                raise WorkersStoppedError
            self._hear(method, asked)
            return Asked({}, []) if self._deaf else asked

    async def ask(self, method: str, *names: str, sent: asyncio.Event | None = None, **how: bool) -> Asked:
        """Ask for what an operator wants; names are ids or as a listing shows them.

        Args:
            method: One of ``rpc.METHODS``.
            *names: Its arguments.
            sent: Set as soon as the call is on its way: before that a cancellation leaves nothing behind.
            **how: Its keywords.
        """
        async with self._turn:
            if sent is not None:
                sent.set()
            if self._deaf:
                return Asked({}, [])
            asked = await self._replies(method, names, {name: True for name, on in how.items() if on})
        if not asked.answers:
            self._hear(method, asked)
        return asked

    @property
    def _stopped(self) -> bool:
        """Whether the server stops in order; the host notes it before anything ends."""
        return bool(getattr(self._engine_client, seams.CLIENT_STOPPED, False))

    def _hear(self, method: str, asked: Asked) -> None:
        """Note, once, that no worker has such a method: it has said why its model keeps its own state.

        Each call is an error there.
        """
        ranks = [rank for answer in asked.answers.values() for rank in answer["ranks"]]
        if self._deaf or any(rank["ok"] or "errors" in rank for rank in ranks):
            return
        failures = [*asked.failures, *(rank["error"] for rank in ranks)]
        if failures and all(f"attribute '{method}'" in failure for failure in failures):
            self._deaf = True
            LOGGER.warning("no worker manages session state: ends of sessions are not sent any more")

    async def _replies(self, method: str, names: tuple[str, ...], how: dict[str, bool]) -> Asked:
        # No time limit: the host drops a call that waited too long behind a step, and the end with it.
        replies = await self._engine_client.collective_rpc(
            method=method, args=names, kwargs=how, stage_ids=self._stage_ids
        )
        asked = Asked({}, [])
        for number, reply in enumerate(replies):  # one a replica
            answer = reply[0] if isinstance(reply, list | tuple) and reply else reply
            if isinstance(answer, Mapping) and "ranks" in answer:
                asked.answers[number] = answer
            else:
                said = answer.get("error", answer) if isinstance(answer, Mapping) else answer
                asked.failures.append(str(said))
        return asked


def _said_of(at: int, asked: Asked) -> _Said:
    """What was said of one of the sessions of a call, by its place there."""
    replicas: list[list[Mapping[str, Any]]] = []
    failures, refused = [], not asked.failures
    for answer in asked.answers.values():
        # What is no list is said of all of them.
        ranks: list[Mapping[str, Any]] = [
            {what: said[at] if isinstance(said, list) else said for what, said in rank.items()}
            for rank in answer["ranks"]
        ]
        replicas.append(ranks)
        for rank in ranks:
            wrong = rank.get("errors", None if rank["ok"] else rank)
            if wrong is not None:
                failures.append(f"rank {rank['rank']}: {wrong['error']}")
                refused = refused and wrong.get("refused", False)
    return _Said(replicas, [*failures, *asked.failures], refused)

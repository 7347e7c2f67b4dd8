"""The workers as an API server process reaches them: the remote calls that it makes about its sessions.

One call is under way at a time. The host runs it between two steps and holds a thread of its pool for it,
so what comes meanwhile goes together in the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_omni_session_state.events import LOGGER


class _Batch:
    """Ids that go in one call, and what came of it."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.sent: asyncio.Task[list[Mapping[str, Any]]] | None = None


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
            RuntimeError: If a replica or a rank did not do it; the others have.
        """
        await self._together("session_state_close", key)

    async def park(self, key: str) -> None:
        """Park a session wherever nobody uses it. Raises as ``close()`` does."""
        await self._together("session_state_park", key)

    async def begin_restore(self, key: str) -> None:
        """Begin to bring a session back that is parked on the disk. Raises as ``close()`` does."""
        await self._together("session_state_begin_restore", key)

    async def expire(self, key: str) -> bool:
        """End a session that is parked; whether it is gone everywhere. Raises as ``close()`` does."""
        at, answers = await self._together("session_state_expire", key)
        return all(rank["gone"][at] for answer in answers for rank in answer["ranks"])

    async def _together(self, method: str, key: str) -> tuple[int, list[Mapping[str, Any]]]:
        """Have a call about a session made: its place in the call, and what came back."""
        batch = self._open.get(method)
        if batch is None:
            batch = self._open[method] = _Batch()
            batch.sent = asyncio.get_running_loop().create_task(self._send(method, batch))
        batch.keys.append(key)
        at = len(batch.keys) - 1
        assert batch.sent is not None, "a batch is made with its task"
        return at, await asyncio.shield(batch.sent)

    async def _send(self, method: str, batch: _Batch) -> list[Mapping[str, Any]]:
        async with self._turn:
            del self._open[method]
            return await self._call(method, *batch.keys)

    async def holds(self, key: str) -> bool:
        """Whether some replica has the session on all its ranks."""
        async with self._turn:
            answers = await self._call("session_state_holds", key)
        return any(all(rank["found"] for rank in answer["ranks"]) for answer in answers)

    async def ask(
        self, method: str, *names: str, sent: asyncio.Event | None = None, only_idle: bool = False
    ) -> Asked:
        """Ask for what an operator wants; names are ids or as a listing shows them.

        Args:
            method: One of ``rpc.METHODS``.
            *names: Its arguments.
            sent: Set as soon as the call is on its way: before that a cancellation leaves nothing behind.
            only_idle: Leave a session that is in use as it is.
        """
        async with self._turn:
            if sent is not None:
                sent.set()
            if self._deaf:
                return Asked({}, [])
            asked = await self._replies(method, names, {"only_idle": True} if only_idle else {})
        if not asked.answers:
            self._hear(method, asked.failures)
        return asked

    async def _call(self, method: str, *keys: str) -> list[Mapping[str, Any]]:
        if self._deaf:
            return []
        asked = await self._replies(method, keys, {"only_id": True})
        answers = list(asked.answers.values())
        failures = [_failure(rank) for answer in answers for rank in answer["ranks"] if not rank["ok"]]
        failures += asked.failures
        self._hear(method, failures)
        if failures and not self._deaf:
            raise RuntimeError("; ".join(failures))
        return answers

    def _hear(self, method: str, failures: list[str]) -> None:
        """Note, once, that no worker has such a method: it has said why its model keeps its own state.

        Each call is an error there.
        """
        if failures and not self._deaf and all(f"attribute '{method}'" in failure for failure in failures):
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


def _failure(rank: Mapping[str, Any]) -> str:
    return f"rank {rank['rank']}: {rank['error']}"

"""The workers as an API server process reaches them: the remote calls that it makes about its sessions.

A call about a session goes to the replica that has it. One call is under way there at a time, and what comes
meanwhile goes together in the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from vllm_omni_session_state.base.errors import SessionStateError, error_text
from vllm_omni_session_state.base.log import LOGGER
from vllm_omni_session_state.omni.hooks import seams
from vllm_omni_session_state.omni.replicas.calls import Asked, Callee, Replicas

_ENDS = ("session_state_close", "session_state_reset")


Ranks = list[Mapping[str, Any]]


class WorkersStoppedError(Exception):
    """The server stops, and its workers with all their sessions: nothing can be asked of them, or need be."""


class WorkerClient:
    """The workers of some stages of vLLM-Omni's ``AsyncOmni``, with all their replicas and ranks."""

    def __init__(self, engine_client: Any, stage_ids: list[int]) -> None:
        self._engine_client = engine_client
        self._replicas = Replicas(engine_client, stage_ids)
        self._open: dict[tuple[str, Callee], tuple[list[str], asyncio.Task[Asked]]] = {}
        self._unsupported = False

    def lost(self) -> dict[int, int]:
        """How many sessions were lost with their replica, by its number."""
        return self._replicas.lost()

    @property
    def attached(self) -> frozenset[int] | None:
        """Numbers of the replicas that are there; ``None`` where vLLM-Omni's pools cannot be reached."""
        return self._replicas.attached()

    @property
    def idle(self) -> bool:
        """Whether no request is under way, as far as vLLM-Omni tells: then a call delays nobody."""
        requests = getattr(self._engine_client, "request_states", None)
        return requests is not None and not requests

    async def close(self, key: str) -> None:
        """End a session wherever it is.

        Raises:
            SessionStateError: If a rank refused it; so for all methods here.
            RuntimeError: If a replica or a rank did not do it; the others have.
            WorkersStoppedError: If the server stops, and its workers with it.
        """
        await self._done("session_state_close", key)
        self._replicas.forget(key)

    async def park(self, key: str) -> None:
        """Park a session wherever nobody uses it. Raises as ``close()`` does."""
        await self._done("session_state_park", key)

    async def begin_restore(self, key: str) -> None:
        """Begin to bring a session back that is parked on the disk. Raises as ``close()`` does."""
        await self._done("session_state_begin_restore", key)

    async def expire(self, key: str) -> bool:
        """End a session that is parked; whether it is gone everywhere. Raises as ``close()`` does."""
        replicas = await self._done("session_state_expire", key)
        return all(rank["gone"] for ranks in replicas for rank in ranks)

    async def mark_stale(self, key: str) -> None:
        """Mark a session stale wherever nobody uses it. Raises as ``close()`` does."""
        await self._done("session_state_mark_stale", key)

    async def tell_the_time(self) -> None:
        """Say that sessions are going to be marked stale; an error if a replica did not hear it."""
        asked = await self.ask("session_state_mark_stale")
        if asked.failures and not self._unsupported:
            raise RuntimeError("; ".join(asked.failures))

    async def holds(self, key: str) -> bool:
        """Whether some replica has the session on all its ranks. Raises as ``close()`` does, if none has."""
        replicas, error = await self._together("session_state_holds", key)
        if any(all(rank.get("found") for rank in ranks) for ranks in replicas):
            return True
        if error is not None:
            raise error
        return False

    async def _done(self, method: str, key: str) -> list[Ranks]:
        replicas, error = await self._together(method, key)
        if error is not None:
            raise error
        return replicas

    async def _together(self, method: str, key: str) -> tuple[list[Ranks], Exception | None]:
        """Have a call about a session made, with those about others that come meanwhile.

        Returns:
            What the ranks of each replica that answered say of this session; and what went wrong with it, or
            with the whole call somewhere.
        """
        joined = [self._join(method, callee, key) for callee in self._replicas.of(key)]
        done = await asyncio.gather(*(asyncio.shield(sent) for _, sent in joined), return_exceptions=True)
        replicas: list[Ranks] = []
        failures, refused = [], True
        for (at, _), asked in zip(joined, done, strict=True):
            if isinstance(asked, BaseException):
                if isinstance(asked, WorkersStoppedError) or len(done) == 1:
                    raise asked
                asked = Asked(failures=[error_text(asked)])  # noqa: PLW2901
            for answer in asked.answers.values():
                ranks = [_of_one(rank, at) for rank in answer["ranks"]]
                replicas.append(ranks)
                for rank in ranks:
                    wrong = rank.get("errors", None if rank["ok"] else rank)
                    if wrong is not None:
                        failures.append(f"rank {rank['rank']}: {wrong['error']}")
                        refused = refused and wrong.get("refused", False)
            failures += asked.failures
            refused = refused and not asked.failures
        kind = SessionStateError if refused else RuntimeError
        return replicas, kind("; ".join(failures)) if failures else None

    def _join(self, method: str, callee: Callee, key: str) -> tuple[int, asyncio.Task[Asked]]:
        """Put a session into the next call to a replica: its place there, and the call."""
        if (method, callee) not in self._open:
            keys: list[str] = []
            task = asyncio.get_running_loop().create_task(self._send(method, callee, keys))
            self._open[method, callee] = keys, task
        keys, task = self._open[method, callee]
        keys.append(key)
        return len(keys) - 1, task

    async def _send(self, method: str, callee: Callee, keys: list[str]) -> Asked:
        async with callee.turn:
            del self._open[method, callee]
            if self._unsupported:
                return Asked()
            if self._stopped:  # a replica that is being shut down would log each call as a failure
                raise WorkersStoppedError
            try:
                asked = await callee.call(method, tuple(keys), {"only_id": True})
            except Exception as error:  # noqa: BLE001 - it goes on
                raise (WorkersStoppedError() if self._stopped else error) from None
            if asked.failures and self._stopped:
                raise WorkersStoppedError
            self._note_unsupported(method, asked)
            return Asked() if self._unsupported else asked

    async def ask(self, method: str, *names: str, sent: asyncio.Event | None = None, **how: bool) -> Asked:
        """Ask for what an operator wants; names are ids or as a listing shows them.

        Args:
            method: One of ``rpc.METHODS``.
            *names: Its arguments.
            sent: Set as soon as a call is on its way: before that a cancellation leaves nothing behind.
            **how: Its keywords.
        """
        given = {name: True for name, on in how.items() if on}
        callees = self._replicas.named(names, given) if names else self._replicas.all()

        async def call(callee: Callee) -> Asked:
            async with callee.turn:
                if sent is not None:
                    sent.set()
                return Asked() if self._unsupported else await callee.call(method, names, given)

        asked = Asked()
        one = len(callees) == 1  # who waits for no other needs no task of its own
        for each in [await call(callees[0])] if one else await asyncio.gather(*map(call, callees)):
            asked.answers.update(each.answers)
            asked.failures.extend(each.failures)
        for name in names if method in _ENDS else ():
            self._replicas.forget(name)
        if not asked.answers:
            self._note_unsupported(method, asked)
        return asked

    @property
    def _stopped(self) -> bool:
        """Whether the server stops in order; vLLM-Omni notes it before anything ends."""
        return bool(getattr(self._engine_client, seams.CLIENT_STOPPED, False))

    def _note_unsupported(self, method: str, asked: Asked) -> None:
        """Note, once, that no worker has such a method: it has said why its model keeps its own state.

        Each call is an error there.
        """
        ranks = [rank for answer in asked.answers.values() for rank in answer["ranks"]]
        if self._unsupported or any(rank["ok"] or "errors" in rank for rank in ranks):
            return
        failures = [*asked.failures, *(rank["error"] for rank in ranks)]
        if failures and all(f"attribute '{method}'" in failure for failure in failures):
            self._unsupported = True
            LOGGER.warning("no worker manages session state: ends of sessions are not sent any more")


def _of_one(rank: Mapping[str, Any], at: int) -> Mapping[str, Any]:
    """What a rank says of one session of a call, by its place there; what is no list is said of all."""
    return {what: said[at] if isinstance(said, list) else said for what, said in rank.items()}

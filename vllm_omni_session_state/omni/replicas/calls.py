"""Whom a remote call about sessions goes to: the one replica that has the session, or all of them at once.

A call reaches one replica, beside the requests of vLLM-Omni's orchestrator. One is under way there at a time:
vLLM-Omni runs it between two steps and holds a thread of that replica for it. A long step delays the calls to
its own replica and no other's.

Where vLLM-Omni's pools cannot be reached, a call goes to all replicas together, by vLLM-Omni's own way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.omni.replicas.affinity import Affinity, answer_of
from vllm_omni_session_state.omni.replicas.pools import affinity_of


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of a question.

    Attributes:
        answers: By the number of the replica; what ranks say that failed is in them.
        failures: What those replicas said from which no answer came.
        age_s: Seconds since the oldest part of it was so.
    """

    answers: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    age_s: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether every rank of every replica did well."""
        ranks = (rank for answer in self.answers.values() for rank in answer["ranks"])
        return not self.failures and all(rank["ok"] for rank in ranks)

    def take(self, number: int, reply: Any) -> None:
        """Note what vLLM-Omni hands back for one replica."""
        answer = answer_of(reply)
        if answer is not None:
            self.answers[number] = answer
        else:
            self.failures.append(str(reply.get("error", reply) if isinstance(reply, Mapping) else reply))


@dataclass(slots=True, eq=False)
class Callee:
    """Who is called: one replica, or all of them together.

    Attributes:
        client: vLLM-Omni's of the one replica.
        call: Calls a method of its workers with names and keywords.
        turn: Held while a call is under way.
    """

    client: object
    call: Callable[[str, tuple[str, ...], Mapping[str, bool]], Awaitable[Asked]]
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Replicas:
    """The replicas of some stages.

    A replica's number is its slot in its stage's pool, and stays that after another one's death. With several
    stages it is the slot times their count, plus the place of its own among them.
    """

    def __init__(self, engine_client: Any, stage_ids: list[int]) -> None:
        self._engine_client = engine_client
        self._stage_ids = stage_ids
        self._everybody = Callee(None, self._call_everybody)
        self._known: dict[int, Callee] = {}
        pools = getattr(getattr(engine_client, "engine", None), "stage_pools", None) or []
        found = [affinity_of(pools[number]) for number in stage_ids if number < len(pools)]
        self._stages = [each for each in found if each is not None and each.loop is not None]
        if len(self._stages) < len(stage_ids):
            self._stages = []
            log_once(
                logging.INFO,
                ("replicas",),
                "the replicas of stages %s are not reached one by one: a call about a session goes to all of "
                "them, in the queue of the requests",
                stage_ids,
            )

    def all(self) -> list[Callee]:
        """Every replica that is there."""
        return [self._callee(*each) for each in self._each()] if self._stages else [self._everybody]

    def attached(self) -> frozenset[int] | None:
        """Numbers of those that are there; ``None`` where they are not reached one by one."""
        return frozenset(number for number, *_ in self._each()) if self._stages else None

    def of(self, key: str) -> list[Callee]:
        """Those that have the session of an id, or may have it; nobody where it is known to be gone."""
        return self._where([key]) if self._stages else [self._everybody]

    def named(self, names: Iterable[str], how: Mapping[str, bool]) -> list[Callee]:
        """Those that have the sessions that names may mean, as a call takes them; all, where nobody does."""
        keys = {key for name in names for affinity in self._stages for key in affinity.meant(name, how)}
        return (self._where(keys) if keys else []) or self.all()

    def forget(self, key: str) -> None:
        """The session of an id has ended: it is not lost any more, if its replica could not be told."""
        for affinity in self._stages:
            assert affinity.loop is not None, "a stage without a loop is reached another way"
            with contextlib.suppress(RuntimeError):  # the loop is closed
                affinity.loop.call_soon_threadsafe(affinity.forget, key)

    def lost(self) -> dict[int, int]:
        """How many sessions were lost with their replica, by its number."""
        return {
            self._number(place, slot): count
            for place, affinity in enumerate(self._stages)
            for slot, count in list(affinity.homes.lost.items())
        }

    def _each(self) -> Iterator[tuple[int, Affinity, int, object]]:
        """Every replica that is there: its number, its stage, its slot there, its client."""
        for place, affinity in enumerate(self._stages):
            for slot, client in affinity.attached().items():
                yield self._number(place, slot), affinity, slot, client

    def _where(self, keys: Iterable[str]) -> list[Callee]:
        """Each replica that has one of some sessions; of a stage that knows nothing of one, all."""
        return [
            self._callee(number, affinity, slot, client)
            for number, affinity, slot, client in self._each()
            if any(affinity.may_have(client, key) for key in keys)
        ]

    def _number(self, place: int, slot: int) -> int:
        return slot * len(self._stages) + place

    def _callee(self, number: int, affinity: Affinity, slot: int, client: object) -> Callee:
        known = self._known.get(number)
        if known is None or known.client is not client:

            async def call(method: str, names: tuple[str, ...], how: Mapping[str, bool]) -> Asked:
                asked = Asked()
                calling = affinity.call(slot, client, method, names, how)
                asked.take(number, await _on_its_loop(affinity, calling))
                return asked

            known = self._known[number] = Callee(client, call)
        return known

    async def _call_everybody(self, method: str, names: tuple[str, ...], how: Mapping[str, bool]) -> Asked:
        """Call all replicas, one after the other: vLLM-Omni's own remote call."""
        replies = await self._engine_client.collective_rpc(
            method=method, args=names, kwargs=dict(how), stage_ids=self._stage_ids
        )
        asked = Asked()
        for number, reply in enumerate(replies):
            asked.take(number, reply)
        return asked


async def _on_its_loop(affinity: Affinity, calling: Coroutine[Any, Any, Any]) -> Any:
    """Run a call to a replica on the orchestrator's loop."""
    assert affinity.loop is not None, "as above"
    try:
        sent = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(calling, affinity.loop))
    except RuntimeError:  # the loop is closed
        calling.close()
        raise
    await asyncio.wait({sent})
    if sent.cancelled():
        raise RuntimeError("the server stops")
    return sent.result()

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.omni.replicas.affinity import Affinity, answer_of
from vllm_omni_session_state.omni.replicas.pools import affinity_of


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of a question.

    Attributes:
        answers: By the number of the replica; what ranks say that failed is in them.
        failures: What those replicas said from which no answer came.
    """

    answers: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

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


class Callee(Protocol):
    """Who is called: one replica, or all of them together.

    Attributes:
        turn: Held while a call is under way.
    """

    turn: asyncio.Lock

    async def call(self, method: str, names: tuple[str, ...], how: Mapping[str, bool]) -> Asked:
        """Call a method of its workers."""


class _Replica:
    """One replica, for as long as it is there.

    Args:
        affinity: Of its pool.
        slot: Its place there.
        client: vLLM-Omni's.
        number: By which it is known in answers.
    """

    def __init__(self, affinity: Affinity, slot: int, client: object, number: int) -> None:
        self.turn = asyncio.Lock()
        self.client = client
        self._affinity = affinity
        self._slot = slot
        self._number = number

    async def call(self, method: str, names: tuple[str, ...], how: Mapping[str, bool]) -> Asked:
        loop = self._affinity.loop
        assert loop is not None, "who has no loop is no callee"
        calling = self._affinity.call(self._slot, self.client, method, names, how)
        try:
            sent = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(calling, loop))
        except RuntimeError:  # the loop is closed
            calling.close()
            raise
        await asyncio.wait({sent})
        if sent.cancelled():
            raise RuntimeError("the server stops")
        asked = Asked()
        asked.take(self._number, sent.result())
        return asked


class _Everybody:
    """All replicas of some stages, one after the other: vLLM-Omni's own remote call."""

    def __init__(self, engine_client: Any, stage_ids: list[int]) -> None:
        self.turn = asyncio.Lock()
        self._engine_client = engine_client
        self._stage_ids = stage_ids

    async def call(self, method: str, names: tuple[str, ...], how: Mapping[str, bool]) -> Asked:
        replies = await self._engine_client.collective_rpc(
            method=method, args=names, kwargs=dict(how), stage_ids=self._stage_ids
        )
        asked = Asked()
        for number, reply in enumerate(replies):
            asked.take(number, reply)
        return asked


class Replicas:
    """The replicas of some stages.

    A replica's number is its slot in its stage's pool, and stays that after another one's death. With several
    stages it is the slot times their count, plus the place of its own among them.

    Args:
        engine_client: vLLM-Omni's ``AsyncOmni``.
        stage_ids: The stages.
    """

    def __init__(self, engine_client: Any, stage_ids: list[int]) -> None:
        self._everybody = _Everybody(engine_client, stage_ids)
        self._stages: list[Affinity] = []
        self._known: dict[int, _Replica] = {}
        pools = getattr(getattr(engine_client, "engine", None), "stage_pools", None) or []
        found = [affinity_of(pools[number]) for number in stage_ids if number < len(pools)]
        stages = [affinity for affinity in found if affinity is not None and affinity.loop is not None]
        if len(stages) == len(stage_ids):
            self._stages = stages
        else:
            log_once(
                logging.INFO,
                ("replicas",),
                "the replicas of stages %s are not reached one by one: a call about a session goes to all of "
                "them, in the queue of the requests",
                stage_ids,
            )

    def all(self) -> list[Callee]:
        """Every replica that is there."""
        if not self._stages:
            return [self._everybody]
        return [
            self._replica(place, slot, client)
            for place, affinity in enumerate(self._stages)
            for slot, client in affinity.attached().items()
        ]

    def attached(self) -> frozenset[int] | None:
        """Numbers of those that are there; ``None`` where they are not reached one by one."""
        if not self._stages:
            return None
        stages = enumerate(self._stages)
        return frozenset(
            self._number(place, slot) for place, affinity in stages for slot in affinity.attached()
        )

    def of(self, key: str) -> list[Callee]:
        """Those that have a session, or may have it; nobody where it is known to be gone.

        Args:
            key: Its id.
        """
        return self._where([key]) if self._stages else [self._everybody]

    def named(self, names: Iterable[str], how: Mapping[str, bool]) -> list[Callee]:
        """Those that have the sessions that names may mean; all, where nobody is known to.

        Args:
            names: Ids, or as a listing shows them.
            how: How a call takes them.
        """
        if not self._stages:
            return [self._everybody]
        keys = {key for name in names for affinity in self._stages for key in affinity.meant(name, how)}
        return (self._where(keys) if keys else []) or self.all()

    def forget(self, key: str) -> None:
        """A session has ended: none is lost any more that its replica could not be told of.

        Args:
            key: Its id.
        """
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

    def _where(self, keys: Iterable[str]) -> list[Callee]:
        """Each replica that has one of some sessions; of a stage that knows nothing of one, all."""
        found: dict[int, _Replica] = {}
        for place, affinity in enumerate(self._stages):
            attached = affinity.attached()
            for key in keys:
                home = affinity.homes.of(key)
                anywhere = home is None and not affinity.homes.is_lost(key)
                for slot, client in attached.items():
                    if anywhere or client is home:
                        found[self._number(place, slot)] = self._replica(place, slot, client)
        return list(found.values())

    def _number(self, place: int, slot: int) -> int:
        return slot * len(self._stages) + place

    def _replica(self, place: int, slot: int, client: object) -> _Replica:
        number = self._number(place, slot)
        known = self._known.get(number)
        if known is None or known.client is not client:
            known = self._known[number] = _Replica(self._stages[place], slot, client, number)
        return known

"""The hook on vLLM-Omni's pools of replicas: each step goes to the replica that has its session.

vLLM-Omni routes requests, and knows no sessions: with several replicas the steps of one would go to any of
them. So a request is bound to its session's home before vLLM-Omni looks for a replica. vLLM-Omni honours what
is bound, and lets go of it by itself.

A remote call about sessions goes to one replica, on the orchestrator's loop beside its requests: a call that
vLLM-Omni makes of them holds up the steps of all replicas until the longest is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vllm_omni_session_state.base.errors import SessionStateError, error_text
from vllm_omni_session_state.base.ids import DEFAULT
from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.omni.replicas.homes import Asking, Homes

ASK_EVERY_S = 0.5
"""Between two questions to replicas which of their sessions they have."""

PATIENCE_S = 2.0
"""For so long a new session waits for the answer where the table is full."""

_HOLDS, _EXPIRE = "session_state_holds", "session_state_expire"
_ENDS = ("session_state_close", "session_state_reset", _EXPIRE)


def sessions_split(what: str) -> str:
    """What follows for some stage where its sessions have no home."""
    return (
        f"with several replicas of {what}, steps of one session WILL go to different ones, and its rollout "
        "goes wrong unsaid; keep num_replicas at 1. Calls about sessions stop all replicas"
    )


class _Step(NamedTuple):
    """What a request says of its session."""

    session: str
    reset: bool
    close: bool


def step_of(extra_args: Mapping[str, Any] | None) -> _Step | None:
    """What vLLM-Omni's AR-Diffusion runner reads of a request; ``None`` for one that it refuses."""
    from vllm_omni.experimental.ar_diffusion.tick_protocol import ARDiffusionTickRequest  # noqa: PLC0415

    extra = extra_args or {}
    try:
        tick = ARDiffusionTickRequest.from_extra_args(extra)
    except ValueError:
        return None
    if tick is not None:
        return _Step(tick.session_id, tick.reset, tick.close_session)
    session = str(extra.get("session_id") or DEFAULT)
    return _Step(session, bool(extra.get("reset", False)), bool(extra.get("close_session", False)))


class Affinity:
    """The replicas in one stage's pool, and which of them has which session. ``strict``: see `Homes`.

    Attributes:
        homes: Of its sessions; of none where a session is one request.
        loop: The orchestrator's, ``None`` until it is known.
    """

    def __init__(self, pool: Any, *, strict: bool) -> None:
        self.homes = Homes(strict=strict, under_way=lambda request: _is_bound(pool, request))
        self.loop: asyncio.AbstractEventLoop | None = None
        self._pool = pool
        self._asking: asyncio.Task[None] | None = None
        self._newcomers = False
        self._mute: weakref.WeakSet[Any] = weakref.WeakSet()  # clients that cannot be asked
        self._note_loop()

    def live(self) -> dict[int, object]:
        """By its slot the client of each replica that can be given a step."""
        pool = self._pool
        if pool.is_distributed:
            slots = [slot for _, slot in pool._collect_serviceable_replicas()]
        else:
            slots = pool.available_replica_ids()
        found = {slot: pool.clients[slot] for slot in slots}
        if len(found) < 2:  # the only one is vLLM-Omni's to judge
            return found
        return {slot: client for slot, client in found.items() if _is_well(client)}

    def attached(self) -> dict[int, object]:
        """By its slot the client of each replica of the pool, whether it is well or not."""
        return {slot: client for slot, client in enumerate(self._pool.clients) if client is not None}

    async def submit(
        self, original: Callable[..., Any], request_id: str, req_state: Any, request: Any, **how: Any
    ) -> Any:
        """In the place of the pool's ``submit_initial``: a step goes to its session's home."""
        step = slot = None
        try:
            step = self._step(request_id, req_state, how)
            if step is not None:
                slot = await self._place(step, request_id)
        except SessionStateError as error:
            raise _of_one_request(error) from None
        except Exception as error:  # noqa: BLE001 - a hook never breaks serving
            what = sessions_split(f"stage {self._pool.stage_id}")
            log_once(logging.WARNING, ("affinity", what), "%s: %s", what, error_text(error))
            step = None
        got = await original(request_id, req_state, request, **how)
        if step is not None and got != slot:
            self.homes.went(step.session, request_id, got, self._pool.clients[got])
        if step is not None and step.close:
            self.homes.doubt(step.session)
            self._ask_soon()
        return got

    async def call(
        self, slot: int, client: object, method: str, names: tuple[str, ...], how: Mapping[str, bool]
    ) -> Any:
        """Call a method of one replica's workers, on the orchestrator's loop; what vLLM-Omni answers."""
        if self.attached().get(slot) is not client:
            return {"supported": False, "error": f"replica {slot} is gone"}
        meant = [self.meant(name, how) if method in _ENDS else [] for name in names]
        quiet = self.homes.quiet(key for keys in meant for key in keys)
        # No time limit: vLLM-Omni drops a call that waited too long behind a step, and the end with it.
        reply = await self._pool.collective_rpc(slot, method, None, names, dict(how))
        ranks = _ranks_of(reply)
        for at, keys in enumerate(meant):
            for key in keys:
                self._heard_of_end(method, key, at, ranks, quiet if len(keys) == 1 else {})
        self._ask_soon()
        return reply

    def forget(self, key: str) -> None:
        """A session has ended whose replica is gone, or that had none; on the orchestrator's loop."""
        home = self.homes.of(key)
        if all(client is not home for client in self.attached().values()):
            self.homes.forget(key)

    def meant(self, name: str, how: Mapping[str, bool]) -> list[str]:
        """The sessions that a name may mean, by how a call takes it."""
        return [name] if how.get("only_id") else self.homes.named(name)

    def may_have(self, client: object, key: str) -> bool:
        """Whether a replica has a session, or may have one of which nothing is known."""
        home = self.homes.of(key)
        return not self.homes.is_lost(key) if home is None else client is home

    def _heard_of_end(
        self, method: str, key: str, at: int, ranks: list[Mapping[str, Any]], quiet: Asking
    ) -> None:
        """What came of the end of a session; where a step may have come between, its home is asked."""
        failed = not ranks or not all(rank["ok"] for rank in ranks)
        expire = method == _EXPIRE
        if not failed and expire and not all(rank["gone"][at] for rank in ranks):
            return
        if failed or key not in quiet or (not expire and any(rank["used"][at] for rank in ranks)):
            self.homes.doubt(key)
        else:
            self.homes.heard({key: quiet[key]}, [False], [expire])

    def _step(self, request_id: str, req_state: Any, how: Mapping[str, Any]) -> _Step | None:
        """What a request says of its session; ``None`` for one whose replica is chosen already."""
        pool = self._pool
        self._note_loop()
        if _is_bound(pool, request_id) or how.get("affinity_request_id") is not None:
            return None
        params = how.get("params_override")
        if params is None:
            params = req_state.sampling_params_list[pool.stage_id]
        return step_of(getattr(params, "extra_args", None))

    async def _place(self, step: _Step, request_id: str) -> int | None:
        """Bind a request to its session's home; ``None`` where no replica is there."""
        homes, live = self.homes, self.live()
        if not live:
            return None
        if step.session not in homes:
            if homes.full:
                await self._make_room()
                live = self.live() or live
            self._newcomers = self._newcomers or len(live) > 1 or 2 * len(homes) > homes.most
        slot = homes.place(
            step.session,
            request_id,
            live,
            lambda slot: int(self._pool.replica_monitor_sample(slot)[1]),
            reset=step.reset,
        )
        if self._pool.is_distributed:
            self._pool._affinity[request_id] = self._pool._client_input_addr(live[slot])
        else:
            self._pool._request_bindings[request_id] = slot
        self._ask_soon()
        return slot

    async def _make_room(self) -> None:
        """Have the replicas asked for the oldest sessions, and wait for the answers a while."""
        self.homes.shed(self.attached())
        if not self.homes.full:
            return
        self._newcomers = True
        await asyncio.wait({asyncio.ensure_future(self._ask())}, timeout=PATIENCE_S)
        if self.homes.full and all(client in self._mute for client in self.attached().values()):
            self.homes.drop_oldest()

    def _note_loop(self) -> None:
        if self.loop is None:
            with contextlib.suppress(RuntimeError):  # none runs yet
                self.loop = asyncio.get_running_loop()

    def _ask_soon(self) -> None:
        """Have replicas asked in the background which sessions they have, if there is a reason to."""
        wanted = self._newcomers or self.homes.doubts
        if wanted and self.loop is not None and (self._asking is None or self._asking.done()):
            self._asking = self.loop.create_task(self._keep_asking())

    async def _keep_asking(self) -> None:
        while self._newcomers or self.homes.doubts:
            await asyncio.sleep(ASK_EVERY_S)
            await self._ask()

    async def _ask(self) -> None:
        oldest, self._newcomers = self._newcomers, False
        live = {slot: client for slot, client in self.attached().items() if client not in self._mute}
        asked = self.homes.to_ask(live, oldest=oldest)
        await asyncio.gather(*(self._ask_one(slot, live[slot], asking) for slot, asking in asked.items()))

    async def _ask_one(self, slot: int, client: object, asking: Asking) -> None:
        how = {"only_id": True}
        ranks = _ranks_of(await self._pool.collective_rpc(slot, _HOLDS, None, tuple(asking), how))
        if not ranks or not all(rank["ok"] and "lost" in rank for rank in ranks):
            self._mute.add(client)
            log_once(
                logging.INFO,
                ("mute", f"{self._pool.stage_id}", f"{slot}"),
                "replica %d of stage %s does not say which sessions it has: one that it lost counts as there",
                slot,
                self._pool.stage_id,
            )
            return
        each = [[rank[name] for rank in ranks] for name in ("found", "lost")]
        found, lost = ([any(said) for said in zip(*ranked, strict=True)] for ranked in each)
        self.homes.heard(asking, found, lost)


def _is_bound(pool: Any, request_id: str) -> bool:
    return pool.get_bound_replica_id(request_id) is not None


def _of_one_request(error: SessionStateError) -> Exception:
    """An error that fails its request and no other.

    Of those of which vLLM-Omni's dispatch does not end, it is the one whose words reach the client.
    """
    from vllm_omni.engine.errors import NativeKVHandoffError  # noqa: PLC0415

    refused: Exception = NativeKVHandoffError(str(error))
    return refused


def answer_of(reply: Any) -> Mapping[str, Any] | None:
    """What the ranks of a replica answer, in what vLLM-Omni hands back for it; ``None`` where they do not."""
    answer = reply[0] if isinstance(reply, list | tuple) and reply else reply
    return answer if isinstance(answer, Mapping) and "ranks" in answer else None


def _ranks_of(reply: Any) -> list[Mapping[str, Any]]:
    answer = answer_of(reply)
    return [] if answer is None else list(answer["ranks"])


def _is_well(client: Any) -> bool:
    """Whether a replica's process lives, as vLLM-Omni's own health check sees it."""
    try:
        client.check_health()
    except Exception:  # noqa: BLE001 - whatever it says
        return False
    return True

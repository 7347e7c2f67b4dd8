"""What an operator asks for over HTTP, and what is answered: plain data, or a refusal with its status.

Nothing here knows of HTTP but the numbers. No answer repeats a name as it was asked for: whoever reads it
may be shown hashes only, and an id is a secret.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from vllm_omni_session_state.base.ids import may_be_shown
from vllm_omni_session_state.omni.admin import aggregate
from vllm_omni_session_state.omni.admin.stats_poller import StatsPoller
from vllm_omni_session_state.omni.replicas.calls import Asked
from vllm_omni_session_state.omni.server.worker_client import WorkerClient

ACTS = {
    "close": ("found", "closed"),
    "reset": ("found", "reset"),
    "park": ("parked", "parked"),
    "restore": ("restored", "restored"),
}
"""By what can be done to a session the key under which a rank says whether it is done, and its word."""

STATUS = {
    "not_found": 404,
    "in_use": 409,
    "refused": 409,
    "ambiguous": 409,
    "bad_request": 422,
    "worker_failed": 502,
    "timeout": 504,
}
"""By the type of an error the status of the answer."""


class RefusedError(Exception):
    """What is answered instead.

    Attributes:
        status: Of the answer.
        content: The answer.
    """

    def __init__(self, kind: str, message: str, **more: object) -> None:
        self.status = STATUS[kind]
        self.content = {"error": {"type": kind, "message": message, "code": self.status, **more}}
        super().__init__(message)


class AdminService:
    """Answers for the workers of one API server, and from the last known figures."""

    def __init__(self, workers: WorkerClient, figures: StatsPoller) -> None:
        self._workers = workers
        self._figures = figures
        self._under_way: set[asyncio.Task[Asked]] = set()

    async def sessions(self, *, timeout_s: float) -> dict[str, Any]:
        """All sessions.

        Raises:
            RefusedError: With what is to be answered; so for all methods here.
        """
        known = await self._known(timeout_s=timeout_s)
        rows = aggregate.rows(known.answers)
        if known.whole:
            self._figures.saw(rows)
        agree = not known.failures and all(answer["agree"] for answer in known.answers.values())
        return {
            "sessions": rows,
            "agree": agree and not aggregate.split(rows),
            "answered": sorted({replica for replica, _ in aggregate.ranks_of(known.answers)}),
            "age_s": round(known.age_s, 3),
        }

    async def session(self, name: str, *, timeout_s: float) -> dict[str, Any]:
        """One session with its values, never their content."""
        asked = await self._named("session_state_inspect", name, timeout_s=timeout_s)
        row = aggregate.one(asked.answers)
        assert row is not None, "somebody has found it"
        return {**row, "answered": sorted(asked.answers)}

    async def act(self, how: str, name: str, *, timeout_s: float) -> dict[str, Any]:
        """Close, reset, park or restore one session that nobody uses."""
        only_idle = how in ("close", "reset")
        asked = await self._named(f"session_state_{how}", name, timeout_s=timeout_s, only_idle=only_idle)
        there, (key, done) = _found(asked), ACTS[how]
        if any(rank["used"][0] for _, rank in there):
            what = "the session is in use; nothing has changed. Ask again between two requests"
            raise RefusedError("in_use", what)
        if not all(rank[key][0] for _, rank in there):
            raise RefusedError("refused", f"the session is not {done}: the budgets have no room")
        replicas = sorted({replica for replica, _ in there})
        home = aggregate.home_of(replicas)
        return {
            "session": there[0][1]["shown"][0],
            "done": done,
            "home": home,
            "replicas": replicas,
            "agree": home is not None and all(asked.answers[replica]["agree"] for replica in replicas),
        }

    async def _known(self, *, timeout_s: float) -> Asked:
        """What is known of all sessions, with their rows; it waits for workers where that delays no step."""
        slow = False
        try:
            await asyncio.wait_for(self._figures.fresh(), timeout_s)
        except (asyncio.TimeoutError, TimeoutError):
            slow = True
        except Exception as error:
            raise _failed(error) from error
        known = await asyncio.to_thread(self._figures.look, rows=True)
        if known is None and slow:
            what = f"no worker answered within timeout_s={timeout_s:g}: none has yet"
            raise RefusedError("timeout", what, last_known=None)
        if known is None:
            known = Asked()
        self._judge(known, partly=True)
        self._figures.want()
        return known

    async def _named(self, method: str, name: str, *, timeout_s: float, **how: bool) -> Asked:
        """Ask about the one session that a name means; it is asked by what is shown before it is by an id.

        Each worker looks among its own sessions, and a name that one of them takes for what is shown of a
        session must be no other's id elsewhere. So only when nobody is shown like that, it is an id.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        if may_be_shown(name):
            asked = await self._ask(method, name, timeout_s=timeout_s, only_shown=True, **how)
            if _found(asked):
                return asked
            timeout_s = max(0.0, until - loop.time())
        asked = await self._ask(method, name, timeout_s=timeout_s, only_id=True, **how)
        if not _found(asked):
            what = "there is no such session; names are shown by GET /v1/session_state/sessions"
            raise RefusedError("not_found", what)
        return asked

    async def _ask(self, method: str, name: str, *, timeout_s: float, **how: bool) -> Asked:
        sent = asyncio.Event()
        task = asyncio.get_running_loop().create_task(self._workers.ask(method, name, sent=sent, **how))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise self._slow(task, timeout_s, pending=sent.is_set())
        error = task.exception()
        if error is not None:
            raise _failed(error)
        self._figures.want()
        self._judge(task.result(), partly=False)
        return task.result()

    def _slow(self, task: asyncio.Task[Asked], timeout_s: float, *, pending: bool) -> RefusedError:
        if pending:
            task.add_done_callback(_let_be)
            what = "the call is on its way and takes effect when the step that runs is over"
        else:
            task.cancel()
            what = "others are before it; nothing was sent"
        what = f"no worker answered within timeout_s={timeout_s:g}: {what}"
        known, last = self._figures.look(), None
        if known is not None:
            last = {"age_s": round(known.age_s, 3), "figures": aggregate.totals(known.answers)}
        return RefusedError("timeout", what, pending=pending, last_known=last)

    @staticmethod
    def _judge(asked: Asked, *, partly: bool) -> None:
        """Refuse for what failed on some rank, or ``partly``: unless another one did well."""
        if partly and any(True for _ in aggregate.ranks_of(asked.answers)):
            return
        failed = [
            (f"replica {replica} rank {rank['rank']}", rank)
            for replica, answer in asked.answers.items()
            for rank in answer["ranks"]
            if not rank["ok"]
        ]
        if failed and all(rank.get("refused") for _, rank in failed):  # in our own words: no id is in them
            said = "; ".join(f"{where}: {_words(rank['error'])}" for where, rank in failed)
            errors = [
                error for _, rank in failed for error in rank.get("errors", [rank]) if error is not None
            ]
            unclear = any(error.get("ambiguous") for error in errors)
            raise RefusedError("ambiguous" if unclear else "refused", said)
        if failed or not asked.answers:
            said = ", ".join(f"{where} ({rank['error'].partition(':')[0]})" for where, rank in failed)
            where = said or "every replica: no worker manages session state"
            raise RefusedError("worker_failed", f"a call failed on {where}; see the worker's log")


def _found(asked: Asked) -> list[tuple[int, Mapping[str, Any]]]:
    """The ranks that have the one session that was asked for, each with its replica."""
    return [
        (replica, rank)
        for replica, rank in aggregate.ranks_of(asked.answers)
        if (rank["found"][0] if isinstance(rank["found"], list) else rank["found"])
    ]


def _failed(error: BaseException) -> RefusedError:
    # What an error of vLLM-Omni says can name an id.
    what = f"the call failed ({type(error).__name__}); see the server's log"
    return RefusedError("worker_failed", what)


def _words(error: str) -> str:
    return error.removeprefix("SessionStateError: ").partition("Error: ")[2] or error


def _let_be(task: asyncio.Task[Asked]) -> None:
    """Nobody waits for it any more; its error has been said by the worker."""
    if not task.cancelled():
        task.exception()

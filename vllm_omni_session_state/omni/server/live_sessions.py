"""Which sessions an API server process has going, and the one end that each of them gets.

A session is live from its first step here until nobody here goes on with it. Then its end is sent to the
worker, once, and a step that names the session again waits until it has arrived: what an end frees is
never what came after it. An end also waits for the steps that began before it, so that one that is still
queued cannot bring a closed session back.

Whoever may go on with a session is an owner of it: a robot's connection, or the rollout endpoints. Several
connections can have one session (all that name none have "default"), and it ends with the last of them.

It all runs on the server's one event loop. A call to the workers that fails is said, and changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_session_state.base.errors import SessionStateError, error_text
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.base.log import LOGGER, log_rarely
from vllm_omni_session_state.omni.server.worker_client import WorkerClient, WorkersStoppedError

_SOON = range(2, 4)
"""Places in the line of steps whose sessions are brought back early. The first one runs, and the worker hears
of it when that is over: the second one begins then, and behind it is time for those that follow.
"""


@dataclass(slots=True)
class _Live:
    """One session that is going.

    Attributes:
        owners: Who may go on with it; empty while it is kept for somebody to resume it.
        named: Whether a robot named it by an id of its own, and may do so again.
        running: Steps under way.
        quiet: Set while there is none.
        timers: What is done with it while no step is under way, each by its name; ``end``: while it is kept.
    """

    owners: set[object] = field(default_factory=set)
    named: bool = False
    running: int = 0
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)

    def cancel(self, *names: str) -> None:
        """Timers of these names act on it no longer; without a name, none does."""
        for name in names or tuple(self.timers):
            if (timer := self.timers.pop(name, None)) is not None:
                timer.cancel()


class LiveSessions:
    """The live sessions of one API server process. Times are in seconds; 0: never.

    Args:
        workers: Who has the sessions.
        resume_s: For so long a named session is kept when its last owner has left.
        idle_park_s: So long after its last step a session is parked.
        expire_s: So long after its last step a session ends if it is parked then.
        idle_drop_s: So long after its last step a session is marked stale; if that fails it is tried again.
        early: Whether a session whose step waits behind others' is brought back early.
    """

    def __init__(
        self,
        workers: WorkerClient,
        *,
        resume_s: float = 0.0,
        idle_park_s: float = 0.0,
        expire_s: float = 0.0,
        idle_drop_s: float = 0.0,
        early: bool = False,
    ) -> None:
        self._workers = workers
        self._resume_s = resume_s
        self._idle_park_s = idle_park_s
        self._expire_s = expire_s
        self._idle_drop_s = idle_drop_s
        self._early = early
        self._steps: dict[object, str] = {}  # under way, of all sessions, in the order in which they came
        self._sent: set[asyncio.Task[None]] = set()
        self._live: dict[str, _Live] = {}
        self._arriving: dict[str, asyncio.Task[None]] = {}
        self._over = False  # the workers are stopped, and that was said

    def __contains__(self, key: str) -> bool:
        return key in self._live

    def __len__(self) -> int:
        return len(self._live)

    @asynccontextmanager
    async def step(self, key: str, owner: object, *, named: bool = False) -> AsyncIterator[None]:
        """One step of a session, which is live from here on. Whether it is ``named``: see `_Live`."""
        await self._wait_for_pending_end(key)
        live = self._live.setdefault(key, _Live())
        live.owners.add(owner)
        live.cancel()
        live.named = live.named or named
        live.running += 1
        live.quiet.clear()
        this = object()
        self._steps[this] = key
        if len(self._steps) - 1 in _SOON:
            self._bring_back(key)
        try:
            yield
        finally:
            del self._steps[this]
            for soon in list(self._steps.values())[_SOON.start : _SOON.stop]:
                self._bring_back(soon)
            live.running -= 1
            if not live.running:
                live.quiet.set()
                if self._live.get(key) is live:  # from now on it grows old
                    self._later(self._idle_park_s, self._park, key, live)
                    self._later(self._expire_s, self._expire, key, live)
                    self._later(self._idle_drop_s, self._mark, key, live)

    async def resume(self, key: str, owner: object) -> bool:
        """Whether ``owner`` goes on with a session that a robot named before, instead of starting it anew.

        It may be kept, or still another connection's: a robot that lost its network is back before the
        server notices. That connection has it no longer.
        """
        await self._wait_for_pending_end(key)
        live = self._live.get(key)
        if not self._resume_s or live is None or not live.named:
            return False
        live.owners = {owner}
        live.cancel("end")
        there = await self._ask(self._workers.holds, key, "cannot ask for session %s")
        there = there and self._live.get(key) is live
        if not there and not self._over:
            LOGGER.warning("session %s was kept and is gone: its rollout starts over", display_id(key))
        return there

    def leave(self, owner: object, *, only: str | None = None, keep: bool = False) -> None:
        """Note that ``owner`` goes on with none of its sessions, or not with ``only`` that one.

        Those that nobody else has end, or with ``keep`` are kept for ``resume_s`` if they can be resumed.
        """
        for key, live in list(self._live.items()):
            if owner not in live.owners or only not in (None, key):
                continue
            live.owners.discard(owner)
            if live.owners:
                continue
            if keep and live.named and self._resume_s:
                live.timers["end"] = asyncio.get_running_loop().call_later(self._resume_s, self.end, key)
            else:
                self.end(key)

    def end(self, key: str) -> None:
        """End a session for all its owners; nothing happens where it is not live."""
        live = self._live.pop(key, None)
        if live is not None:
            live.cancel()
            self._before_steps(key, self._end(key, live))

    def tell_the_time(self) -> None:
        """Have the workers know that sessions are going to be marked."""

        async def tell() -> None:
            try:
                await self._workers.tell_the_time()
            except Exception as error:  # noqa: BLE001 - serving goes on
                LOGGER.warning("idle_drop_s marks nobody: %s", error_text(error))

        self._begin(tell())

    async def _end(self, key: str, live: _Live) -> None:
        await live.quiet.wait()
        await self._ask(self._workers.close, key, "the end of session %s did not reach the worker")

    def _later(self, after_s: float, act: Callable[[str, _Live], None], key: str, live: _Live) -> None:
        if after_s:
            loop = asyncio.get_running_loop()
            live.timers[act.__name__] = loop.call_later(after_s, act, key, live)

    def _park(self, key: str, _live: _Live) -> None:
        self._begin(self._ask(self._workers.park, key, "session %s was not parked"))

    def _expire(self, key: str, live: _Live) -> None:
        async def expire() -> None:
            gone = await self._ask(self._workers.expire, key, "session %s did not expire")
            if self._live.get(key) is not live:
                return  # it has ended meanwhile
            if gone:
                del self._live[key]
                live.cancel()
            else:
                self._later(self._expire_s, self._expire, key, live)

        # As an end: a step that comes meanwhile waits until it is known whether it goes on or starts over.
        self._before_steps(key, expire())

    def _mark(self, key: str, live: _Live) -> None:
        async def mark() -> None:
            marked = await self._ask(self._workers.mark_stale, key, "session %s was not marked stale")
            if not marked and self._live.get(key) is live and not self._over:
                self._later(self._idle_drop_s, self._mark, key, live)

        # A step that comes meanwhile waits, so that it unmarks what is marked before it.
        self._before_steps(key, mark())

    def _bring_back(self, key: str) -> None:
        if self._early:
            self._begin(self._ask(self._workers.begin_restore, key, "session %s was not brought back early"))

    def _begin(self, call: Coroutine[Any, Any, Any]) -> None:
        """Have something done that nobody waits for."""
        task = asyncio.get_running_loop().create_task(call)
        self._sent.add(task)  # a loop holds its tasks only weakly
        task.add_done_callback(self._sent.discard)

    def _before_steps(self, key: str, call: Coroutine[Any, Any, None]) -> None:
        """Have something done for which a step of that session waits, behind what it waits for already."""
        earlier = self._arriving.get(key)

        async def arrive() -> None:
            if earlier is not None:
                await asyncio.wait({earlier})
            await call

        def arrived(task: asyncio.Task[None]) -> None:
            if self._arriving.get(key) is task:
                del self._arriving[key]

        task = self._arriving[key] = asyncio.get_running_loop().create_task(arrive())
        task.add_done_callback(arrived)

    async def _wait_for_pending_end(self, key: str) -> None:
        """Wait until every end of that session that is on its way has arrived."""
        while (task := self._arriving.get(key)) is not None:
            await asyncio.wait({task})
            await asyncio.sleep(0)  # its callback runs

    async def _ask(self, call: Callable[[str], Awaitable[bool | None]], key: str, failed: str) -> bool:
        """What the workers answer, true for a call without an answer; false where it fails, which is said."""
        try:
            return await call(key) is not False
        except WorkersStoppedError:
            if not self._over:
                going = {key} | self._live.keys() | self._arriving.keys()
                LOGGER.info(
                    "the server stops: no ends of %d sessions are sent to its workers, which stop too",
                    len(going),
                )
            self._over = True
        except SessionStateError as error:  # a refusal comes again and again
            log_rarely(logging.WARNING, ("ends", failed), f"{failed}: %s", display_id(key), error)
        except Exception as error:  # noqa: BLE001 - the session is where it was, and goes on
            LOGGER.warning(f"{failed}: %s", display_id(key), error_text(error))
        return False

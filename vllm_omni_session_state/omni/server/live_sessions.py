"""Which sessions an API server process has going, and the one end that each of them gets.

A session is live from its first step here until nobody here goes on with it. Then its end is sent to the
worker, once, and a step that names the session again waits until it has arrived: what an end frees is
never what came after it. An end also waits for the steps that began before it, so that one that is still
queued cannot bring a closed session back.

Whoever may go on with a session is an owner of it: a robot's connection, or the rollout endpoints. Several
connections can have one session (all that name none have "default"), and it ends with the last of them.

It all runs on the server's one event loop; nothing here knows vLLM-Omni.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_session_state.base.errors import SessionStateError
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.base.log import LOGGER, log_rarely

_SOON = range(2, 4)
"""Places in the line of steps whose sessions are brought back early. The first one runs, and the worker hears
of it when that is over: the second one begins then, and behind it is time for those that follow.
"""


class WorkersStoppedError(Exception):
    """The server stops, and its workers with all their sessions: nothing can be asked of them, or need be."""


@dataclass(slots=True)
class _Live:
    """One session that is going.

    Attributes:
        owners: Who may go on with it; empty while it is kept for somebody to resume it.
        named: Whether a robot named it by an id of its own, and may do so again.
        running: Steps under way.
        quiet: Set while there is none.
        expiry: Ends it, while it is kept.
        parking: Parks it, while no step is under way.
        aging: Asks whether it is parked and ends it then, while no step is under way.
        marking: Marks it stale, while no step is under way.
    """

    owners: set[object] = field(default_factory=set)
    named: bool = False
    running: int = 0
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    expiry: asyncio.TimerHandle | None = None
    parking: asyncio.TimerHandle | None = None
    aging: asyncio.TimerHandle | None = None
    marking: asyncio.TimerHandle | None = None

    def cease(self) -> None:
        """No timer acts on it any more."""
        self.go()
        if self.expiry is not None:
            self.expiry.cancel()

    def go(self) -> None:
        """It is stepped: it grows old no longer."""
        for timer in (self.parking, self.aging, self.marking):
            if timer is not None:
                timer.cancel()

    def go_on(self, owner: object) -> None:
        """Note that ``owner`` goes on with it; it is kept for nobody else."""
        self.owners.add(owner)
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None


class LiveSessions:
    """The live sessions of one API server process.

    Args:
        close: Ends a session in the workers. An exception is said and changes nothing here.
        holds: Whether the workers have a session.
        resume_s: Seconds for which a named session is kept when its last owner has left; 0 ends it.
        park: Parks a session in the workers. An exception is said and changes nothing here.
        idle_park_s: Seconds after its last step when a session is parked; 0 parks none.
        expire: Ends a session in the workers if it is parked there; whether it is gone. An exception is said
            and changes nothing here.
        expire_s: Seconds after its last step when a parked session ends; 0 ends none.
        mark: Marks a session stale in the workers. An exception is said, and it is tried again.
        idle_drop_s: Seconds after its last step when a session is marked stale; 0 marks none.
        begin: Has the workers begin to bring a session back whose step waits behind others'. An exception is
            said and changes nothing here.
    """

    def __init__(
        self,
        close: Callable[[str], Awaitable[None]],
        holds: Callable[[str], Awaitable[bool]],
        *,
        resume_s: float = 0.0,
        park: Callable[[str], Awaitable[None]] | None = None,
        idle_park_s: float = 0.0,
        expire: Callable[[str], Awaitable[bool]] | None = None,
        expire_s: float = 0.0,
        mark: Callable[[str], Awaitable[None]] | None = None,
        idle_drop_s: float = 0.0,
        begin: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._close = close
        self._holds = holds
        self._resume_s = resume_s
        self._park = park
        self._idle_park_s = idle_park_s
        self._expire = expire
        self._expire_s = expire_s
        self._mark = mark
        self._idle_drop_s = idle_drop_s
        self._begin = begin
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
        """One step of a session, which is live from here on.

        Args:
            key: The session's id.
            owner: Who takes the step.
            named: Whether a robot named the session by an id of its own.
        """
        await self._wait_for_pending_end(key)
        live = self._live.get(key)
        if live is None:
            live = self._live[key] = _Live()
        live.go_on(owner)
        live.named = live.named or named
        live.running += 1
        live.quiet.clear()
        this = object()
        self._steps[this] = key
        if len(self._steps) - 1 in _SOON:
            self._come_soon(key)
        live.go()
        try:
            yield
        finally:
            del self._steps[this]
            for soon in list(self._steps.values())[_SOON.start : _SOON.stop]:
                self._come_soon(soon)
            live.running -= 1
            if not live.running:
                live.quiet.set()
                if self._live.get(key) is live:
                    self._watch(key, live)

    async def resume(self, key: str, owner: object) -> bool:
        """Whether ``owner`` goes on with a session that a robot named before, instead of starting it anew.

        It may be kept, or still another connection's: a robot that lost its network is back before the
        server notices. That connection has it no longer.

        Args:
            key: The id by which the robot names it.
            owner: The connection that names it.
        """
        await self._wait_for_pending_end(key)
        live = self._live.get(key)
        if not self._resume_s or live is None or not live.named:
            return False
        live.owners.clear()
        live.go_on(owner)
        there = False
        try:
            there = await self._holds(key)
        except Exception as error:  # noqa: BLE001 - the robot's step must not fail by it
            self._say(key, "cannot ask for session %s", error)
        there = there and self._live.get(key) is live
        if not there and not self._over:
            LOGGER.warning("session %s was kept and is gone: its rollout starts over", display_id(key))
        return there

    def leave(self, owner: object, *, only: str | None = None, keep: bool = False) -> None:
        """Note that ``owner`` goes on with none of its sessions; those that nobody else has end.

        Args:
            owner: Who leaves.
            only: The one session that it leaves.
            keep: Keep those that can be resumed for as long as the settings say.
        """
        for key, live in list(self._live.items()):
            if owner not in live.owners or only not in (None, key):
                continue
            live.owners.discard(owner)
            if live.owners:
                continue
            if keep and live.named and self._resume_s:
                live.expiry = asyncio.get_running_loop().call_later(self._resume_s, self.end, key)
            else:
                self.end(key)

    def end(self, key: str) -> None:
        """End a session for all its owners; nothing happens where it is not live."""
        live = self._live.pop(key, None)
        if live is None:
            return
        live.cease()
        self._before_steps(key, self._deliver(key, live))

    def _before_steps(self, key: str, call: Coroutine[Any, Any, None]) -> None:
        """Have the workers do something for which a step of that session waits, behind what waits already."""
        earlier = self._arriving.get(key)

        async def arrive() -> None:
            if earlier is not None:
                await asyncio.wait({earlier})
            await call

        task = self._arriving[key] = asyncio.get_running_loop().create_task(arrive())
        task.add_done_callback(lambda done: self._arrived(key, done))

    async def _deliver(self, key: str, live: _Live) -> None:
        await live.quiet.wait()
        try:
            await self._close(key)
        except Exception as error:  # noqa: BLE001 - nobody waits for it who could do better
            self._say(key, "the end of session %s did not reach the worker", error)

    def _watch(self, key: str, live: _Live) -> None:
        """No step is under way: from now on the session grows old."""
        loop = asyncio.get_running_loop()
        if self._park is not None and self._idle_park_s:
            live.parking = loop.call_later(self._idle_park_s, self._send, key, self._park, "was not parked")
        if self._expire is not None and self._expire_s:
            live.aging = loop.call_later(self._expire_s, self._end_old, key, live, self._expire)
        self._mark_later(key, live)

    def tell_the_time(self, tell: Callable[[], Awaitable[None]]) -> None:
        """Have the workers know that sessions are going to be marked."""

        async def send() -> None:
            try:
                await tell()
            except Exception as error:  # noqa: BLE001 - serving goes on
                LOGGER.warning("idle_drop_s marks nobody: %s: %s", type(error).__name__, error)

        task = asyncio.get_running_loop().create_task(send())
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)

    def _mark_later(self, key: str, live: _Live) -> None:
        if self._mark is not None and self._idle_drop_s:
            loop = asyncio.get_running_loop()
            live.marking = loop.call_later(self._idle_drop_s, self._mark_old, key, live, self._mark)

    def _mark_old(self, key: str, live: _Live, mark: Callable[[str], Awaitable[None]]) -> None:
        async def tell() -> None:
            try:
                await mark(key)
            except Exception as error:  # noqa: BLE001 - the session goes on
                self._say(key, "session %s was not marked stale", error)
                if self._live.get(key) is live and not self._over:
                    self._mark_later(key, live)

        # A step that comes meanwhile waits, so that it unmarks what is marked before it.
        self._before_steps(key, tell())

    def _end_old(self, key: str, live: _Live, expire: Callable[[str], Awaitable[bool]]) -> None:
        async def ask() -> None:
            gone = False
            try:
                gone = await expire(key)
            except Exception as error:  # noqa: BLE001 - the session is where it was, and goes on
                self._say(key, "session %s did not expire", error)
            if self._live.get(key) is not live:
                return  # it has ended meanwhile
            if gone:
                del self._live[key]
                live.cease()
            else:
                loop = asyncio.get_running_loop()
                live.aging = loop.call_later(self._expire_s, self._end_old, key, live, expire)

        # As an end: a step that comes meanwhile waits until it is known whether it goes on or starts over.
        self._before_steps(key, ask())

    def _come_soon(self, key: str) -> None:
        if self._begin is not None:
            self._send(key, self._begin, "was not brought back early")

    def _send(self, key: str, call: Callable[[str], Awaitable[None]], otherwise: str) -> None:
        """Have the workers do something that nobody waits for; the session goes on where it fails."""

        async def send() -> None:
            try:
                await call(key)
            except Exception as error:  # noqa: BLE001 - the session is where it was, and goes on
                self._say(key, f"session %s {otherwise}", error)

        task = asyncio.get_running_loop().create_task(send())
        self._sent.add(task)  # a loop holds its tasks only weakly
        task.add_done_callback(self._sent.discard)

    def _say(self, key: str, what: str, error: Exception) -> None:
        """Say what went wrong with one session; refusals come again and again.

        Args:
            key: Of the session.
            what: What went wrong, with a place for how the session is shown.
            error: Why.
        """
        if isinstance(error, WorkersStoppedError):
            if not self._over:
                going = {key} | self._live.keys() | self._arriving.keys()
                LOGGER.info(
                    "the server stops: no ends of %d sessions are sent to its workers, which stop too",
                    len(going),
                )
            self._over = True
        elif isinstance(error, SessionStateError):
            log_rarely(logging.WARNING, ("ends", what), f"{what}: %s", display_id(key), error)
        else:
            LOGGER.warning(f"{what}: %s: %s", display_id(key), type(error).__name__, error)

    def _arrived(self, key: str, task: asyncio.Task[None]) -> None:
        if self._arriving.get(key) is task:
            del self._arriving[key]

    async def _wait_for_pending_end(self, key: str) -> None:
        """Wait until every end of that session that is on its way has arrived."""
        while (task := self._arriving.get(key)) is not None:
            await asyncio.wait({task})
            await asyncio.sleep(0)  # its callback runs

"""Ends with workers behind them that are a list of what reached them; vLLM-Omni is not here."""

import asyncio

from vllm_omni_session_state.omni.server.live_sessions import LiveSessions


class Workers:
    """Takes ends and steps down in the order in which they arrive; a call takes as long as it is told."""

    def __init__(self, *, slow=False):
        self.arrived = []
        self.sessions = set()
        self.let_through = asyncio.Event()
        if not slow:
            self.let_through.set()

    async def close(self, key):
        await self.let_through.wait()
        self.arrived.append(key)
        self.sessions.discard(key)

    async def holds(self, key):
        return key in self.sessions


class Server:
    """Ends with workers behind them.

    Args:
        slow: Whether calls wait until they are let through.
        calls: What a test has the workers do at a call, by its name.
        **times: Of the sessions.
    """

    def __init__(self, *, slow=False, calls=None, **times):
        self.workers = Workers(slow=slow)
        vars(self.workers).update(calls or {})
        self.ends = LiveSessions(self.workers, **times)

    async def step(self, key, owner="a", *, named=True, until=None):
        async with self.ends.step(key, owner, named=named):
            if until is not None:
                await until.wait()
            self.workers.sessions.add(key)

    @property
    def arrived(self):
        return self.workers.arrived


async def soon():
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(test):
    """A test that is a coroutine; it must end."""

    def running():
        asyncio.run(asyncio.wait_for(test(), 10))

    running.__name__ = test.__name__
    return running

"""The one end that each session gets, whoever brings it about and in whatever order things arrive.

The workers are a list of what reached them; the host is not here.
"""

import asyncio
import logging

import pytest

from vllm_omni_session_state.omni.ends import Ends


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
    """Ends with workers behind them."""

    def __init__(self, *, slow=False, **settings):
        self.workers = Workers(slow=slow)
        self.ends = Ends(self.workers.close, self.workers.holds, **settings)

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


@run
async def test_a_session_ends_once_when_its_last_owner_leaves():
    server = Server()
    await server.step("x", "a")
    await server.step("x", "b")
    server.ends.leave("a")
    await soon()
    assert server.arrived == []
    server.ends.leave("b")
    server.ends.leave("b")
    server.ends.end("x")
    await soon()
    assert server.arrived == ["x"]
    assert len(server.ends) == 0


@run
async def test_a_session_that_client_and_server_end_together_ends_once():
    server = Server(slow=True)
    await server.step("x", "a")
    server.ends.end("x")
    server.ends.leave("a")
    server.ends.end("x")
    await soon()
    server.workers.let_through.set()
    await soon()
    assert server.arrived == ["x"]


@run
async def test_a_session_that_never_took_a_step_has_no_end():
    server = Server()
    server.ends.end("x")
    server.ends.leave("a")
    await soon()
    assert server.arrived == []


@run
async def test_a_close_waits_for_the_steps_that_began_before_it():
    server = Server()
    held, more = asyncio.Event(), asyncio.Event()
    steps = [asyncio.create_task(server.step("x", "a", until=until)) for until in (held, more)]
    await soon()
    server.ends.end("x")
    await soon()
    assert server.arrived == []
    held.set()
    await soon()
    assert server.arrived == []
    more.set()
    await asyncio.gather(*steps)
    await soon()
    assert server.arrived == ["x"]
    assert server.workers.sessions == set()


@run
async def test_a_step_after_a_close_begins_when_the_close_has_arrived():
    server = Server(slow=True)
    await server.step("x", "a")
    server.ends.end("x")
    later = asyncio.create_task(server.step("x", "b"))
    await soon()
    assert not later.done()
    server.workers.let_through.set()
    await later
    assert server.arrived == ["x"]
    assert server.workers.sessions == {"x"}
    assert "x" in server.ends


@run
async def test_a_session_that_comes_again_gets_another_end():
    server = Server()
    for _ in range(3):
        await server.step("x", "a")
        server.ends.leave("a")
    await soon()
    assert server.arrived == ["x"] * 3


@run
async def test_an_abandoned_step_does_not_hold_its_end_back():
    server = Server()
    step = asyncio.create_task(server.step("x", "a", until=asyncio.Event()))
    await soon()
    step.cancel()
    server.ends.leave("a")
    await soon()
    assert server.arrived == ["x"]


@run
async def test_sessions_do_not_wait_for_each_other():
    server = Server()
    step = asyncio.create_task(server.step("x", "a", until=asyncio.Event()))
    await server.step("y", "b")
    server.ends.end("x")
    server.ends.leave("b")
    await soon()
    assert server.arrived == ["y"]
    step.cancel()


def test_a_worker_that_fails_is_said_and_the_next_end_goes_out(caplog):
    async def scenario():
        server = Server()
        reached = []

        async def close(key):
            reached.append(key)
            raise RuntimeError("rank 1: out of memory")

        server.ends._close = close
        for key in ("x", "y"):
            await server.step(key)
            server.ends.end(key)
            await soon()
        await server.step("x")
        return reached

    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        assert asyncio.run(scenario()) == ["x", "y"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "RuntimeError: rank 1: out of memory" in said[0]
    assert "x" not in said[0].split("session ")[1].split()[0]


@run
async def test_without_the_setting_nobody_resumes():
    server = Server()
    await server.step("x", "a")
    assert not await server.ends.resume("x", "b")
    server.ends.leave("a", keep=True)
    assert not await server.ends.resume("x", "b")
    await soon()
    assert server.arrived == ["x"]


@run
async def test_a_named_session_is_kept_for_a_while_and_then_ends():
    server = Server(resume_s=0.05)
    await server.step("x", "a")
    server.ends.leave("a", keep=True)
    await asyncio.sleep(0.01)
    assert server.arrived == []
    await asyncio.sleep(0.1)
    assert server.arrived == ["x"]
    assert not await server.ends.resume("x", "b")


@run
async def test_who_names_a_kept_session_goes_on_with_it():
    server = Server(resume_s=0.05)
    await server.step("x", "a")
    server.ends.leave("a", keep=True)
    assert await server.ends.resume("x", "b")
    await server.step("x", "b")
    await asyncio.sleep(0.1)
    assert server.arrived == []
    server.ends.leave("b", keep=True)
    await asyncio.sleep(0.1)
    assert server.arrived == ["x"]


@run
async def test_a_kept_session_that_is_named_anew_is_not_ended_under_it():
    server = Server(resume_s=0.05)
    await server.step("x", "a")
    server.ends.leave("a", keep=True)
    await server.step("x", "b")
    await asyncio.sleep(0.1)
    assert server.arrived == []


@run
async def test_a_robot_that_is_back_before_its_old_connection_is_gone_goes_on():
    server = Server(resume_s=0.05)
    await server.step("x", "old")
    assert await server.ends.resume("x", "new")
    await server.step("x", "new")
    server.ends.leave("old", keep=True)
    await asyncio.sleep(0.1)
    assert server.arrived == []
    server.ends.leave("new")
    await soon()
    assert server.arrived == ["x"]


@run
async def test_a_session_that_no_robot_named_is_neither_kept_nor_resumed():
    server = Server(resume_s=60)
    await server.step("default", "a", named=False)
    assert not await server.ends.resume("default", "b")
    server.ends.leave("a", keep=True)
    await soon()
    assert server.arrived == ["default"]


@run
async def test_a_kept_session_can_be_ended_before_its_time():
    server = Server(resume_s=0.05)
    await server.step("x", "a")
    server.ends.leave("a", keep=True)
    server.ends.end("x")
    await asyncio.sleep(0.1)
    assert server.arrived == ["x"]


@run
async def test_the_time_of_a_session_that_has_ended_does_not_end_its_next_life():
    server = Server(resume_s=0.05)
    await server.step("x", "a")
    server.ends.leave("a", keep=True)
    server.ends.end("x")
    await server.step("x", "b")
    await asyncio.sleep(0.1)
    assert server.arrived == ["x"]
    assert "x" in server.ends


def test_a_kept_session_that_the_worker_lost_starts_over_and_is_said(caplog):
    async def scenario():
        server = Server(resume_s=60)
        await server.step("x", "a")
        server.ends.leave("a", keep=True)
        server.workers.sessions.clear()
        return await server.ends.resume("x", "b")

    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        assert asyncio.run(scenario()) is False
    assert "its rollout starts over" in caplog.text


def test_a_worker_that_cannot_be_asked_lets_the_session_start_over(caplog):
    async def scenario():
        server = Server(resume_s=60)

        async def holds(key):
            raise TimeoutError("no answer")

        server.ends._holds = holds
        await server.step("x", "a")
        return await server.ends.resume("x", "b")

    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        assert asyncio.run(scenario()) is False
    assert "TimeoutError: no answer" in caplog.text


@pytest.mark.parametrize("keep", [False, True])
def test_one_session_of_several_can_be_left(keep):
    async def scenario():
        server = Server(resume_s=60)
        for key in ("x", "y"):
            await server.step(key, "a")
        server.ends.leave("a", only="x", keep=keep)
        await soon()
        return server.arrived, len(server.ends)

    assert asyncio.run(scenario()) == (([], 2) if keep else (["x"], 1))


@run
async def test_a_session_that_nobody_steps_is_parked_once_and_its_next_step_starts_the_clock_anew():
    parked = []

    async def park(key):
        parked.append(key)

    server = Server(park=park, idle_park_s=0.05)
    gate = asyncio.Event()
    running = asyncio.create_task(server.step("busy", until=gate))
    await server.step("x")
    await asyncio.sleep(0.03)
    await server.step("x")
    await asyncio.sleep(0.03)
    assert parked == [], "its last step was a moment ago"
    await asyncio.sleep(0.1)
    assert parked == ["x"], "and one with a step under way is not asked"
    gate.set()
    await running
    await server.step("x")
    server.ends.end("x")
    await asyncio.sleep(0.15)
    assert parked == ["x", "busy"], "one that has ended is not parked"
    assert server.arrived == ["x"]


@run
async def test_a_session_that_is_kept_for_its_robot_is_parked_meanwhile():
    parked = []

    async def park(key):
        parked.append(key)

    server = Server(park=park, idle_park_s=0.02, resume_s=60)
    await server.step("x", "a")
    server.ends.leave("a", keep=True)
    await asyncio.sleep(0.1)
    assert parked == ["x"]
    assert await server.ends.resume("x", "b")


def test_a_park_that_fails_is_said_and_the_session_goes_on(caplog):
    @run
    async def scenario():
        async def park(key):
            raise RuntimeError("rank 0: no room")

        server = Server(park=park, idle_park_s=0.01)
        await server.step("x")
        await asyncio.sleep(0.05)
        await server.step("x")
        assert "x" in server.ends

    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        scenario()
    assert "was not parked: RuntimeError: rank 0: no room" in caplog.text


def test_the_restore_of_a_session_begins_while_its_step_waits_behind_two_others(caplog):
    begun = []

    @run
    async def scenario():
        async def begin(key):
            begun.append(key)
            raise RuntimeError("rank 0: no disk")

        server, done = Server(begin=begin), [asyncio.Event() for _ in "abcdef"]
        steps = []
        for key, event in zip("abcdef", done, strict=True):
            steps.append(asyncio.create_task(server.step(key, until=event)))
            await soon()
        assert begun == ["c", "d"], "a runs, b is next, and the worker hears of the others in between"
        for event, now in zip(done, (["d", "e"], ["e", "f"], ["f"], [], [], []), strict=True):
            begun.clear()
            event.set()
            await soon()
            assert begun == now
        await asyncio.gather(*steps)
        assert all(key in server.ends for key in "abcdef"), "the steps go on although it failed"

    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        scenario()
    assert "was not brought back early: RuntimeError: rank 0: no disk" in caplog.text


class Ageing:
    """Workers that have some sessions parked; an expiry takes a while."""

    def __init__(self, *parked):
        self.parked = set(parked)
        self.asked = []
        self.asking = asyncio.Event()

    async def expire(self, key):
        self.asked.append(key)
        self.asking.set()
        await asyncio.sleep(0.02)
        return key in self.parked


@run
async def test_a_parked_session_that_nobody_steps_ends_once_and_a_step_after_it_begins_a_new_one():
    workers = Ageing("x")
    server = Server(expire=workers.expire, expire_s=0.05)
    await server.step("x", "a")
    await asyncio.sleep(0.03)
    await server.step("x", "a")
    await asyncio.sleep(0.03)
    assert workers.asked == [], "its last step was a moment ago"
    await asyncio.sleep(0.1)
    assert workers.asked == ["x"]
    assert "x" not in server.ends
    server.ends.leave("a")
    await soon()
    assert server.arrived == [], "it has ended already"
    await server.step("x", "a")
    assert "x" in server.ends


@run
async def test_one_that_is_on_the_device_stays_and_is_asked_again():
    workers = Ageing()
    server = Server(expire=workers.expire, expire_s=0.02)
    await server.step("x")
    await asyncio.sleep(0.15)
    assert len(workers.asked) >= 2
    assert "x" in server.ends
    workers.parked.add("x")
    await asyncio.sleep(0.1)
    assert "x" not in server.ends
    asked = len(workers.asked)
    await asyncio.sleep(0.1)
    assert len(workers.asked) == asked


@run
async def test_a_step_that_comes_while_its_session_expires_waits_for_it():
    workers = Ageing("x")
    server = Server(expire=workers.expire, expire_s=0.02)
    await server.step("x")
    await workers.asking.wait()
    assert "x" in server.ends
    await server.step("x")
    assert "x" in server.ends, "a new one"
    server.ends.end("x")
    await soon()
    assert server.arrived == ["x"]


@run
async def test_an_end_that_comes_while_its_session_expires_arrives_once():
    workers = Ageing()
    server = Server(expire=workers.expire, expire_s=0.02)
    await server.step("x")
    await workers.asking.wait()
    server.ends.end("x")
    await asyncio.sleep(0.1)
    assert server.arrived == ["x"]
    assert len(workers.asked) == 1
    assert len(server.ends) == 0


def test_an_expiry_that_fails_is_said_and_the_session_goes_on(caplog):
    @run
    async def scenario():
        async def expire(key):
            raise RuntimeError("rank 1: away")

        server = Server(expire=expire, expire_s=0.02)
        await server.step("x")
        await asyncio.sleep(0.05)
        await server.step("x")
        assert "x" in server.ends

    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        scenario()
    assert "did not expire: RuntimeError: rank 1: away" in caplog.text

"""What the server's clock does to sessions that nobody steps, and what begins early for those that wait."""

import asyncio
import logging

import pytest
from ends_fakes import Server, run, soon

from vllm_omni_session_state.omni.server.live_sessions import LiveSessions
from vllm_omni_session_state.omni.server.worker_client import WorkersStoppedError


@run
async def test_a_session_that_nobody_steps_is_parked_once_and_its_next_step_starts_the_clock_anew():
    parked = []

    async def park(key):
        parked.append(key)

    timers, server = Timers(), Server(calls={"park": park}, idle_park_s=HOUR)
    gate = asyncio.Event()
    running = asyncio.create_task(server.step("busy", until=gate))
    await server.step("x")
    (first,) = timers.set
    await server.step("x")
    assert first[0].cancelled(), "its last step was a moment ago"
    await timers.due()
    assert parked == ["x"], "and one with a step under way is not asked"
    gate.set()
    await running
    await server.step("x")
    server.ends.end("x")
    await timers.due()
    assert parked == ["x", "busy"], "one that has ended is not parked"
    assert server.arrived == ["x"]


@run
async def test_a_session_that_is_kept_for_its_robot_is_parked_meanwhile():
    parked = []

    async def park(key):
        parked.append(key)

    server = Server(calls={"park": park}, idle_park_s=0.02, resume_s=60)
    await server.step("x", "a")
    server.ends.leave("a", keep=True)
    await asyncio.sleep(0.1)
    assert parked == ["x"]
    assert await server.ends.resume("x", "b")


@pytest.mark.parametrize(
    ("call", "setting", "said"),
    [("park", "idle_park_s", "was not parked"), ("expire", "expire_s", "did not expire")],
)
def test_a_call_that_fails_is_said_and_the_session_goes_on(caplog, call, setting, said):
    @run
    async def scenario():
        async def fail(key):
            raise RuntimeError("rank 1: away")

        server = Server(calls={call: fail}, **{setting: 0.02})
        await server.step("x")
        await asyncio.sleep(0.05)
        await server.step("x")
        assert "x" in server.ends

    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        scenario()
    assert f"{said}: RuntimeError: rank 1: away" in caplog.text


def test_the_restore_of_a_session_begins_while_its_step_waits_behind_two_others(caplog):
    begun = []

    @run
    async def scenario():
        async def begin(key):
            begun.append(key)
            raise RuntimeError("rank 0: no disk")

        server, done = Server(calls={"begin_restore": begin}, early=True), [asyncio.Event() for _ in "abcdef"]
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
    workers, timers = Ageing("x"), Timers()
    server = Server(calls={"expire": workers.expire}, expire_s=HOUR)
    await server.step("x", "a")
    (first,) = timers.set
    await server.step("x", "a")
    assert first[0].cancelled(), "its last step was a moment ago"
    await timers.due()
    await asyncio.sleep(0.05)
    assert workers.asked == ["x"]
    assert timers.set == []
    assert "x" not in server.ends
    server.ends.leave("a")
    await soon()
    assert server.arrived == [], "it has ended already"
    await server.step("x", "a")
    assert "x" in server.ends


@run
async def test_one_that_is_on_the_device_stays_and_is_asked_again():
    workers = Ageing()
    server = Server(calls={"expire": workers.expire}, expire_s=0.02)
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
    server = Server(calls={"expire": workers.expire}, expire_s=0.02)
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
    server = Server(calls={"expire": workers.expire}, expire_s=0.02)
    await server.step("x")
    await workers.asking.wait()
    server.ends.end("x")
    await asyncio.sleep(0.1)
    assert server.arrived == ["x"]
    assert len(workers.asked) == 1
    assert len(server.ends) == 0


async def an_end_that_comes_while_its_session_expires_waits_for_that(ends=None):
    """Else the expiry could still end in the worker a later session than the one that it was asked about."""
    asked, answer = asyncio.Event(), asyncio.Event()

    async def expire(key):
        asked.set()
        await answer.wait()
        return False

    server = Server(calls={"expire": expire}, expire_s=0.01)
    if ends is not None:
        server.ends.__class__ = ends
    await server.step("x", "a")
    await asked.wait()
    server.ends.leave("a")
    later = asyncio.create_task(server.step("x", "b"))
    await soon()
    assert server.arrived == [], "its expiry is under way"
    assert not later.done()
    answer.set()
    await later
    assert server.arrived == ["x"]
    assert "x" in server.ends
    server.ends.end("x")
    await soon()
    assert server.arrived == ["x", "x"]


@run
async def test_an_end_waits_for_the_expiry_of_its_session_that_is_under_way():
    await an_end_that_comes_while_its_session_expires_waits_for_that()


class Hasty(LiveSessions):
    """A mutant: an end does not wait for an earlier one of its session."""

    def _before_steps(self, key, call):
        self._arriving.pop(key, None)
        super()._before_steps(key, call)


def test_an_end_that_does_not_wait_for_an_earlier_one_is_caught():
    with pytest.raises(AssertionError, match="its expiry is under way"):
        asyncio.run(an_end_that_comes_while_its_session_expires_waits_for_that(Hasty))


class Timers:
    """Holds the timers of this loop that are of an hour, until the test says that they are due."""

    def __init__(self):
        loop = asyncio.get_running_loop()
        self.set, real = [], loop.call_later

        def call_later(delay, callback, *args):
            handle = real(delay, callback, *args)
            if delay == HOUR:
                self.set.append((handle, callback, args))
            return handle

        loop.call_later = call_later

    async def due(self):
        timers, self.set = self.set, []
        for handle, callback, args in timers:
            if not handle.cancelled():
                handle.cancel()
                callback(*args)
        await soon()


HOUR = 3600.0


class Marking:
    """Workers that mark sessions when they are let, and fail as often as they are told."""

    def __init__(self, failures=0, error=None):
        self.failures = failures
        self.error = error or RuntimeError("rank 1: away")
        self.marked = []
        self.let = asyncio.Event()
        self.let.set()

    async def mark(self, key):
        await self.let.wait()
        if self.failures:
            self.failures -= 1
            raise self.error
        self.marked.append(key)


@run
async def test_a_session_that_nobody_steps_is_marked_stale_once_and_its_next_step_starts_the_clock_anew():
    workers, timers = Marking(), Timers()
    server = Server(calls={"mark_stale": workers.mark}, idle_drop_s=HOUR)
    gate = asyncio.Event()
    running = asyncio.create_task(server.step("busy", until=gate))
    await server.step("x")
    (first,) = timers.set
    await server.step("x")
    assert first[0].cancelled(), "its last step was a moment ago"
    await timers.due()
    assert workers.marked == ["x"], "and one with a step under way is not asked"
    assert "x" in server.ends, "it goes on"
    await timers.due()
    assert workers.marked == ["x"], "once"
    gate.set()
    await running
    await server.step("x")
    await timers.due()
    assert sorted(workers.marked) == ["busy", "x", "x"]


@run
async def test_a_step_that_comes_while_its_session_is_marked_waits_so_that_it_unmarks():
    workers, timers = Marking(), Timers()
    server = Server(calls={"mark_stale": workers.mark}, idle_drop_s=HOUR)
    await server.step("x")
    workers.let.clear()
    await timers.due()
    step = asyncio.create_task(server.step("x"))
    await soon()
    assert not step.done()
    workers.let.set()
    await step
    assert workers.marked == ["x"]
    server.ends.end("x")
    await timers.due()
    assert workers.marked == ["x"], "one that has ended is not marked"
    assert server.arrived == ["x"]


@run
async def test_an_end_and_an_expiry_come_after_the_mark_that_is_on_its_way():
    workers, timers, asked = Marking(), Timers(), []

    async def expire(key):
        asked.append((key, list(workers.marked)))
        return False

    server = Server(calls={"mark_stale": workers.mark, "expire": expire}, idle_drop_s=HOUR, expire_s=2 * HOUR)
    await server.step("x")
    workers.let.clear()
    await timers.due()
    live = server.ends._live["x"]
    server.ends._expire("x", live)
    server.ends.end("x")
    await soon()
    assert (asked, server.arrived) == ([], [])
    workers.let.set()
    await soon()
    assert asked == [("x", ["x"])]
    assert server.arrived == ["x"]


def test_a_mark_that_fails_is_said_and_tried_again(caplog):
    @run
    async def scenario():
        workers, timers = Marking(failures=1), Timers()
        server = Server(calls={"mark_stale": workers.mark}, idle_drop_s=HOUR)
        await server.step("x")
        for marked in ([], ["x"], ["x"]):
            await timers.due()
            assert workers.marked == marked

    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        scenario()
    assert caplog.text.count("was not marked stale: RuntimeError: rank 1: away") == 1


@run
async def test_a_mark_that_fails_is_not_tried_again_for_a_session_that_has_ended():
    workers, timers = Marking(failures=1), Timers()
    server = Server(calls={"mark_stale": workers.mark}, idle_drop_s=HOUR)
    await server.step("x")
    workers.let.clear()
    await timers.due()
    server.ends.end("x")
    workers.let.set()
    await soon()
    assert timers.set == []
    assert server.arrived == ["x"]


def test_sessions_that_are_being_marked_when_the_server_stops_are_said_once_and_not_marked_again(caplog):
    @run
    async def scenario():
        workers, timers = Marking(failures=2, error=WorkersStoppedError()), Timers()
        server = Server(calls={"mark_stale": workers.mark}, idle_drop_s=HOUR)
        await server.step("x")
        await server.step("y")
        await timers.due()
        assert timers.set == []

    with caplog.at_level(logging.INFO, logger="vllm_omni.session_state"):
        scenario()
    (said,) = caplog.messages
    assert "no ends of 2 sessions" in said

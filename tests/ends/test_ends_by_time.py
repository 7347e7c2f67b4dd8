"""What the server's clock does to sessions that nobody steps, and what begins early for those that wait."""

import asyncio
import logging

import pytest
from ends_fakes import Server, run, soon

from vllm_omni_session_state.omni.ends import Ends


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


@pytest.mark.parametrize(
    ("call", "setting", "said"),
    [("park", "idle_park_s", "was not parked"), ("expire", "expire_s", "did not expire")],
)
def test_a_call_that_fails_is_said_and_the_session_goes_on(caplog, call, setting, said):
    @run
    async def scenario():
        async def fail(key):
            raise RuntimeError("rank 1: away")

        server = Server(**{call: fail, setting: 0.02})
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


async def an_end_that_comes_while_its_session_expires_waits_for_that(ends=None):
    """Else the expiry could still end in the worker a later session than the one that it was asked about."""
    asked, answer = asyncio.Event(), asyncio.Event()

    async def expire(key):
        asked.set()
        await answer.wait()
        return False

    server = Server(expire=expire, expire_s=0.01)
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


class Hasty(Ends):
    """A mutant: an end does not wait for an earlier one of its session."""

    def _before_steps(self, key, call):
        self._arriving.pop(key, None)
        super()._before_steps(key, call)


def test_an_end_that_does_not_wait_for_an_earlier_one_is_caught():
    with pytest.raises(AssertionError, match="its expiry is under way"):
        asyncio.run(an_end_that_comes_while_its_session_expires_waits_for_that(Hasty))


class Marking:
    """Workers that mark sessions, which takes a while, and fail as often as they are told."""

    def __init__(self, failures=0):
        self.failures = failures
        self.marked = []
        self.marking = asyncio.Event()

    async def mark(self, key):
        self.marking.set()
        await asyncio.sleep(0.02)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("rank 1: away")
        self.marked.append(key)


@run
async def test_a_session_that_nobody_steps_is_marked_stale_once_and_its_next_step_starts_the_clock_anew():
    workers = Marking()
    server = Server(mark=workers.mark, idle_drop_s=0.2)
    gate = asyncio.Event()
    running = asyncio.create_task(server.step("busy", until=gate))
    for _ in range(3):
        await server.step("x")
        await asyncio.sleep(0.08)
    assert workers.marked == [], "its last step was a moment ago"
    await asyncio.sleep(0.3)
    assert workers.marked == ["x"], "and one with a step under way is not asked"
    assert "x" in server.ends, "it goes on"
    gate.set()
    await running
    await server.step("x")
    await asyncio.sleep(0.4)
    assert sorted(workers.marked) == ["busy", "x", "x"]


@run
async def test_a_step_that_comes_while_its_session_is_marked_waits_so_that_it_unmarks():
    workers = Marking()
    server = Server(mark=workers.mark, idle_drop_s=0.02)
    await server.step("x")
    await workers.marking.wait()
    assert workers.marked == []
    await server.step("x")
    assert workers.marked == ["x"]
    server.ends.end("x")
    await asyncio.sleep(0.1)
    assert workers.marked == ["x"], "one that has ended is not marked"
    assert server.arrived == ["x"]


@run
async def test_an_end_and_an_expiry_come_after_the_mark_that_is_on_its_way():
    came = []

    async def mark(key):
        await asyncio.sleep(0.05)
        came.append("mark")

    async def expire(key):
        came.append("expire")
        return False

    server = Server(mark=mark, idle_drop_s=0.02, expire=expire, expire_s=0.03)
    await server.step("x")
    await asyncio.sleep(0.045)
    server.ends.end("x")
    await asyncio.sleep(0.1)
    assert came == ["mark", "expire"]
    assert server.arrived == ["x"]


def test_a_mark_that_fails_is_said_and_tried_again(caplog):
    @run
    async def scenario():
        workers = Marking(failures=1)
        server = Server(mark=workers.mark, idle_drop_s=0.02)
        await server.step("x")
        await asyncio.sleep(0.2)
        assert workers.marked == ["x"]

    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        scenario()
    assert caplog.text.count("was not marked: RuntimeError: rank 1: away") == 1

"""What an API server's calls about sessions come to: few, and each caller hears of its own session."""

import asyncio
import logging

import pytest
from ends_fakes import run

from vllm_omni_session_state.base import log
from vllm_omni_session_state.base.errors import SessionStateError
from vllm_omni_session_state.base.ids import redacted_id
from vllm_omni_session_state.omni.server.live_sessions import LiveSessions
from vllm_omni_session_state.omni.server.worker_client import WorkerClient, WorkersStoppedError

METHODS = {"close": "found", "park": "parked", "begin_restore": "begun", "expire": "gone", "holds": "found"}


class Engine:
    """Two ranks a replica; a call takes its time, and some sessions are refused or fail on one rank."""

    def __init__(self, *, replicas=1):
        self.replicas = replicas
        self.calls = []
        self.refused, self.failing = set(), set()
        self.elsewhere = {}  # replica -> what it answers
        self.held = {0: None}  # replica -> who is there; None: everybody
        self._shutdown_called = False

    async def collective_rpc(self, *, method, args, kwargs, stage_ids):
        assert kwargs == {"only_id": True}
        self.calls.append((method, args))
        await asyncio.sleep(0.005)
        if self._shutdown_called:
            raise RuntimeError("RPC result router is closed")
        return [self.elsewhere.get(n, [self.answer(n, method, args)]) for n in range(self.replicas)]

    def answer(self, replica, method, keys):
        held = self.held.get(replica, set())
        there = [held is None or key in held for key in keys]
        ranks = []
        for rank in range(2):
            wrong = [self.wrong(key) if rank == 1 else None for key in keys]
            word = METHODS[method.removeprefix("session_state_")]
            said = {"ok": not any(wrong), "found": there, word: there, "errors": wrong}
            ranks.append({"rank": rank, **said})
        return {"agree": True, "ranks": ranks}

    def wrong(self, key):
        if key in self.refused:
            return {"error": f"CannotParkError: session {redacted_id(key)} stays: raise it", "refused": True}
        return {"error": "OSError: no", "refused": False} if key in self.failing else None


async def arrived(ends):
    """Wait until every end has."""
    while ends._arriving:
        await asyncio.wait(list(ends._arriving.values()))
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def nothing_said():
    log.forget_said()
    yield
    log.forget_said()


@run
async def test_64_robots_that_come_back_at_once_are_few_calls():
    engine = Engine()
    workers = WorkerClient(engine, [0])
    ends = LiveSessions(workers, resume_s=60)
    robots = [f"robot-{n}" for n in range(64)]
    for robot in robots:
        async with ends.step(robot, robot, named=True):
            pass
        ends.leave(robot, keep=True)
    assert all(await asyncio.gather(*(ends.resume(robot, object()) for robot in robots[:40])))
    assert len(engine.calls) == 1

    async def late(n, robot):
        await asyncio.sleep(n / 4000)
        return await ends.resume(robot, object())

    assert all(await asyncio.gather(*(late(n, robot) for n, robot in enumerate(robots[40:]))))
    assert len(engine.calls) <= 6, "what comes while a call is under way goes together in the next"


@pytest.mark.parametrize("method", METHODS)
def test_each_caller_hears_of_its_own_session(method):
    engine = Engine()
    engine.refused, engine.failing = {"b"}, {"c"}
    workers = WorkerClient(engine, [0])

    async def scenario():
        calls = (getattr(workers, method)(key) for key in "abcd")
        return await asyncio.gather(*calls, return_exceptions=True)

    a, b, c, d = asyncio.run(scenario())
    assert len(engine.calls) == 1
    assert a == d == (True if method in ("expire", "holds") else None)
    if method == "holds":
        assert b is c is True, "it is there"
        return
    assert type(b) is SessionStateError
    assert "session " + redacted_id("b") in str(b)
    assert type(c) is RuntimeError
    assert str(c) == "rank 1: OSError: no"


def end_all(engine, keys):
    """Have one robot step sessions and leave; all of their ends have been sent, or have failed."""

    async def scenario():
        workers = WorkerClient(engine, [0])
        ends = LiveSessions(workers)
        for key in keys:
            async with ends.step(key, "robot"):
                pass
        ends.leave("robot")
        await arrived(ends)

    asyncio.run(scenario())


def test_an_end_that_fails_is_said_of_that_session_alone(caplog):
    engine = Engine()
    engine.failing = {"b"}

    end_all(engine, "abc")
    (line,) = caplog.messages
    name = redacted_id("b")
    assert line == f"the end of session {name} did not reach the worker: RuntimeError: rank 1: OSError: no"


def test_parks_that_are_refused_at_each_round_are_one_line(caplog):
    engine = Engine()
    engine.refused = {"a", "b"}

    async def scenario():
        workers = WorkerClient(engine, [0])
        ends = LiveSessions(workers, idle_park_s=0.001)
        for _ in range(5):
            for key in "abc":
                async with ends.step(key, "robot"):
                    pass
            await asyncio.sleep(0.02)
        assert len(engine.calls) >= 5

    asyncio.run(scenario())
    (record,) = caplog.records
    assert "was not parked: rank 1: CannotParkError: " in record.getMessage()
    assert "raise it" in record.getMessage()
    assert record.exc_info is None


@run
async def test_a_session_of_one_replica_is_resumed_although_another_cannot_be_asked():
    engine = Engine(replicas=2)
    engine.elsewhere[1] = {"error": "the replica is gone"}
    engine.held = {0: {"a"}}
    workers = WorkerClient(engine, [0])
    assert await workers.holds("a")
    with pytest.raises(RuntimeError, match="the replica is gone"):
        await workers.holds("b")


@run
async def test_a_session_that_one_rank_alone_has_is_not_there():
    engine = Engine()
    said = {"found": [True], "errors": [None]}
    ranks = [{"rank": 0, "ok": True, **said}, {"rank": 1, "ok": True, **said, "found": [False]}]
    engine.elsewhere[0] = [{"agree": False, "ranks": ranks}]
    assert not await WorkerClient(engine, [0]).holds("a")


def test_a_stage_without_managed_state_does_not_keep_the_ends_from_the_others(caplog):
    engine = Engine(replicas=2)
    engine.held = {0: None, 1: None}
    engine.elsewhere[1] = {"error": "object has no attribute 'session_state_close'"}

    async def scenario():
        workers = WorkerClient(engine, [0])
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no attribute"):
                await workers.close("a")
        engine.elsewhere[0] = engine.elsewhere[1]
        for _ in range(2):
            await workers.close("a")

    asyncio.run(scenario())
    assert len(engine.calls) == 3
    assert "ends of sessions are not sent any more" in caplog.text


@pytest.mark.parametrize("at_once", [True, False])
def test_a_server_that_stops_in_order_says_one_line_for_all_its_sessions(caplog, at_once):
    engine = Engine()

    async def scenario():
        workers = WorkerClient(engine, [0])
        caplog.clear()
        park = {} if at_once else {"idle_park_s": 0.01}
        ends = LiveSessions(workers, resume_s=60, **park)
        for n in range(50):
            async with ends.step(f"robot-{n}", n, named=n % 2 == 0):
                pass
        engine._shutdown_called = True
        await asyncio.sleep(0.05)
        if not at_once:
            assert not await ends.resume("robot-0", "again")
        for n in range(50):
            ends.leave(n)
            if not at_once:
                await asyncio.sleep(0.001)
        ends.leave("again")
        await arrived(ends)
        with pytest.raises(WorkersStoppedError):
            await workers.close("late")

    with caplog.at_level(logging.INFO, logger="vllm_omni.session_state"):
        asyncio.run(scenario())
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "the server stops: no ends of 50 sessions are sent to its workers, which stop too")
    ]


def test_a_call_that_fails_while_the_server_goes_on_is_a_warning_for_each(caplog):
    engine = Engine()

    async def fail(**_):
        raise RuntimeError("the orchestrator died")

    engine.collective_rpc = fail

    end_all(engine, "ab")
    assert [line.split()[4] for line in caplog.messages] == [redacted_id("a"), redacted_id("b")]


@pytest.mark.host
def test_the_host_notes_that_it_is_told_to_stop_before_anything_ends():
    from vllm_omni.entrypoints.omni_base import OmniBase

    from vllm_omni_session_state.omni.hooks import seams

    class Told:
        def shutdown(self):
            seen.append(getattr(client, seams.CLIENT_STOPPED))

    seen = []
    client = object.__new__(OmniBase)
    setattr(client, seams.CLIENT_STOPPED, False)
    client.engine = Told()
    client._shutdown_base()
    assert seen == [True]

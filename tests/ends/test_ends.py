"""The one end that each session gets, whoever brings it about and in whatever order things arrive."""

import asyncio
import logging

from ends_fakes import Server, run, soon


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
    await soon()
    assert later.done(), "at once"
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


@run
async def test_what_has_no_time_set_is_done_to_nobody():
    asked = []

    async def ask(key):
        asked.append(key)
        return False

    server = Server(calls={"park": ask, "expire": ask, "mark_stale": ask})
    await server.step("x", "a")
    await soon()
    assert asked == []
    server.ends.leave("a", keep=True)
    await soon()
    assert server.arrived == ["x"]


def test_a_worker_that_fails_is_said_and_the_next_end_goes_out(caplog):
    async def scenario():
        server = Server()
        reached = []

        async def close(key):
            reached.append(key)
            raise RuntimeError("rank 1: out of memory")

        server.workers.close = close
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

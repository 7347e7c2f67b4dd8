"""Sessions that are kept for a robot that named them, and those that one of several leaves."""

import asyncio
import logging

import pytest
from ends_fakes import Server, run, soon


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

        server.workers.holds = holds
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

"""Every way in which a session ends, on the host's own serving classes."""

import asyncio

import pytest
from serving_fakes import RESET, Socket, obs, rollout_request, served, settled, step_request

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("untouched_host")]


def test_a_robot_that_hangs_up_has_ended_its_session():
    done = served(lambda o: o.connect(Socket(obs("r"), obs("r"), obs("r"))))
    assert done.steps == [("r", True), ("r", False), ("r", False)]
    assert done.engine.closed == ["r"]
    assert done.engine.sessions == set()


def test_a_robot_that_falls_silent_has_ended_its_session():
    done = served(lambda o: o.connect(Socket(obs("r"), silent=True), idle_timeout=0.05))
    assert done.engine.closed == ["r"]


def test_a_robot_without_an_id_has_ended_the_default_session():
    done = served(lambda o: o.connect(Socket(obs(), obs())))
    assert done.engine.closed == ["default"]


def test_a_robot_that_asks_for_a_fresh_start_has_ended_its_session_before_the_next_step():
    async def scenario(objects):
        socket = await objects.connect(Socket(obs("r"), RESET, obs("r")))
        assert {"status": "reset successful"} in socket.sent

    done = served(scenario)
    assert done.steps == [("r", True), ("r", True)]
    assert done.engine.closed == ["r", "r"]


def test_two_robots_on_one_id_end_it_with_the_last_of_them():
    async def scenario(objects):
        stay = asyncio.Event()
        other = asyncio.create_task(objects.connect(Socket(obs(), stay, obs())))
        await settled()
        await objects.connect(Socket(obs()))
        await settled()
        assert objects.engine.closed == []
        stay.set()
        await other

    assert served(scenario).engine.closed == ["default"]


def test_a_connection_goes_on_with_an_earlier_session_as_the_host_lets_it():
    """vLLM-Omni remembers each id of a connection and sends no reset for it: a switch is no end."""
    done = served(lambda o: o.connect(Socket(obs("a"), obs("b"), obs("a"), obs("b"))))
    assert done.steps == [("a", True), ("b", True), ("a", False), ("b", False)]
    assert sorted(done.engine.closed) == ["a", "b"]


def test_a_switch_is_an_end_where_that_is_asked_for():
    async def scenario(objects):
        stay = asyncio.Event()
        robot = asyncio.create_task(objects.connect(Socket(obs("a"), obs("b"), stay)))
        await settled()
        assert objects.engine.closed == ["a"]
        stay.set()
        await robot

    done = served(scenario, options={"switch_ends": True, "resume_s": 60})
    assert done.engine.closed == ["a"]  # and "b" is kept to be resumed


def test_what_the_host_forgets_of_a_connection_has_ended(monkeypatch):
    from vllm_omni.entrypoints.openpi import connection

    monkeypatch.setattr(connection, "MAX_TRACKED_SESSIONS", 2)

    async def scenario(objects):
        stay = asyncio.Event()
        script = [obs("a"), obs("b"), obs("c"), obs("d"), stay]
        robot = asyncio.create_task(objects.connect(Socket(*script)))
        await settled()
        assert objects.engine.closed == ["a", "b"]
        stay.set()
        await robot

    assert sorted(served(scenario).engine.closed) == ["a", "b", "c", "d"]


def test_a_robot_that_vanishes_in_a_step_has_ended_its_session_after_it():
    async def scenario(objects):
        objects.step_gate = asyncio.Event()
        socket = Socket(obs("r"))

        async def gone(data):
            raise RuntimeError("the client is gone")

        robot = asyncio.create_task(objects.connect(socket))
        await settled()
        socket.send_bytes = gone
        assert objects.engine.closed == []
        objects.step_gate.set()
        await robot

    done = served(scenario)
    assert done.engine.closed == ["r"]
    assert done.engine.sessions == set()


def test_a_step_that_fails_leaves_one_end():
    done = served(lambda o: o.connect(Socket(obs("r"), obs("r", fail=True))))
    assert done.engine.closed == ["r"]


@pytest.mark.parametrize("how", ["close_session", "reset_session"])
def test_a_rollout_that_is_closed_or_reset_has_ended_its_session(how):
    async def scenario(objects):
        session = (await objects.rollout.create_session(rollout_request())).session_id
        for number in range(2):
            answer = await objects.rollout.step(session, step_request(number))
            assert answer.error is None
        await getattr(objects.rollout, how)(session)
        await settled()
        assert objects.engine.closed == [session]

    done = served(scenario)
    assert len(done.engine.closed) == 1


def test_a_rollout_that_was_never_stepped_costs_no_call():
    async def scenario(objects):
        session = (await objects.rollout.create_session(rollout_request())).session_id
        await objects.rollout.close_session(session)

    assert served(scenario).engine.calls == []


def test_a_closed_rollout_takes_the_steps_outside_of_its_context_with_it():
    async def scenario(objects):
        session = (await objects.rollout.create_session(rollout_request())).session_id
        await objects.rollout.step(session, step_request(0))
        await objects.rollout.step(session, step_request(1, in_context=False))
        await objects.rollout.close_session(session)
        await objects.rollout.close_session(session)
        await settled()
        assert objects.engine.closed == [session, f"{session}:stateless"]

    served(scenario)


def test_a_close_during_a_step_takes_effect_after_it():
    async def scenario(objects):
        objects.step_gate = asyncio.Event()
        session = (await objects.rollout.create_session(rollout_request())).session_id
        step = asyncio.create_task(objects.rollout.step(session, step_request(0)))
        await settled()
        objects.state.openai_serving_realtime_robot.drop_session(session)
        await settled()
        assert objects.engine.closed == []
        objects.step_gate.set()
        await step

    done = served(scenario)
    assert len(done.engine.closed) == 1
    assert done.engine.sessions == set()


def test_a_robot_resumes_by_naming_its_id():
    async def scenario(objects):
        await objects.connect(Socket(obs("r")))
        await objects.connect(Socket(obs("r"), obs("r")))

    done = served(scenario, options={"resume_s": 60})
    assert done.steps == [("r", True), ("r", False), ("r", False)]
    assert done.engine.closed == []


def test_a_robot_resumes_after_the_server_has_hung_up_on_it():
    async def scenario(objects):
        await objects.connect(Socket(obs("r"), silent=True), idle_timeout=0.05)
        await objects.connect(Socket(obs("r")))

    done = served(scenario, options={"resume_s": 60})
    assert done.steps == [("r", True), ("r", False)]


def test_without_the_setting_no_robot_resumes():
    async def scenario(objects):
        await objects.connect(Socket(obs("r")))
        await objects.connect(Socket(obs("r")))

    done = served(scenario)
    assert done.steps == [("r", True), ("r", True)]
    assert done.engine.closed == ["r", "r"]


@pytest.mark.parametrize("script", [[obs()], [obs("default")], [obs("")], [obs("somebody-else")]])
def test_a_robot_that_does_not_name_the_session_does_not_resume_it(script):
    async def scenario(objects):
        await objects.connect(Socket(obs("r")))
        await objects.connect(Socket(obs()))
        await objects.connect(Socket(*script))

    done = served(scenario, options={"resume_s": 60})
    assert [reset for _, reset in done.steps] == [True, True, True]
    assert done.steps[-1][0] != "r"
    assert "r" in done.engine.sessions


def test_a_robot_that_asks_for_a_fresh_start_does_not_resume():
    async def scenario(objects):
        await objects.connect(Socket(obs("r")))
        await objects.connect(Socket(RESET, obs("r"), obs("r")))

    done = served(scenario, options={"resume_s": 60})
    assert done.steps == [("r", True), ("r", True), ("r", False)]


def test_nobody_resumes_a_rollout_of_the_endpoints():
    async def scenario(objects):
        session = (await objects.rollout.create_session(rollout_request())).session_id
        await objects.rollout.step(session, step_request(0))
        await objects.connect(Socket(obs(session)))

    done = served(scenario, options={"resume_s": 60})
    assert [reset for _, reset in done.steps] == [True, True]


def test_idle_sessions_are_parked_by_the_servers_clock_in_one_call():
    async def scenario(objects):
        robots = [asyncio.create_task(objects.connect(Socket(obs(key), silent=True))) for key in "rst"]
        await asyncio.sleep(0.2)
        assert sorted(objects.engine.parked) == ["r", "s", "t"]
        assert len(objects.engine.calls) < 3, "what falls due together goes together"
        for robot in robots:
            robot.cancel()
        await asyncio.wait(robots)

    served(scenario, options={"idle_park_s": 0.05, "host_budget": "1GiB"})


@pytest.mark.parametrize(
    ("options", "expires"),
    [
        ({"expire_s": 0.05, "host_budget": "1GiB"}, True),
        ({"expire_s": 0.05, "disk": {"path": "/tmp/x", "budget": "1GiB"}}, True),
        ({"expire_s": 0.05}, False),
        ({"expire_s": 0, "host_budget": "1GiB"}, False),
        ({"host_budget": "1GiB"}, False),
    ],
)
def test_parked_sessions_expire_by_the_servers_clock_where_there_is_a_tier(options, expires):
    async def scenario(objects):
        robots = [asyncio.create_task(objects.connect(Socket(obs(key), silent=True))) for key in "rst"]
        await asyncio.sleep(0.2)
        assert sorted(objects.engine.expired) == (["r", "s", "t"] if expires else [])
        for robot in robots:
            robot.cancel()
        await asyncio.wait(robots)

    served(scenario, options=options)


@pytest.mark.parametrize("options", [{"idle_drop_s": 0.05}, {"idle_drop_s": 0}, {}])
def test_idle_sessions_are_marked_stale_by_the_servers_clock_and_the_workers_know_that_there_is_one(options):
    async def scenario(objects):
        for _ in range(100):  # behind what else the server asks its workers for at its start
            await asyncio.sleep(0.01)
            if objects.engine.marked:
                break
        assert objects.engine.marked == ([()] if options.get("idle_drop_s") else []), "before any step"
        robots = [asyncio.create_task(objects.connect(Socket(obs(key), silent=True))) for key in "rst"]
        await asyncio.sleep(0.2)
        marked = [key for keys in objects.engine.marked for key in keys]
        assert sorted(marked) == (["r", "s", "t"] if options.get("idle_drop_s") else [])
        assert len(objects.engine.marked) < 4, "what falls due together goes together"
        for robot in robots:
            robot.cancel()
        await asyncio.wait(robots)

    served(scenario, options=options)


def test_idle_park_s_without_a_tier_parks_nobody():
    async def scenario(objects):
        robot = asyncio.create_task(objects.connect(Socket(obs("r"), silent=True)))
        await asyncio.sleep(0.1)
        assert objects.engine.parked == []
        robot.cancel()
        await asyncio.wait({robot})

    served(scenario, options={"idle_park_s": 0.02})


def test_a_kept_session_ends_when_its_time_is_over():
    async def scenario(objects):
        await objects.connect(Socket(obs("r")))
        assert objects.engine.closed == []
        await asyncio.sleep(0.2)

    assert served(scenario, options={"resume_s": 0.05}).engine.closed == ["r"]

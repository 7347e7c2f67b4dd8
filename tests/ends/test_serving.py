"""Every way in which a session ends, on the host's own serving classes, and what is hooked when."""

import asyncio
import logging
import types

import numpy as np
import pytest
from serving_fakes import Engine, Served, Socket, settled

from vllm_omni_session_state.config import ENV_FLAG
from vllm_omni_session_state.events import forget_said
from vllm_omni_session_state.omni import seams, serving

pytestmark = pytest.mark.host


@pytest.fixture(autouse=True)
def untouched_host(monkeypatch, caplog):
    """The host's connection class as it was, before and after."""
    from vllm_omni.entrypoints.openpi.connection import RobotRealtimeConnection

    forget_said()
    host = RobotRealtimeConnection.handle_connection
    monkeypatch.setattr(RobotRealtimeConnection, "handle_connection", host)
    caplog.set_level(logging.INFO, logger="vllm_omni.session_state")


def served(scenario, **engine):
    """Run a scenario on served objects that are connected to the engine's workers."""

    async def running():
        objects = Served(Engine(**engine))
        serving.connect(objects.engine, objects.state)
        await scenario(objects)
        await settled()
        return objects

    return asyncio.run(asyncio.wait_for(running(), 20))


def obs(session=None, **more):
    return {**({} if session is None else {"session_id": session}), **more}


RESET = {"endpoint": "reset"}


@pytest.mark.parametrize("name", sorted(seams.SERVING_SEAMS))
def test_every_serving_seam_of_the_installed_host_is_as_expected(name):
    assert serving._checked(name)


def test_the_function_that_is_wrapped_is_there_and_takes_what_is_read():
    from vllm_omni.entrypoints.openai import api_server

    host = getattr(api_server.omni_init_app_state, "__wrapped__", api_server.omni_init_app_state)
    assert seams.signature_of(host) == seams.SERVER_FUNCTION.signature


def test_the_workers_gather_is_as_expected():
    from vllm_omni.diffusion.worker import diffusion_worker

    seams.check(diffusion_worker, seams.WORKER_SEAMS)


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
    """The host remembers each id of a connection and sends no reset for it: a switch is no end."""
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


def rollout_request():
    from vllm_omni.entrypoints.openai.protocol.rollout import CreateSessionRequest

    return CreateSessionRequest(model="dreamzero")


def step_request(number, *, in_context=True):
    from vllm_omni.entrypoints.openai.protocol.rollout import RolloutStepRequest

    return RolloutStepRequest.model_validate(
        {"step_id": number, "observation": {}, "action": {}, "use_session_context": in_context}
    )


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


def test_idle_park_s_without_a_host_budget_is_said_and_ignored(caplog):
    forget_said()

    async def scenario(objects):
        robot = asyncio.create_task(objects.connect(Socket(obs("r"), silent=True)))
        await asyncio.sleep(0.1)
        assert objects.engine.parked == []
        robot.cancel()
        await asyncio.wait({robot})

    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        served(scenario, options={"idle_park_s": 0.02})
    assert "idle_park_s=0.02 alone has nowhere to park a session; set host_budget or disk.path" in caplog.text


def test_a_kept_session_ends_when_its_time_is_over():
    async def scenario(objects):
        await objects.connect(Socket(obs("r")))
        assert objects.engine.closed == []
        await asyncio.sleep(0.2)

    assert served(scenario, options={"resume_s": 0.05}).engine.closed == ["r"]


@pytest.mark.parametrize(
    ("flag", "variable", "on"), [(True, None, True), (False, "1", True), (True, "0", False)]
)
def test_the_variable_wins_over_the_stage(monkeypatch, flag, variable, on):
    if variable is not None:
        monkeypatch.setenv(ENV_FLAG, variable)
    done = served(lambda o: o.connect(Socket(obs("r"))), flag=flag)
    assert done.engine.closed == (["r"] if on else [])


def test_with_the_flag_off_no_serving_class_and_no_object_is_touched():
    from vllm_omni.entrypoints.openai.serving_rl_rollout import ServingRLRollout
    from vllm_omni.entrypoints.openpi.connection import RobotRealtimeConnection
    from vllm_omni.entrypoints.openpi.serving import ServingRealtimeRobotOpenPI

    classes = (ServingRLRollout, RobotRealtimeConnection, ServingRealtimeRobotOpenPI)
    before = [dict(vars(cls)) for cls in classes]

    async def scenario(objects):
        untouched = Served(objects.engine)
        for name in ("openai_serving_realtime_robot", "rl_rollout_serving"):
            assert vars(getattr(objects.state, name)).keys() == vars(getattr(untouched.state, name)).keys()
        await objects.connect(Socket(obs("r")))

    assert served(scenario, flag=False).engine.calls == []
    assert [dict(vars(cls)) for cls in classes] == before


def test_a_stage_that_is_no_diffusion_stage_is_not_asked():
    assert list(serving.stages_with_sessions(Engine())) == [1]
    assert serving.stages_with_sessions(Engine(stage_type="llm")) == {}


def test_a_server_without_a_robot_policy_is_left_alone():
    state = types.SimpleNamespace()
    serving.connect(Engine(), state)
    assert vars(state) == {}


def test_a_connection_that_looks_otherwise_is_left_alone_and_the_rollouts_are_not(monkeypatch, caplog):
    from vllm_omni.entrypoints.openpi.connection import RobotRealtimeConnection

    async def handle_connection(self, *, token=None): ...

    monkeypatch.setattr(RobotRealtimeConnection, "handle_connection", handle_connection)

    async def scenario(objects):
        session = (await objects.rollout.create_session(rollout_request())).session_id
        await objects.rollout.step(session, step_request(0))
        await objects.rollout.close_session(session)

    done = served(scenario)
    assert len(done.engine.closed) == 1
    assert RobotRealtimeConnection.handle_connection is handle_connection
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the robot websocket is left alone" in line
    assert "expected (self), found (self, *, token=...)" in line


def server_module(host):
    module = types.ModuleType(seams.SERVER_MODULE)
    module.omni_init_app_state = host
    return module


def test_the_servers_start_is_wrapped_once_and_hands_everything_through():
    seen = []

    async def omni_init_app_state(engine_client, state, args):
        seen.append((engine_client, args))
        state.openai_serving_realtime_robot = None
        return "done"

    module = server_module(omni_init_app_state)
    serving.wrap(module)
    wrapper = module.omni_init_app_state
    serving.wrap(module)
    assert module.omni_init_app_state is wrapper
    engine = Engine()
    assert asyncio.run(wrapper(engine, state=types.SimpleNamespace(), args="args")) == "done"
    assert seen == [(engine, "args")]


def test_whatever_goes_wrong_after_the_servers_start_is_said_and_nothing_else(caplog):
    async def omni_init_app_state(engine, state, args):
        return "done"

    module = server_module(omni_init_app_state)
    serving.wrap(module)
    assert asyncio.run(module.omni_init_app_state(None, None, None)) == "done"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the API server is left alone" in line


def test_an_error_of_the_servers_start_comes_through_untouched(caplog):
    async def omni_init_app_state(engine_client, state, args):
        raise MemoryError("no")

    module = server_module(omni_init_app_state)
    serving.wrap(module)
    with pytest.raises(MemoryError, match="no"):
        asyncio.run(module.omni_init_app_state(None, None, None))
    assert not caplog.records


def test_ends_that_come_while_a_call_is_under_way_go_together_in_the_next():
    async def scenario(objects):
        objects.engine.between_steps.clear()
        for number in range(40):
            await objects.connect(Socket(obs(f"r{number}")))
            await settled()
        objects.engine.between_steps.set()

    done = served(scenario)
    assert [len(keys) for _, keys in done.engine.calls] == [1, 39]
    assert sorted(done.engine.closed) == sorted(f"r{number}" for number in range(40))
    assert done.engine.most_under_way == 1


def test_a_rank_that_failed_is_named_with_its_session_hidden(caplog):
    async def scenario(objects):
        failed = {"rank": 1, "ok": False, "error": "OSError: disk"}
        objects.engine.replies = [
            [{"agree": False, "ranks": [{"rank": 0, "ok": True, "found": [True]}, failed]}]
        ]
        await objects.connect(Socket(obs("robot-1")))

    served(scenario, ranks=2)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "did not reach the worker: RuntimeError: rank 1: OSError: disk" in line
    assert "robot-1" not in line


def test_workers_that_manage_no_sessions_are_not_asked_again(caplog):
    async def scenario(objects):
        error = "'DiffusionWorker' object has no attribute 'session_state_close'"
        objects.engine.replies = [{"supported": False, "error": error}]
        for number in range(3):
            await objects.connect(Socket(obs(f"r{number}")))
            await settled()

    done = served(scenario)
    assert len(done.engine.calls) == 1
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines == ["no worker manages session state: ends of sessions are not sent any more"]


def test_a_session_is_held_by_the_one_replica_that_has_it_on_all_ranks():
    async def scenario(objects):
        await objects.connect(Socket(obs("r")))
        rank = {"rank": 0, "ok": True}
        objects.engine.replies = [[{"ranks": [{**rank, "found": there}]}] for there in (False, True)]
        await objects.connect(Socket(obs("r")))

    assert served(scenario, options={"resume_s": 60}).steps == [("r", True), ("r", False)]


def test_the_observation_reaches_the_host_as_the_robot_sent_it():
    seen = []

    async def scenario(objects):
        host = objects.infer

        async def infer(obs, *, session_id, reset):
            seen.append(obs)
            return await host(obs, session_id=session_id, reset=reset)

        objects.state.openai_serving_realtime_robot.infer = infer
        await objects.connect(Socket(obs("r", picture=np.arange(3))))

    served(scenario)
    assert seen[0]["session_id"] == "r"
    assert seen[0]["picture"].tolist() == [0, 1, 2]

"""What of vLLM-Omni's serving is hooked when, and what goes to its workers."""

import asyncio
import logging
import types

import numpy as np
import pytest
from serving_fakes import Engine, Served, Socket, obs, rollout_request, served, settled, step_request

from vllm_omni_session_state.base.settings import ENV_FLAG
from vllm_omni_session_state.omni.hooks import seams
from vllm_omni_session_state.omni.server import hooks

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("untouched_host")]


@pytest.mark.parametrize("name", sorted(seams.SERVING_SEAMS))
def test_every_serving_seam_of_the_installed_host_is_as_expected(name):
    assert hooks._checked(name)


def test_the_function_that_is_wrapped_is_there_and_takes_what_is_read():
    from vllm_omni.entrypoints.openai import api_server

    host = getattr(api_server.omni_init_app_state, "__wrapped__", api_server.omni_init_app_state)
    assert seams.signature_of(host) == seams.SERVER_FUNCTION.signature


def test_the_workers_gather_is_as_expected():
    from vllm_omni.diffusion.worker import diffusion_worker

    seams.check(diffusion_worker, seams.WORKER_SEAMS)


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
    assert list(hooks.stages_with_sessions(Engine())) == [1]
    assert hooks.stages_with_sessions(Engine(stage_type="llm")) == {}


def test_a_server_without_a_robot_policy_is_left_alone():
    state = types.SimpleNamespace()
    hooks.connect(Engine(), state)
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
    hooks.wrap(module)
    wrapper = module.omni_init_app_state
    hooks.wrap(module)
    assert module.omni_init_app_state is wrapper
    engine = Engine()
    assert asyncio.run(wrapper(engine, state=types.SimpleNamespace(), args="args")) == "done"
    assert seen == [(engine, "args")]


def test_whatever_goes_wrong_after_the_servers_start_is_said_and_nothing_else(caplog):
    async def omni_init_app_state(engine, state, args):
        return "done"

    module = server_module(omni_init_app_state)
    hooks.wrap(module)
    assert asyncio.run(module.omni_init_app_state(None, None, None)) == "done"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the API server is left alone" in line


def test_an_error_of_the_servers_start_comes_through_untouched(caplog):
    async def omni_init_app_state(engine_client, state, args):
        raise MemoryError("no")

    module = server_module(omni_init_app_state)
    hooks.wrap(module)
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
        objects.engine.replies = [[{"ranks": [{**rank, "found": [there]}]}] for there in (False, True)]
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

"""vLLM-Omni's own pool when something goes: a replica, a session in its worker, room in the table, a seam."""

import asyncio

import pytest
from pool_fakes import (
    Client,
    Orchestrator,
    assembled,
    fresh_runtime,
    module_of,
    run,
    stage,
    until,
)

from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.base.settings import ENV_FLAG
from vllm_omni_session_state.omni.hooks import seams
from vllm_omni_session_state.omni.replicas import affinity, pools

pytestmark = pytest.mark.host


def refused():
    """What vLLM-Omni's dispatch takes for an error of one request, and tells its client."""
    from vllm_omni.engine.errors import NativeKVHandoffError

    return NativeKVHandoffError


@pytest.mark.parametrize("how", ["evicted", "its process is dead"])
def test_sessions_of_a_replica_that_is_gone_are_said_once_each_and_start_over(runtime, warnings, how):
    async def scenario(pool, clients):
        orchestrator = Orchestrator(pool)
        sessions = [f"s{number}" for number in range(8)]
        homes = {session: await orchestrator.step(session) for session in sessions}
        lost = [session for session in sessions if homes[session] == 1]
        if how == "evicted":
            pool.evict_replica(1)
        else:
            clients[1].dead = True  # vLLM-Omni has not seen it yet
        for _ in range(3):
            for session in sessions:
                assert await orchestrator.step(session) == 0
        assert pools.affinity_of(pool).homes.lost == {1: len(lost)}
        return lost

    lost = run(scenario, runtime)
    assert len(lost) == 4
    assert sorted(warnings()) == sorted(
        f"session {display_id(session)} is lost (replica): it was on replica 1, which is gone; "
        "its rollout starts over at another one"
        for session in lost
    )


def test_where_losses_make_steps_fail_each_step_fails_until_a_reset_and_others_go_on(runtime, warnings):
    async def scenario(pool, clients):
        orchestrator = Orchestrator(pool)
        for session in "ab":
            await orchestrator.step(session)
        pool.evict_replica(1)
        for _ in range(3):
            with pytest.raises(refused(), match=r"was lost \(replica\)"):
                await orchestrator.step("b")
            assert await orchestrator.step("a") == 0
        assert pool._request_bindings == {}
        assert await orchestrator.step("b", reset=True) == 0
        assert await orchestrator.step("b") == 0

    run(scenario, runtime, options={"on_lost": "error"})
    assert len(warnings()) == 1


def test_where_losses_make_steps_fail_a_session_that_its_worker_lost_goes_on_to_that_worker(runtime):
    async def scenario(pool, clients):
        orchestrator, homes = Orchestrator(pool), pools.affinity_of(pool).homes
        assert [await orchestrator.step(session) for session in "ab"] == [0, 1]
        clients[0].sessions.clear()
        clients[0].lost.add("a")
        await orchestrator.step("c")
        await until(lambda: homes.loads()[id(clients[0])] == 1)
        for session in "de":
            await orchestrator.step(session)
        assert await orchestrator.step("a") == 0

    run(scenario, runtime, options={"on_lost": "error"})


def test_a_session_that_its_worker_lost_counts_for_nothing_soon(runtime):
    async def scenario(pool, clients):
        orchestrator, homes = Orchestrator(pool), pools.affinity_of(pool).homes
        assert [await orchestrator.step(session) for session in "abcd"] == [0, 1, 0, 1]
        clients[0].sessions.clear()
        assert await orchestrator.step("e") == 0
        await until(lambda: homes.loads()[id(clients[0])] == 1)
        assert [await orchestrator.step(session) for session in "fgh"] == [0, 0, 1]
        assert set(clients[0].called("holds")) >= {"a", "c", "e"}

    run(scenario, runtime)


def test_with_one_replica_homes_are_noted_and_another_that_joins_takes_only_new_sessions(runtime, warnings):
    async def scenario(pool, clients):
        orchestrator = Orchestrator(pool)
        for session in "abc":
            assert await orchestrator.step(session) == 0
        await asyncio.sleep(5 * affinity.ASK_EVERY_S)
        assert clients[0].calls == []  # there is nothing to choose, and nobody is asked
        assert pool.add_client("tcp://1", Client("tcp://1")) == 1
        assert [await orchestrator.step(session) for session in "adbecf"] == [0, 1, 0, 1, 0, 1]

    run(scenario, runtime, replicas=1)
    assert warnings() == []


def test_a_replica_in_the_slot_of_a_dead_one_has_none_of_its_sessions(runtime, warnings):
    async def scenario(pool, clients):
        orchestrator = Orchestrator(pool)
        assert [await orchestrator.step(session) for session in "ab"] == [0, 1]
        pool.evict_replica(1)
        assert pool.add_client("tcp://new", Client("tcp://new")) == 1
        assert await orchestrator.step("b") == 1
        assert pools.affinity_of(pool).homes.lost == {1: 1}

    run(scenario, runtime)
    assert len(warnings()) == 1


def test_without_any_replica_a_request_fails_as_the_host_has_it(runtime, warnings):
    async def scenario(pool, clients):
        orchestrator = Orchestrator(pool)
        await orchestrator.step("a")
        for slot in (0, 1):
            pool.evict_replica(slot)
        with pytest.raises(RuntimeError, match="no live replicas"):
            await orchestrator.step("a")
        pool.add_client("tcp://new", Client("tcp://new"))
        assert await orchestrator.step("a") == 0

    run(scenario, runtime)
    assert len(warnings()) == 1


def test_what_is_bound_already_and_what_goes_with_another_request_are_left(runtime):
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    async def scenario(pool, clients):
        orchestrator = Orchestrator(pool)
        assert await orchestrator.step("a") == 0
        params = OmniDiffusionSamplingParams(extra_args={"session_id": "a"})
        pool._request_bindings["bound"] = 1
        state = type("State", (), {"sampling_params_list": [params]})
        assert await pool.submit_initial("bound", state, {}) == 1
        assert await pool.submit_initial("companion", state, {}, affinity_request_id="bound") == 1
        state = type("State", (), {"sampling_params_list": [OmniDiffusionSamplingParams()]})
        assert await orchestrator.step() == 1
        assert await pool.submit_initial("other", state, {}, params_override=params) == 0
        assert await orchestrator.step("a") == 0

    run(scenario, runtime)


def test_an_error_of_the_host_comes_through_and_leaves_nothing(runtime):
    async def scenario(pool, clients):
        async def add_request_async(*_, **__):
            raise OverflowError("a seed that is too large")

        clients[0].add_request_async = add_request_async
        orchestrator, homes = Orchestrator(pool), pools.affinity_of(pool).homes
        with pytest.raises(OverflowError, match="too large"):
            await orchestrator.submit("a")
        pool.release_binding("robot-a-1")  # as vLLM-Omni does
        assert await orchestrator.step("b") == 1
        await until(lambda: "a" not in homes)

    run(scenario, runtime)


def test_a_request_that_the_runner_would_refuse_is_left_to_it(runtime, warnings):
    async def scenario(pool, clients):
        orchestrator = Orchestrator(pool)
        await orchestrator.step(ar_diffusion_tick={"session_id": ""})
        assert len(pools.affinity_of(pool).homes) == 0

    run(scenario, runtime)
    assert warnings() == []


def test_a_fault_of_our_own_is_said_once_and_the_request_goes_on(runtime, warnings, monkeypatch):
    async def scenario(pool, clients):
        monkeypatch.setattr(pools.affinity_of(pool).homes, "place", None)
        orchestrator = Orchestrator(pool)
        for session in "aab":
            await orchestrator.step(session)

    run(scenario, runtime)
    (line,) = warnings()
    assert "steps of one session WILL go to different ones" in line


def test_a_full_table_asks_for_its_oldest_and_refuses_where_all_live(runtime, monkeypatch):
    async def scenario(pool, clients):
        orchestrator, homes = Orchestrator(pool), pools.affinity_of(pool).homes
        homes.most = 4
        for session in "abcd":
            await orchestrator.step(session)
        with pytest.raises(refused(), match="4 sessions have a replica"):
            await orchestrator.step("e")
        assert [await orchestrator.step(session) for session in "abcd"] == [0, 1, 0, 1]
        clients[0].sessions.discard("c")
        assert await orchestrator.step("e") == 0
        homes.check()
        assert sorted(key for key in "abcde" if key in homes) == list("abde")

    run(scenario, runtime)


def test_sessions_of_a_replica_that_is_gone_make_room_and_are_said_to_be_lost(runtime, warnings):
    async def scenario(pool, clients):
        orchestrator, homes = Orchestrator(pool), pools.affinity_of(pool).homes
        homes.most = 4
        for session in "abcd":
            await orchestrator.step(session)
        pool.evict_replica(1)
        assert [await orchestrator.step(session) for session in "ef"] == [0, 0]
        assert homes.lost == {1: 2}

    run(scenario, runtime)
    assert len([line for line in warnings() if "is lost (replica)" in line]) == 2


def test_a_new_session_does_not_wait_long_for_room(runtime, monkeypatch):
    monkeypatch.setattr(affinity, "PATIENCE_S", 0.05)

    async def scenario(pool, clients):
        orchestrator, homes = Orchestrator(pool), pools.affinity_of(pool).homes
        homes.most = 2
        for session in "ab":
            await orchestrator.step(session)
        clients[0].sessions.clear()
        clients[0].between_steps.clear()
        with pytest.raises(refused()):
            await orchestrator.step("c")
        clients[0].between_steps.set()
        await until(lambda: "a" not in homes)
        assert await orchestrator.step("c") == 0

    run(scenario, runtime)


def test_where_nobody_can_be_asked_the_table_keeps_the_latest(runtime, warnings):
    """A model that this plugin does not know: its worker has no such method, and keeps few sessions."""

    async def scenario(pool, clients):
        for client in clients:
            client.fail = "'DiffusionWorker' object has no attribute 'session_state_holds'"
        orchestrator, homes = Orchestrator(pool), pools.affinity_of(pool).homes
        homes.most = 4
        for number in range(20):
            await orchestrator.step(f"s{number}")
            homes.check()
        assert len(homes) == 4
        assert max(len(client.calls) for client in clients) == 1  # each is asked once, and not again

    run(scenario, runtime)
    assert warnings() == []


def test_an_end_that_a_step_may_have_overtaken_is_asked_for(runtime):
    async def scenario(pool, clients):
        orchestrator, found = Orchestrator(pool), pools.affinity_of(pool)
        request, home = await orchestrator.submit("a")
        calling = found.call(home, clients[home], "session_state_close", ("a",), {"only_id": True})
        await calling
        clients[home].sessions.add("a")  # the step runs after the end
        assert "a" in found.homes
        pool.release_binding(request)
        await until(lambda: not found.homes.doubts)
        assert await orchestrator.step("a") == home
        clients[home].sessions.clear()
        found.homes.doubt("a")
        found._ask_soon()
        await until(lambda: "a" not in found.homes)

    run(scenario, runtime)


@pytest.mark.parametrize("fault", ["call fails", "rank fails", "in use"])
def test_an_end_that_did_not_come_about_leaves_the_session_its_home(runtime, fault):
    async def scenario(pool, clients):
        orchestrator, found = Orchestrator(pool), pools.affinity_of(pool)
        home = await orchestrator.step("a")
        client = clients[home]

        async def collective_rpc_async(*, method, args, **_):
            rank = {"rank": 0, "ok": fault != "rank fails", "found": [True], "used": [fault == "in use"]}
            if fault == "call fails":
                raise RuntimeError("no")
            return [{"agree": True, "ranks": [rank | {"lost": [False], "error": "OSError"}]}]

        client.collective_rpc_async = collective_rpc_async
        await found.call(home, client, "session_state_close", ("a",), {})
        assert "a" in found.homes
        await until(lambda: not found.homes.doubts or found._mute)
        assert "a" in found.homes

    run(scenario, runtime)


def test_an_end_that_is_noted_late_forgets_nobody_who_has_begun_anew(runtime):
    async def scenario(pool, clients):
        orchestrator, found = Orchestrator(pool), pools.affinity_of(pool)
        home = await orchestrator.step("a")
        found.forget("a")
        assert "a" in found.homes
        pool.evict_replica(home)
        found.forget("a")
        assert "a" not in found.homes

    run(scenario, runtime)


@pytest.mark.parametrize("strict", [False, True])
def test_an_expired_session_is_forgotten_unless_its_next_step_is_to_fail(runtime, strict):
    async def scenario(pool, clients):
        orchestrator, found = Orchestrator(pool), pools.affinity_of(pool)
        home = await orchestrator.step("a")
        await found.call(home, clients[home], "session_state_expire", ("a",), {"only_id": True})
        assert ("a" in found.homes) == strict
        assert found.homes.loads()[id(clients[home])] == 0

    run(scenario, runtime, options={"on_lost": "error" if strict else "warn"})


def test_a_call_reaches_one_replica_and_none_that_is_gone(runtime):
    async def scenario(pool, clients):
        found = pools.affinity_of(pool)
        await found.call(1, clients[1], "session_state_stats", (), {})
        assert [len(client.calls) for client in clients] == [0, 1]
        pool.evict_replica(1)
        pool.add_client("tcp://new", Client("tcp://new"))
        reply = await found.call(1, clients[1], "session_state_stats", (), {})
        assert reply == {"supported": False, "error": "replica 1 is gone"}
        assert pool.clients[1].calls == []

    run(scenario, runtime)


@pytest.mark.parametrize(
    "held",
    [{"engine": "default"}, {"step_execution": True}, {"streaming_output": True}],
    ids=["another runner", "stepwise", "streaming"],
)
def test_where_a_session_is_one_request_the_host_chooses(runtime, held):
    async def scenario(pool, clients):
        assert "submit_initial" not in vars(pool)
        assert pools.affinity_of(pool) is not None  # calls reach its replicas one by one all the same
        orchestrator = Orchestrator(pool)
        assert [await orchestrator.step() for _ in range(4)] == [0, 1, 0, 1]

    run(scenario, runtime, **held)


@pytest.mark.parametrize(("flag", "variable"), [(False, None), (None, None), (True, "0")])
def test_with_the_flag_off_pools_and_routing_are_the_hosts_own(
    monkeypatch, runtime, warnings, flag, variable
):
    if variable is not None:
        monkeypatch.setenv(ENV_FLAG, variable)
    module = __import__(seams.RUNTIME_MODULE, fromlist=["StageRuntime"])
    hooked = module.StageRuntime._assemble_stage_pools

    async def life():
        clients = [Client(f"tcp://{number}") for number in range(3)]
        (pool,) = assembled(module.StageRuntime, [stage(flag=flag)], [clients])
        orchestrator = Orchestrator(pool)
        slots = [await orchestrator.step(session) for session in ("a", "b", "a", None, "b", "a", "c")]
        pool.evict_replica(1)
        slots += [await orchestrator.step(session) for session in "abcab"]
        kept = {name: repr(value) for name, value in vars(pool).items() if name != "clients"}
        return kept, slots, type(pool), [client.steps for client in clients], [c.calls for c in clients]

    with_plugin = asyncio.run(life())
    fresh_runtime(monkeypatch, hook=False)
    assert module.StageRuntime._assemble_stage_pools is not hooked
    assert asyncio.run(life()) == with_plugin
    assert "submit_initial" not in with_plugin[0]
    assert warnings() == []


def test_pools_are_hooked_once(runtime, monkeypatch):
    hooked = runtime._assemble_stage_pools
    pools.wrap(__import__(seams.RUNTIME_MODULE, fromlist=["StageRuntime"]))
    assert runtime._assemble_stage_pools is hooked


def test_a_runtime_that_looks_otherwise_is_said_to_split_sessions(warnings):
    class StageRuntime:
        def _assemble_stage_pools(self, plans):
            """Another one's."""

    host = StageRuntime._assemble_stage_pools
    pools.wrap(module_of(StageRuntime=StageRuntime))
    assert StageRuntime._assemble_stage_pools is host
    (line,) = warnings()
    assert "with several replicas of any stage, steps of one session WILL go to different ones" in line
    assert "expected (self, stage_plans, initialized_clients_by_stage), found (self, plans)" in line


def test_a_module_without_a_runtime_is_said_to_split_sessions(runtime, warnings):
    pools.wrap(module_of())
    (line,) = warnings()
    assert "nothing of that name" in line


@pytest.mark.parametrize("fault", ["method", "field"])
def test_a_pool_that_looks_otherwise_is_left_alone_and_said_to_split_sessions(
    runtime, warnings, monkeypatch, fault
):
    from vllm_omni.engine.stage_pool import StagePool

    if fault == "method":

        async def submit_initial(self, request_id, request): ...

        monkeypatch.setattr(StagePool, "submit_initial", submit_initial)
    else:
        monkeypatch.setattr(StagePool, "is_distributed", None)
    (pool,) = assembled(runtime, [stage()], [[Client("tcp://0"), Client("tcp://1")]])
    assert pools.affinity_of(pool) is None
    assert "submit_initial" not in vars(pool)
    (line,) = warnings()
    assert "with several replicas of stage 0, steps of one session WILL go to different ones" in line
    assert "StagePool" in line

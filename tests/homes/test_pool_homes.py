"""vLLM-Omni's own pool: where its requests go with the plugin, and that they go as ever with the flag off."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_fakes import Client, Orchestrator, assembled, attach_hub, run, stage, until
from profiles import sized

from vllm_omni_session_state.omni.hooks import seams
from vllm_omni_session_state.omni.replicas import affinity, pools

pytestmark = pytest.mark.host


def test_every_seam_of_the_installed_host_is_as_expected(runtime):
    from vllm_omni.engine.stage_pool import StagePool

    seams.check(StagePool, seams.POOL_SEAMS["vllm_omni.engine.stage_pool.StagePool"])
    (pool,) = assembled(runtime, [stage(flag=False)], [[Client("tcp://0")]])
    seams.check_fields(pool, seams.POOL_FIELDS)


@pytest.mark.parametrize("distributed", [False, True])
def test_every_step_of_a_session_goes_to_one_replica(runtime, distributed):
    async def scenario(pool, clients):
        if distributed:
            attach_hub(pool, clients)
        orchestrator = Orchestrator(pool)
        sessions = [f"s{number}" for number in range(6)] + [None]
        homes = {}
        for _ in range(4):
            random.shuffle(sessions)
            for session in sessions:
                slot = await orchestrator.step(session)
                assert homes.setdefault(session, slot) == slot
        assert sorted(homes.values()).count(0) in {3, 4}
        assert pool._request_bindings == {}
        assert pool._affinity == {}
        for client in clients:
            assert {session for session, _ in client.steps} == client.sessions

    run(scenario, runtime)


def test_in_distributed_mode_a_replica_that_is_down_is_no_home(runtime, warnings):
    from vllm_omni.distributed.omni_coordinator import ReplicaStatus

    async def scenario(pool, clients):
        replicas = attach_hub(pool, clients)
        orchestrator = Orchestrator(pool)
        assert [await orchestrator.step(session) for session in "abab"] == [0, 1, 0, 1]
        replicas[0].status = ReplicaStatus.DOWN
        assert [await orchestrator.step(session) for session in "abc"] == [1, 1, 1]
        pool.remove_client(clients[1].name)
        assert pool.add_client("tcp://new", Client("tcp://new")) == 1
        replicas[1].input_addr = "tcp://new"
        assert await orchestrator.step("b") == 1

    run(scenario, runtime)
    assert len([line for line in warnings() if "is lost (replica)" in line]) == 2


@given(
    extra=st.one_of(
        st.none(),
        st.dictionaries(
            st.sampled_from(["session_id", "reset", "close_session", "robot_obs"]),
            st.one_of(
                st.none(), st.booleans(), st.integers(0, 2), st.sampled_from(["", "a", "default", "é"])
            ),
        ),
        st.fixed_dictionaries(
            {
                "ar_diffusion_tick": st.one_of(
                    st.integers(),
                    st.fixed_dictionaries(
                        {"session_id": st.sampled_from(["", " ", "a", None, 3])},
                        optional={
                            "request_id": st.sampled_from(["", "r"]),
                            "chunk_index": st.sampled_from([0, -1, True]),
                            "reset": st.sampled_from([True, False, None]),
                            "close_session": st.sampled_from([True, False, 1]),
                        },
                    ),
                ),
            },
            optional={"session_id": st.sampled_from(["", "b"]), "reset": st.booleans()},
        ),
    )
)
@sized(2000)
def test_a_request_is_of_the_session_that_the_runner_reads(extra):
    from vllm_omni.experimental.ar_diffusion.runner import ARDiffusionModelRunner

    request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))
    try:
        session, arguments, tick = ARDiffusionModelRunner._request_session(request)
    except ValueError:
        assert affinity.step_of(extra) is None
        return
    found = affinity.step_of(extra)
    assert found is not None
    assert found.session == session
    assert found.reset == (tick.reset if tick is not None else bool(arguments.get("reset", False)))
    close = tick.close_session if tick is not None else bool(arguments.get("close_session", False))
    assert found.close == close


def test_the_tick_protocol_is_followed(runtime):
    from vllm_omni.experimental.ar_diffusion.tick_protocol import ARDiffusionTickRequest

    def tick(session, number, **more):
        return ARDiffusionTickRequest(session, f"r{number}", number, **more).to_extra_args()

    async def scenario(pool, clients):
        orchestrator = Orchestrator(pool)
        for number in range(4):
            assert await orchestrator.step(**tick("a", number)) == 0
            assert await orchestrator.step(**tick("b", number)) == 1
            assert await orchestrator.step("a", **tick("b", number)) == 1  # the tick's id counts
        table = pools.affinity_of(pool).homes
        await orchestrator.step(**tick("b", 4, close_session=True))
        await until(lambda: "b" not in table)
        assert "a" in table

    run(scenario, runtime)


def test_a_thousand_sessions_that_begin_and_end_leave_an_empty_table_and_an_even_load(runtime, monkeypatch):
    """In random order, thirty to sixty at a time; ended by a request, by a call, or by their workers."""
    monkeypatch.setattr(affinity, "ASK_EVERY_S", 0.0)
    rng, replicas, total = random.Random(0), 3, 1000
    spread = []

    async def scenario(pool, clients):
        orchestrator, found = Orchestrator(pool), pools.affinity_of(pool)

        async def end(session, home):
            client = clients[home]
            how = rng.choice(("request", "call", "worker"))
            if how == "request":
                await orchestrator.step(session, close_session=True)
            elif how == "call":
                await found.call(home, client, "session_state_close", (session,), {"only_id": True})
            else:
                client.sessions.discard(session)
                client.lost.add(session)

        live, begun = [], 0
        while begun < total or live:
            if begun < total and (len(live) < 30 or (len(live) < 60 and rng.random() < 0.5)):
                live.append((f"s{begun}", await orchestrator.step(f"s{begun}")))
                begun += 1
            else:
                await end(*live.pop(rng.randrange(len(live))))
            for session, home in rng.sample(live, min(3, len(live))):
                assert await orchestrator.step(session) == home
            for _ in range(10):  # the background runs
                await asyncio.sleep(0)
            found.homes.check()
            if len(live) >= 30 and begun < total:
                loads = [len(client.sessions) for client in clients]
                spread.append(max(loads) / (sum(loads) / replicas) - 1)
        await orchestrator.step("last", close_session=True)
        await until(lambda: not len(found.homes))
        return [len({session for session, _ in client.steps}) for client in clients]

    begun = run(scenario, runtime, replicas=replicas)
    mean = sum(begun) / replicas
    print(
        f"{begun} sessions on each of {replicas} replicas, at most {max(spread):.0%} above the mean at a time"
    )
    assert max(abs(each / mean - 1) for each in begun) <= 0.1, begun

"""Whom the API server calls about a session, over vLLM-Omni's own pools on a loop in another thread."""

import asyncio
import time

import pytest
from pool_fakes import Client, Orchestrator, Thread, assembled, engine_of, stage

from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.omni.replicas import affinity, pools
from vllm_omni_session_state.omni.server.worker_client import WorkerClient, WorkersStoppedError

pytestmark = pytest.mark.host


class Served:
    """Pools on an orchestrator's loop, and the workers as an API server's loop reaches them."""

    def __init__(self, runtime, *, stages=1, replicas=2, **how):
        self.thread = Thread()
        self.clients = [
            [Client(f"tcp://{number}-{slot}") for slot in range(replicas)] for number in range(stages)
        ]
        configs = [stage(**how) for _ in range(stages)]

        async def bring_together():
            return assembled(runtime, configs, self.clients)

        self.pools = self.thread.run(bring_together())
        self.workers = WorkerClient(engine_of(self.pools, configs), list(range(stages)))
        self.orchestrators = [Orchestrator(pool) for pool in self.pools]

    def step(self, session, number=0, **extra):
        return self.thread.run(self.orchestrators[number].step(session, **extra))

    def homes(self, number=0):
        return pools.affinity_of(self.pools[number]).homes

    def on_loop(self, function, *args):
        async def call():
            return function(*args)

        return self.thread.run(call())

    def step_runs(self, slot, runs, number=0):
        event = self.clients[number][slot].between_steps
        self.on_loop(event.clear if runs else event.set)

    def calls(self, method, number=0):
        """How often each replica was called."""
        return [[name for name, _ in client.calls].count(method) for client in self.clients[number]]


@pytest.fixture
def served(runtime):
    made = []

    def make(**how):
        made.append(Served(runtime, **how))
        return made[-1]

    yield make
    for each in made:
        each.thread.stop()


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 300))


@pytest.mark.parametrize("method", ["close", "park", "begin_restore", "expire", "holds"])
def test_a_call_about_a_session_goes_to_its_home_alone(served, method):
    one = served()
    for session in "ab":
        one.step(session)
    run(getattr(one.workers, method)("b"))
    assert one.calls(f"session_state_{method}") == [0, 1]
    ended = method in {"close", "expire"}
    assert ("b" in one.homes()) == (not ended)
    assert "a" in one.homes()


def test_a_call_about_a_session_without_a_home_goes_to_all(served):
    one = served(replicas=3)
    one.clients[0][2].sessions.add("elsewhere")
    assert run(one.workers.holds("elsewhere"))
    run(one.workers.close("elsewhere"))
    assert not run(one.workers.holds("elsewhere"))
    assert one.calls("session_state_close") == [1, 1, 1]


@pytest.mark.parametrize("strict", [False, True])
def test_a_session_whose_replica_is_gone_is_asked_of_nobody_and_its_end_is_noted(served, strict):
    one = served(options={"on_lost": "error" if strict else "warn"})
    for session in "ab":
        one.step(session)
    one.on_loop(one.pools[0].evict_replica, 1)
    assert not run(one.workers.holds("b"))
    assert run(one.workers.expire("b"))
    run(one.workers.close("b"))
    run(one.workers.park("b"))
    assert one.clients[0][0].called("close") == []
    one.on_loop(lambda: None)  # what was sent has come
    assert one.step("b") == 0
    assert not one.workers.lost()


def test_the_close_of_a_lost_session_lets_it_begin_anew(served):
    one = served(options={"on_lost": "error"})
    for session in "ab":
        one.step(session)
    one.on_loop(one.pools[0].evict_replica, 1)
    with pytest.raises(Exception, match=r"was lost \(replica\)"):
        one.step("b")
    assert one.workers.lost() == {1: 1}
    run(one.workers.close("b"))
    one.on_loop(lambda: None)
    assert one.step("b") == 0
    assert one.clients[0][0].called("close") == []


def test_answers_carry_the_numbers_of_the_slots_also_after_a_death(served):
    one = served(replicas=3)
    assert sorted(run(one.workers.ask("session_state_stats")).answers) == [0, 1, 2]
    one.on_loop(one.pools[0].evict_replica, 1)
    assert sorted(run(one.workers.ask("session_state_stats")).answers) == [0, 2]


def test_numbers_of_several_stages_are_unique_and_stay_when_a_replica_joins(served):
    one = served(stages=2)
    assert sorted(run(one.workers.ask("session_state_stats")).answers) == [0, 1, 2, 3]
    one.step("a", 1)
    one.step("b", 1)
    asked = run(one.workers.ask("session_state_park", "b"))
    assert sorted(asked.answers) == [0, 2, 3]  # stage 0 knows nothing of it: both of its replicas
    one.on_loop(one.pools[0].evict_replica, 0)
    one.on_loop(one.pools[1].add_client, "tcp://new", Client("tcp://new"))
    assert sorted(run(one.workers.ask("session_state_stats")).answers) == [1, 2, 3, 5]


def test_a_replica_that_fails_is_said_and_the_others_answer(served):
    one = served()
    one.clients[0][1].fail = "OSError: disk"
    asked = run(one.workers.ask("session_state_stats"))
    assert sorted(asked.answers) == [0]
    assert asked.failures == ["OSError: disk"]
    one.step("a")
    one.step("b")
    run(one.workers.close("a"))
    with pytest.raises(RuntimeError, match="OSError: disk"):
        run(one.workers.close("b"))


def test_a_long_step_delays_the_calls_to_its_own_replica_and_no_other(served, monkeypatch):
    monkeypatch.setattr(affinity, "ASK_EVERY_S", 60.0)  # the background asks on its own
    one = served()
    for session in "abcd":
        one.step(session)  # a and c at 0, b and d at 1
    one.step_runs(0, True)

    async def scenario():
        slow = [asyncio.ensure_future(one.workers.close("a")), asyncio.ensure_future(one.workers.park("c"))]
        listing = asyncio.ensure_future(one.workers.ask("session_state_list"))
        await asyncio.sleep(0.05)
        await one.workers.close("b")
        assert await one.workers.holds("d")
        await one.workers.park("d")
        assert one.calls("session_state_list") == [0, 1]  # before those, and beside the other
        assert not any(each.done() for each in (*slow, listing))
        one.thread.loop.call_soon_threadsafe(one.clients[0][0].between_steps.set)
        await asyncio.gather(*slow)
        assert sorted((await listing).answers) == [0, 1]

    run(scenario())
    assert [client.most_under_way for client in one.clients[0]] == [1, 1]


def test_what_comes_while_a_call_is_under_way_goes_together_in_the_next_to_that_replica(served):
    one = served()
    sessions = [f"s{number}" for number in range(20)]
    for session in sessions:
        one.step(session)
    one.step_runs(0, True)
    one.step_runs(1, True)

    async def scenario():
        closing = [asyncio.ensure_future(one.workers.close(sessions[0]))]
        closing.append(asyncio.ensure_future(one.workers.close(sessions[1])))
        await asyncio.sleep(0.05)
        closing += [asyncio.ensure_future(one.workers.close(session)) for session in sessions[2:]]
        await asyncio.sleep(0.05)
        for client in one.clients[0]:
            one.thread.loop.call_soon_threadsafe(client.between_steps.set)
        await asyncio.gather(*closing)

    run(scenario())
    for client in one.clients[0]:
        assert [len(args) for name, args in client.calls if name == "session_state_close"] == [1, 9]
    assert len(one.homes()) == 0


def test_an_operators_order_goes_to_whom_the_name_means(served):
    one = served()
    for session in "ab":
        one.step(session)
    asked = run(one.workers.ask("session_state_close", display_id("b"), only_idle=True))
    assert sorted(asked.answers) == [1]
    asked = run(one.workers.ask("session_state_park", "a"))
    assert sorted(asked.answers) == [0]
    asked = run(one.workers.ask("session_state_inspect", "nobody"))
    assert sorted(asked.answers) == [0, 1]


def test_a_call_that_nobody_waits_for_any_more_goes_on_and_one_that_was_not_sent_does_not(served):
    one = served()
    one.step("a")
    one.step_runs(0, True)

    async def scenario():
        sent = asyncio.Event()
        first = asyncio.ensure_future(one.workers.ask("session_state_park", "a", sent=sent))
        await sent.wait()
        await asyncio.sleep(0.05)
        never = asyncio.Event()
        second = asyncio.ensure_future(one.workers.ask("session_state_park", "a", sent=never))
        await asyncio.sleep(0.05)
        for task in (second, first):
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
        assert not never.is_set()
        one.thread.loop.call_soon_threadsafe(one.clients[0][0].between_steps.set)
        await one.workers.park("a")

    run(scenario())
    assert one.calls("session_state_park") == [2, 0]


def test_a_call_when_the_engine_stops_fails_and_cancels_nobody(served):
    one = served()
    one.step("a")
    one.step_runs(0, True)

    async def scenario():
        closing = asyncio.ensure_future(one.workers.close("a"))
        await asyncio.sleep(0.05)
        one.thread.stop()
        with pytest.raises(RuntimeError, match="the server stops"):
            await closing
        with pytest.raises(RuntimeError, match="closed"):
            await one.workers.ask("session_state_stats")

    run(scenario())
    one.thread = Thread()  # which the fixture stops


def test_when_the_server_stops_no_replica_is_called(served):
    one = served()
    one.step("a")
    one.workers._engine_client._shutdown_called = True
    with pytest.raises(WorkersStoppedError):
        run(one.workers.close("a"))
    assert one.calls("session_state_close") == [0, 0]


def test_the_first_call_to_a_replica_costs_no_time_to_speak_of(served):
    """A round trip between two loops, printed; no limit, since a busy machine has none."""
    one = served()
    one.step("a")

    async def scenario():
        begun = time.perf_counter()
        for _ in range(200):
            await one.workers.park("a")
        return (time.perf_counter() - begun) / 200

    print(f"{1e6 * run(scenario()):.0f} µs a call")

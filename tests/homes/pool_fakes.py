"""vLLM-Omni's own pool of replicas and its own way to bring them together, over clients that only take note.

Nothing is computed: a client has the sessions of the steps that it is given. Named replicas, no processes.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
import types
from types import SimpleNamespace

from vllm_omni_session_state.base.settings import FLAG
from vllm_omni_session_state.omni.hooks import seams
from vllm_omni_session_state.omni.replicas import pools

ENGINE = "vllm_omni.experimental.ar_diffusion.engine.ARDiffusionEngine"


class Client:
    """Stands where vLLM-Omni's ``StageDiffusionClient`` does.

    Attributes:
        sessions: Those that its worker has.
        lost: Those that its worker lost.
        steps: Session and request id of each step that it was given.
        calls: Every remote call.
    """

    stage_type = "diffusion"
    final_output = True

    def __init__(self, name):
        self.name = self.request_address = name
        self.sessions, self.lost = set(), set()
        self.steps, self.calls = [], []
        self.dead = False
        self.fail = None
        self.between_steps = asyncio.Event()  # calls wait for it, as they do for a running step
        self.between_steps.set()
        self.most_under_way = self._under_way = 0

    def check_health(self):
        if self.dead:
            raise RuntimeError(f"{self.name} is dead")

    async def add_request_async(self, request_id, prompt, params, **more):
        extra = params.extra_args or {}
        extra = extra.get("ar_diffusion_tick", extra)
        session = str(extra.get("session_id") or "default")
        self.steps.append((session, request_id))
        self.lost -= {session} if extra.get("reset") else set()
        self.sessions.add(session)
        if extra.get("close_session"):
            self.sessions.discard(session)

    async def collective_rpc_async(self, *, method, timeout, args, kwargs):
        self.calls.append((method, tuple(args)))
        self._under_way += 1
        self.most_under_way = max(self.most_under_way, self._under_way)
        try:
            await self.between_steps.wait()
        finally:
            self._under_way -= 1
        if self.dead or self.fail is not None:
            raise RuntimeError(self.fail or "the process died")
        there = [key in self.sessions for key in args]
        rank = {"rank": 0, "ok": True, "found": there, "used": [False] * len(args)}
        rank["lost"] = [key in self.lost for key in args]
        if method in {"session_state_close", "session_state_reset"}:
            self.sessions.difference_update(args)
            self.lost.difference_update(args)
        elif method == "session_state_expire":
            self.lost.update(key for key in args if key in self.sessions)
            self.sessions.difference_update(args)
            rank["gone"] = [True] * len(args)
        return [{"agree": True, "ranks": [rank]}]

    def shutdown(self):
        self.dead = True

    def called(self, method):
        """The sessions that calls of one method named, in order."""
        return [key for name, args in self.calls if name == f"session_state_{method}" for key in args]


def stage(*, flag=True, engine=ENGINE, **more):
    """One of vLLM-Omni's stage configurations, as far as it is read."""
    options = more.pop("options", {})
    held = SimpleNamespace(
        **{FLAG: flag}, model_config={"session_state": options}, engine_backend=engine, **more
    )
    return SimpleNamespace(stage_id=0, stage_type="diffusion", diffusion_config=held)


def fresh_runtime(monkeypatch, *, hook=True):
    """vLLM-Omni's ``StageRuntime`` as it was before anybody wrapped it, then wrapped by the plugin."""
    module = importlib.import_module(seams.RUNTIME_MODULE)
    name = "_assemble_stage_pools"
    host = module.StageRuntime.__dict__[name]
    monkeypatch.setattr(module.StageRuntime, name, getattr(host, "__wrapped__", host))
    if hook:
        pools.wrap(module)
    return module.StageRuntime


def assembled(runtime, stages, clients):
    """The pools that vLLM-Omni makes of clients, one list of them a stage."""
    self = object.__new__(runtime)
    self._stage_configs = stages
    self._log_stats = False
    metadata = SimpleNamespace(stage_type="diffusion")
    plans = [
        SimpleNamespace(stage_idx=number, stage_id=number, replicas=[SimpleNamespace(metadata=metadata)])
        for number in range(len(stages))
    ]
    return self._assemble_stage_pools(plans, dict(enumerate(clients)))


class Orchestrator:
    """What of vLLM-Omni's orchestrator gives a request to a pool, and lets go of it when it is over."""

    def __init__(self, pool):
        self.pool = pool
        self.numbers = 0

    async def submit(self, session=None, **extra):
        """Give the pool one request; returns its id and the slot where it went."""
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        self.numbers += 1
        request_id = f"robot-{session}-{self.numbers}"
        if session is not None:
            extra["session_id"] = session
        params = OmniDiffusionSamplingParams(extra_args=extra)
        state = SimpleNamespace(sampling_params_list=[params] * (self.pool.stage_id + 1))
        return request_id, await self.pool.submit_initial(request_id, state, {"prompt": ""})

    async def step(self, session=None, **extra):
        """One step from its beginning to its end; returns the slot where it went."""
        request_id, slot = await self.submit(session, **extra)
        self.pool.release_binding(request_id)
        return slot


class Thread:
    """A loop of its own in a thread, as the orchestrator has one."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine):
        """Run a coroutine there and return what it returns."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(300)

    def stop(self):
        async def cancel():
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.run(cancel())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(300)
        self.loop.close()


def engine_of(stage_pools, stages):
    """Stands where vLLM-Omni's ``AsyncOmni`` does, over these pools."""

    async def collective_rpc(**_):
        raise AssertionError("a call went through the queue of the requests")

    engine = SimpleNamespace(stage_pools=stage_pools)
    return SimpleNamespace(engine=engine, stage_configs=stages, collective_rpc=collective_rpc)


def module_of(**names):
    """A module of vLLM-Omni with these names."""
    module = types.ModuleType("a module of vLLM-Omni")
    vars(module).update(names)
    return module


def run(scenario, runtime, *, replicas=2, **how):
    """Run a scenario over a pool of named clients, on one loop, as the orchestrator's."""

    async def running():
        clients = [Client(f"tcp://{number}") for number in range(replicas)]
        (pool,) = assembled(runtime, [stage(**how)], [clients])
        result = await scenario(pool, clients)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        return result

    return asyncio.run(asyncio.wait_for(running(), 300))


async def until(condition):
    """Wait for something that the background does."""
    for _ in range(60_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came")


def attach_hub(pool, clients):
    """Have the pool route as in vLLM-Omni's distributed mode; its own choice is at random."""
    from vllm_omni.distributed.omni_coordinator import RandomBalancer, ReplicaStatus

    replicas = [
        SimpleNamespace(input_addr=client.name, status=ReplicaStatus.UP, queue_length=0) for client in clients
    ]
    pool.attach_hub(SimpleNamespace(get_replicas_for_stage=lambda _: SimpleNamespace(replicas=replicas)))
    pool.attach_load_balancer(RandomBalancer())
    return replicas

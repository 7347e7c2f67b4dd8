"""An engine that records what reaches its workers, and a robot's socket that plays a script.

Between them stand vLLM-Omni's own classes: connection, policy serving, rollout serving, session store.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from vllm_omni_session_state.base import settings
from vllm_omni_session_state.omni.server import hooks

ROBOT = "vllm_omni.entrypoints.openpi.connection.RobotRealtimeConnection"


class Engine:
    """Stands where vLLM-Omni's ``AsyncOmni`` does: stages, and one remote call after the other."""

    def __init__(self, *, flag=True, options=None, stage_type="diffusion", ranks=1, replicas=1):
        model_config = {"policy_server_config": {"image_resolution": [18, 32]}}
        if options is not None:
            model_config["session_state"] = options
        held = SimpleNamespace(model_config=model_config, **{settings.FLAG: flag})
        self.stage_configs = [
            SimpleNamespace(stage_id=0, stage_type="llm"),
            SimpleNamespace(stage_id=1, stage_type=stage_type, diffusion_config=held),
        ]
        self.ranks, self.replicas = ranks, replicas
        self.calls = []
        self.sessions = set()
        self.under_way = self.most_under_way = 0
        self.replies = None
        self.between_steps = asyncio.Event()  # calls wait for it, as they do for a running step
        self.between_steps.set()

    async def collective_rpc(self, *, method, args, kwargs, stage_ids):
        assert stage_ids == [1]
        if method == "session_state_figures":  # asked for at the start, and about no session
            return []
        assert kwargs == ({"only_id": True} if args else {})
        self.under_way += 1
        self.most_under_way = max(self.under_way, self.most_under_way)
        await self.between_steps.wait()
        self.under_way -= 1
        self.calls.append((method, args))
        if self.replies is not None:
            return self.replies
        found = [key in self.sessions for key in args]
        if method == "session_state_close":
            self.sessions.difference_update(args)
        rank = {"ok": True, "found": found, "gone": [True] * len(args)}
        answer = {"agree": True, "ranks": [{"rank": number, **rank} for number in range(self.ranks)]}
        return [[answer]] * self.replicas

    @property
    def closed(self):
        """Every id whose end arrived, in order."""
        return [key for method, args in self.calls if method == "session_state_close" for key in args]

    @property
    def parked(self):
        """Every id that was to be parked, in order."""
        return [key for method, args in self.calls if method == "session_state_park" for key in args]

    @property
    def marked(self):
        """The ids of each call that marks sessions stale."""
        return [args for method, args in self.calls if method == "session_state_mark_stale"]

    @property
    def expired(self):
        """Every id that was to end if it is parked, in order."""
        return [key for method, args in self.calls if method == "session_state_expire" for key in args]


class Socket:
    """A robot's websocket: each message of the script is a mapping, and then it hangs up or says nothing."""

    def __init__(self, *script, silent=False):
        self._script = list(script)
        self._silent = silent
        self.sent = []
        self.closed = False

    async def accept(self):
        pass

    async def receive(self):
        from vllm_omni.entrypoints.openpi.connection import _pack

        await asyncio.sleep(0)
        if self._script:
            message = self._script.pop(0)
            if isinstance(message, asyncio.Event):
                await message.wait()
                return await self.receive()
            return {"type": "websocket.receive", "bytes": _pack(message)}
        if self._silent:
            await asyncio.Event().wait()
        return {"type": "websocket.disconnect"}

    async def send_bytes(self, data):
        from vllm_omni.entrypoints.openpi.connection import _unpack

        self.sent.append(_unpack(data))

    async def close(self):
        self.closed = True


class Served:
    """vLLM-Omni's serving objects over an `Engine`; steps are recorded as ``(session, reset)``."""

    def __init__(self, engine):
        from vllm_omni.entrypoints.openai.serving_rl_rollout import ServingRLRollout
        from vllm_omni.entrypoints.openpi.serving import ServingRealtimeRobotOpenPI

        self.engine = engine
        self.steps = []
        self.step_gate = None
        policy = ServingRealtimeRobotOpenPI(engine, model_name="dreamzero")
        rollout = ServingRLRollout(policy)
        policy.infer = self.infer
        rollout._infer_world_model = self.infer
        self.state = SimpleNamespace(openai_serving_realtime_robot=policy, rl_rollout_serving=rollout)

    async def infer(self, obs, *, session_id, reset):
        self.steps.append((session_id, reset))
        if self.step_gate is not None:
            await self.step_gate.wait()
        if obs.get("fail"):
            raise RuntimeError("the model failed")
        self.engine.sessions.add(session_id)
        return {}

    @property
    def rollout(self):
        return self.state.rl_rollout_serving

    async def connect(self, socket, *, idle_timeout=30.0):
        """One connection of a robot from its beginning to its end."""
        from vllm_omni.entrypoints.openpi.connection import RobotRealtimeConnection

        connection = RobotRealtimeConnection(
            socket, self.state.openai_serving_realtime_robot, idle_timeout=idle_timeout
        )
        await connection.handle_connection()
        return socket


async def settled():
    """Let everything run that can."""
    for _ in range(50):
        await asyncio.sleep(0)


def served(scenario, **engine):
    """Run a scenario on served objects that are connected to the engine's workers."""

    async def running():
        objects = Served(Engine(**engine))
        hooks.connect(objects.engine, objects.state)
        await scenario(objects)
        await settled()
        return objects

    return asyncio.run(asyncio.wait_for(running(), 20))


def obs(session=None, **more):
    return {**({} if session is None else {"session_id": session}), **more}


RESET = {"endpoint": "reset"}


def rollout_request():
    from vllm_omni.entrypoints.openai.protocol.rollout import CreateSessionRequest

    return CreateSessionRequest(model="dreamzero")


def step_request(number, *, in_context=True):
    from vllm_omni.entrypoints.openai.protocol.rollout import RolloutStepRequest

    return RolloutStepRequest.model_validate(
        {"step_id": number, "observation": {}, "action": {}, "use_session_context": in_context}
    )

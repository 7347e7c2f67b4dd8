"""Where ends of sessions come from: the API server's robot websocket and rollout endpoints.

The plugin is loaded while the server starts, before any deploy config is read, so a class hooked then
would be hooked whatever the flag says. What is wrapped then is one function, ``omni_init_app_state``,
which the server calls as soon as its engine is there: the engine client knows every stage's
configuration. Only if a stage has the flag on, by its config or by the variable, is a serving class or
object touched. In a process that is no API server only the engine's replicas are there to be hooked.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_omni_session_state.base import settings
from vllm_omni_session_state.base.ids import DEFAULT, show_in_the_clear
from vllm_omni_session_state.base.log import LOGGER, tried
from vllm_omni_session_state.omni.admin import mount
from vllm_omni_session_state.omni.hooks import patching, seams
from vllm_omni_session_state.omni.replicas.stages import stages_with_sessions
from vllm_omni_session_state.omni.server.live_sessions import LiveSessions
from vllm_omni_session_state.omni.server.worker_client import WorkerClient

_ENDS = "_session_state_ends"
"""Attribute of a serving object of vLLM-Omni: the live sessions behind it."""

_ROBOT = "vllm_omni.entrypoints.openpi.connection.RobotRealtimeConnection"
_POLICY = "vllm_omni.entrypoints.openpi.serving.ServingRealtimeRobotOpenPI"
_ROLLOUT = "vllm_omni.entrypoints.openai.serving_rl_rollout.ServingRLRollout"


def wrap(module: ModuleType) -> None:
    """Wrap the function that the server calls when its engine is there, once."""
    tried(lambda: _wrap(module), _left_alone("API server"))


def _wrap(module: ModuleType) -> None:
    name = seams.SERVER_FUNCTION.name
    if not callable(getattr(module, name, None)):
        raise TypeError(f"expected a function {module.__name__}.{name}, found none")
    mount.note_applications(module)
    patching.wrap(module, name, _omni_init_app_state)


async def _omni_init_app_state(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = await original(*args, **kwargs)

    def connect_them() -> None:
        call = inspect.signature(original).bind(*args, **kwargs)
        connect(call.arguments["engine_client"], call.arguments["state"])

    tried(connect_them, _left_alone("API server"))
    return result


def connect(engine_client: Any, state: Any) -> None:
    """Have the ends of sessions reach the workers of every stage that has the flag on; else do nothing."""
    stages = stages_with_sessions(engine_client)
    if not stages:
        return
    settings = next(iter(stages.values()))
    show_in_the_clear(settings.show_ids)
    workers = WorkerClient(engine_client, list(stages))
    mount.serve(workers, state, http=any(each.http for each in stages.values()))
    policy = getattr(state, "openai_serving_realtime_robot", None)
    if policy is not None:
        _connect_ends(workers, state, policy, settings, list(stages))


def _connect_ends(
    workers: WorkerClient, state: Any, policy: Any, settings: settings.Settings, stages: list[int]
) -> None:
    ends = LiveSessions(
        workers,
        resume_s=settings.resume_s,
        idle_park_s=settings.idle_park_s if settings.has_tier else 0.0,
        expire_s=settings.expire_s if settings.has_tier else 0.0,
        idle_drop_s=settings.idle_drop_s,
        early=settings.has_disk,
    )

    def robots() -> None:
        _checked(_POLICY, policy)
        setattr(policy, _ENDS, (ends, settings))
        patching.wrap(_checked(_ROBOT), "handle_connection", _handle_connection)

    def rollouts() -> None:
        rollout = getattr(state, "rl_rollout_serving", None)
        if rollout is not None:
            _checked(_POLICY, policy)
            _checked(_ROLLOUT, rollout)
            _hook_rollout(rollout, policy, ends)

    hooked = tried(robots, _left_alone("robot websocket"))
    hooked |= tried(rollouts, _left_alone("rollout endpoints"))
    if hooked:
        LOGGER.info("ends of sessions reach the workers of stages %s", stages)
        if settings.idle_drop_s:
            ends.tell_the_time()


class RobotSessionProxy:
    """Stands between one robot's connection and vLLM-Omni's serving object, whose three names it offers."""

    def __init__(self, connection: Any, ends: LiveSessions, settings: settings.Settings) -> None:
        self._connection = connection
        self._serving = connection.serving
        self._ends = ends
        self._switch_ends = settings.switch_ends
        self._current: str | None = None
        self._mine: dict[str, None] = {}  # its sessions, in the order of their first steps
        self._fresh = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._serving, name)

    def reset(self, obs: dict[str, Any]) -> None:
        """The robot asks for a fresh start: it goes on with none of its sessions and resumes none."""
        self._fresh = True
        self._mine.clear()
        self._ends.leave(self)
        self._serving.reset(obs)

    async def infer(self, obs: dict[str, Any], *, session_id: str, reset: bool) -> Any:
        """Take one step; ``reset`` comes as vLLM-Omni has it, and goes on as false where one resumes."""
        # What vLLM-Omni does not remember as this connection's ends: its next step starts anew.
        seen = getattr(self._connection, "_seen_sessions", self._mine)
        over = [key for key in self._mine if key not in seen]
        current, self._current = self._current, session_id
        if self._switch_ends and current is not None and current not in (session_id, *over):
            over.append(current)
        for key in over:
            self._mine.pop(key, None)
            self._ends.leave(self, only=key)
        # An id goes without saying for the rest of a connection; to resume a session it must be said.
        named = bool(obs.get("session_id")) and session_id != DEFAULT
        if reset and named and not self._fresh and await self._ends.resume(session_id, self):
            reset = False
        async with self._ends.step(session_id, self, named=named):
            self._mine[session_id] = None
            return await self._serving.infer(obs, session_id=session_id, reset=reset)

    def leave(self) -> None:
        """The connection is over."""
        self._ends.leave(self, keep=True)


async def _handle_connection(original: Callable[..., Any], self: Any) -> Any:
    behind = getattr(self.serving, _ENDS, None)
    if behind is None:
        return await original(self)
    proxy = self.serving = RobotSessionProxy(self, *behind)
    try:
        return await original(self)
    finally:
        proxy.leave()


def _hook_rollout(rollout: Any, policy: Any, ends: LiveSessions) -> None:
    """vLLM-Omni calls ``drop_session`` at every close and reset; it looks for the model in this process."""

    async def infer(original: Callable[..., Any], obs: Any, *, session_id: str, reset: bool) -> Any:
        async with ends.step(session_id, rollout):
            return await original(obs, session_id=session_id, reset=reset)

    patching.wrap(rollout, "_infer_world_model", infer)
    policy.drop_session = ends.end


def _checked(name: str, instance: object = None) -> type:
    module, _, qualname = name.rpartition(".")
    owner: type = getattr(importlib.import_module(module), qualname)
    if instance is not None and not isinstance(instance, owner):
        raise TypeError(f"expected a {name}, found a {type(instance).__qualname__}")
    seams.check(owner, seams.SERVING_SEAMS[name])
    return owner


def _left_alone(what: str) -> str:
    return f"the {what} is left alone, and sessions that end there stay in the worker"

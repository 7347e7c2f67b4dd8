"""An engine client whose workers are in this process: real managers and the real worker calls, no model.

A fake in three places: there is no engine between server and worker, the ranks of a replica are one, and a
forward that runs is an event that is not set.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import types
import urllib.error
import urllib.request
from types import SimpleNamespace

import torch

from vllm_omni_session_state.base import settings
from vllm_omni_session_state.manager.manager import SessionStateManager
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.omni.admin import mount
from vllm_omni_session_state.omni.hooks import seams
from vllm_omni_session_state.omni.server import hooks
from vllm_omni_session_state.omni.worker import rpc

MIB = 1 << 20


class Runner(SimpleNamespace):
    """Stands where vLLM-Omni's runner does, and can be held weakly as that can."""


class FakeEngine:
    """Stands where vLLM-Omni's ``AsyncOmni`` does."""

    def __init__(self, *, replicas=1, options=None, host_budget=64 * MIB):
        held = SimpleNamespace(model_config={"session_state": options or {}}, **{settings.FLAG: True})
        self.stage_configs = [SimpleNamespace(stage_id=0, stage_type="diffusion", diffusion_config=held)]
        tiers = [None if host_budget is None else HostTier(budget=host_budget) for _ in range(replicas)]
        self.managers = [SessionStateManager(tier=tier) for tier in tiers]
        self.workers = [
            SimpleNamespace(model_runner=Runner(pipeline=SimpleNamespace(_memory_manager=manager)))
            for manager in self.managers
        ]
        self.between_steps = asyncio.Event()  # calls wait for it, as they do for a running step
        self.between_steps.set()
        self.request_states = {}  # of the requests that are under way
        self.calls = []
        self.replies = None

    def begin(self, *keys, replica=0):
        """Have sessions that hold something."""
        for key in keys:
            with self.managers[replica].lease(key) as session:
                session.attrs["frames"] = torch.zeros(4, 256)

    async def collective_rpc(self, *, method, args, kwargs, stage_ids):
        assert stage_ids == [0]
        self.calls.append((method, args))
        await self.between_steps.wait()
        if self.replies is not None:
            return self.replies
        return [[rpc.METHODS[method](worker, *args, **kwargs)] for worker in self.workers]


class Live:
    """An application that is connected as vLLM-Omni's is, and served from a thread with a loop of its own.

    Args:
        api_key: Guards it with vLLM-Omni's own middleware.
        engine: A `FakeEngine`; one with these options where there is none.
        **options: The stage's ``session_state``; ``http`` is on.
    """

    def __init__(self, *, api_key=None, engine=None, **options):
        self.engine = engine or FakeEngine(options={"http": True, **options})
        self.api_key = api_key
        self.app = self._build()
        self._listening = socket.socket()
        self._listening.bind(("127.0.0.1", 0))
        self._listening.listen(128)  # who comes before the server does waits
        self.port = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(300)

    def _build(self):
        from fastapi import FastAPI
        from vllm.entrypoints.serve.instrumentator.metrics import attach_router
        from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

        module = types.ModuleType("a server's module")
        setattr(module, seams.SERVER_BUILDER, FastAPI)
        mount.note_applications(module)
        app = getattr(module, seams.SERVER_BUILDER)()
        attach_router(app)
        if self.api_key is not None:
            app.add_middleware(AuthenticationMiddleware, tokens=[self.api_key])
        return app

    async def _serve(self):
        import uvicorn

        self.loop = asyncio.get_running_loop()
        hooks.connect(self.engine, self.app.state)
        settings = uvicorn.Config(self.app, log_level="error", lifespan="off")
        self._server = uvicorn.Server(settings)
        self._ready.set()
        await self._server.serve(sockets=[self._listening])

    def stop(self):
        """Stop it; calls that wait for a step go on."""
        self.step_runs(False)
        self._server.should_exit = True
        self._thread.join(300)
        assert not self._thread.is_alive()

    def step_runs(self, runs):
        """From now on a forward runs, or none does."""
        event = self.engine.between_steps
        self.loop.call_soon_threadsafe(event.clear if runs else event.set)
        time.sleep(0.05)

    def http(self, method, path, body=None, *, api_key=None, raw=None):
        """One request: its status and its JSON, or the text where it is none."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", method=method, data=data)
        request.add_header("Content-Type", "application/json")
        if api_key is not None:
            request.add_header("Authorization", f"Bearer {api_key}")
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text.decode()

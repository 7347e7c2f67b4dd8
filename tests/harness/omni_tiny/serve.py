"""`vllm-omni serve` on the tiny DreamZero: the real server, on a free port of this machine.

Covers start, health, stop, plain HTTP, and worker methods by name. The server
is several processes; nothing of them is in reach here but what they answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from omni_tiny import robot
from omni_tiny.capacity import FREE_BYTES_VARIABLE, free_bytes
from omni_tiny.omni_runs import write_deploy
from omni_tiny.served_clients import Robot, Rollout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from typing_extensions import Self

POLICY = {
    "image_resolution": list(robot.CAMERA),
    "n_external_cameras": 2,
    "needs_wrist_camera": True,
    "needs_session_id": True,
    "action_space": "joint_position",
}
"""What the server tells a robot that connects; without it there is no robot websocket."""

START_S = 600.0
"""A server that is not healthy after so long is given up; it takes half a minute on an idle machine."""


class ServerFailedError(RuntimeError):
    """The server ended or did not get healthy; carries the end of its log."""


class Server:
    """One running server; a context manager.

    Args:
        checkpoint: From `write_dreamzero`.
        folder: For the deploy YAML and the log, ``server.log``.
        flag: The stage's ``enable_session_state_manager``; ``None`` leaves the line out.
        session_state: The stage's ``model_config.session_state``.
        capacity: Sessions that the worker's runner keeps, 1 to 64.
        idle_timeout_s: After so many silent seconds the server closes a robot's connection.
        num_inference_steps: Denoising steps per chunk; many make a step last.
        replicas: Of the one stage.
        executor: ``"mp"`` for worker processes, ``"uni"`` for a worker in its engine's own process, which is
            one import of vLLM-Omni less.
        environ: More environment variables of the server's processes.
        api_key: Without it the server answers nobody; everything here has it.

    Attributes:
        port: On the loopback interface.
        idle_timeout_s: As given.
        log: The server's output.
        headers: With which it answers.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        folder: Path,
        *,
        flag: bool | None = True,
        session_state: Mapping[str, Any] | None = None,
        capacity: int = 8,
        idle_timeout_s: float = 30.0,
        num_inference_steps: int = 2,
        replicas: int = 1,
        executor: str = "mp",
        environ: Mapping[str, str] | None = None,
        api_key: str | None = None,
    ) -> None:
        self.port = _free_port()
        self.headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.idle_timeout_s = idle_timeout_s
        self.log = folder / "server.log"
        more: dict[str, Any] = {"policy_server_config": POLICY}
        if session_state is not None:
            more["session_state"] = dict(session_state)
        deploy = write_deploy(
            folder / "deploy.yaml",
            checkpoint,
            flag=flag,
            num_inference_steps=num_inference_steps,
            model_config=more,
            replicas=replicas,
            executor=executor,
        )
        command = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "serve", os.fspath(checkpoint)]
        command += ["--omni", "--deploy-config", str(deploy), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--robot-openpi-idle-timeout", str(idle_timeout_s)]
        settings = {
            **os.environ,
            FREE_BYTES_VARIABLE: str(free_bytes(capacity)),
            "OMP_NUM_THREADS": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_SERVER_DEV_MODE": "1",  # brings /collective_rpc
            **({} if api_key is None else {"VLLM_API_KEY": api_key}),
            **(environ or {}),
        }
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - it makes one system call
            )
        try:
            self._await_health()
        except BaseException:
            self.stop()
            raise

    def _await_health(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerFailedError(f"the server ended with {self._process.returncode}:\n{self.tail()}")
            with contextlib.suppress(OSError):
                if self.http("GET", "/health")[0] == 200:
                    return
            time.sleep(0.5)
        raise ServerFailedError(f"the server is not healthy after {START_S:.0f} s:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        """The end of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def http(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float = 120.0,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Make one HTTP request.

        Returns:
            The status and the decoded JSON body, ``None`` where there is none.
        """
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **(self.headers if headers is None else headers)},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        try:
            return status, json.loads(text) if text else None
        except ValueError:
            return status, text.decode(errors="replace")

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker by name and return what the one stage's one replica answers.

        Raises:
            RuntimeError: The call failed there, or the worker has no such method.
        """
        (result,) = self.call_all(method, *args, **kwargs)
        return result

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The same of every replica that lives, each of one rank, in their order."""
        body = {"method": method, "args": list(args), "kwargs": kwargs, "timeout": 120}
        status, answer = self.http("POST", "/collective_rpc", body)
        if status != 200 or any(isinstance(result, dict) for result in answer["results"]):
            raise RuntimeError(f"the worker did not answer {method!r}: {answer}")
        return [result for (result,) in answer["results"]]

    def robot(self, session: str | None = None, *, seed: int = 0) -> Robot:
        """Connect a robot."""
        return Robot(self.port, session, seed=seed, headers=self.headers)

    def rollout(self, *, seed: int = 0) -> Rollout:
        """Begin a rollout over HTTP."""
        return Rollout(self, seed=seed)

    def stop(self) -> None:
        """Stop all of the server's processes; the gentle way first."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()


def _die_with_parent() -> None:
    """In the server's process: end with the one that started it, however that ended."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(checkpoint: str | Path, folder: Path, **settings: Any) -> Iterator[Server]:
    """Serve for a while; see `Server`."""
    with Server(checkpoint, folder, **settings) as server:
        yield server

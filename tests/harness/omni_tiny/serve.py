"""`vllm-omni serve` on the tiny DreamZero: the real server, on a free port of this machine, and its clients.

Covers start, health, stop, the robot websocket as robots speak it, plain HTTP, and worker methods by
name. The server is several processes; nothing of them is in reach here but what they answer.
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

import numpy as np

from omni_tiny import robot
from omni_tiny.capacity import FREE_BYTES_VARIABLE, free_bytes
from omni_tiny.inproc import PROMPT
from omni_tiny.omni_runs import write_deploy
from omni_tiny.tiny import LASTS_S

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
        body = {"method": method, "args": list(args), "kwargs": kwargs, "timeout": 120}
        status, answer = self.http("POST", "/collective_rpc", body)
        if status != 200 or isinstance(answer["results"][0], dict):
            raise RuntimeError(f"the worker did not answer {method!r}: {answer}")
        ((result,),) = answer["results"]
        return result

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


class Robot:
    """A robot on the websocket, as the OpenPI clients speak; a context manager that hangs up.

    Args:
        port: The server's.
        session: The id that its observations name; ``None`` names none.
        seed: Of what it sees.
        headers: Of its request for a connection.

    Attributes:
        config: What the server said when it connected.
    """

    def __init__(
        self,
        port: int,
        session: str | None = None,
        *,
        seed: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.session = session
        self._port = port
        self._headers = headers
        self._rng = np.random.default_rng(seed)
        self._steps = 0
        self.connect()

    def connect(self) -> None:
        """Open a new connection, on which the robot goes on with what it sees; the old one is just let be."""
        from websockets.sync.client import connect

        self._socket = connect(
            f"ws://127.0.0.1:{self._port}/v1/realtime/robot/openpi",
            max_size=None,
            compression=None,
            additional_headers=self._headers,
        )
        self._sockets = [*getattr(self, "_sockets", ()), self._socket]
        self.config = self.receive()

    def send_step(self, session: str | None = None, *, lasts_s: float = 0.0) -> None:
        """Send one observation and wait for nothing.

        Args:
            session: Another session than the robot's own.
            lasts_s: Seconds that the step lasts at least.
        """
        session = session or self.session
        frames = 4 if self._steps else 1
        seen = robot.observation(self._rng, session=session or "", prompt=PROMPT, frames=frames)
        if session is None:
            del seen["session_id"]
        if lasts_s:
            seen[LASTS_S] = lasts_s
        self._steps += 1
        self.send(seen)

    def step(self, session: str | None = None) -> np.ndarray:
        """Take one step and return its actions.

        Raises:
            RuntimeError: The server answered with an error.
        """
        self.send_step(session)
        return self.receive()

    def reset(self) -> None:
        """Ask for a fresh start: ``endpoint: "reset"``."""
        self.send({"endpoint": "reset"})
        assert self.receive() == {"status": "reset successful"}

    def send(self, message: Any) -> None:
        """Send one message."""
        from vllm_omni.entrypoints.openpi.connection import _pack

        self._socket.send(_pack(message))

    def receive(self, timeout_s: float = 120.0) -> Any:
        """Wait for the next message.

        Raises:
            RuntimeError: It is an error.
        """
        from vllm_omni.entrypoints.openpi.connection import _unpack

        message = _unpack(self._socket.recv(timeout_s))
        if isinstance(message, dict) and message.get("type") == "error":
            raise RuntimeError(message["message"])
        return message

    def hang_up(self) -> None:
        """Close the robot's connections as the protocol asks for."""
        for each in self._sockets:
            each.close()

    def vanish(self) -> None:
        """Break the connection without a word, as a robot does that loses power or its network."""
        raw = self._socket.socket
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        raw.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def wait_until_closed(self, timeout_s: float) -> None:
        """Wait until the server has closed the connection."""
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):
            self._socket.recv(timeout_s)
            raise AssertionError("the server sent a message instead of closing the connection")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.hang_up()


class Rollout:
    """One session of the RL rollout endpoints.

    Attributes:
        session: Its id, made by the server.
    """

    def __init__(self, server: Server, *, seed: int = 0) -> None:
        self._server = server
        self._rng = np.random.default_rng(seed)
        self._next = 0
        body = {"model": "dreamzero", "mode": "world_model_env"}
        self.session = self._post("", body)["session_id"]

    def step(self, *, in_context: bool = True) -> tuple[int, Any]:
        """Take one step, in the session's context or, as the endpoint allows, outside of it.

        Returns:
            The HTTP status and the answer.
        """
        seen = robot.observation(self._rng, session="", prompt=PROMPT, frames=4 if self._next else 1)
        images = {name: seen[name].tolist() for name in seen if "image" in name}
        status, answer = self._server.http(
            "POST",
            f"/v1/realtime/sessions/{self.session}/step",
            {
                "step_id": self._next,
                "observation": {"prompt": PROMPT, "images": images},
                "action": {
                    "joint_positions": seen["observation/joint_position"].tolist(),
                    "gripper_position": seen["observation/gripper_position"].tolist(),
                },
                "use_session_context": in_context,
            },
        )
        self._next += in_context and status == 200
        return status, answer

    def reset(self) -> None:
        """Start over."""
        self._post(f"/{self.session}/reset")
        self._next = 0

    def close(self) -> None:
        """End it."""
        self._post(f"/{self.session}/close")

    def _post(self, path: str, body: Any = None) -> Any:
        status, answer = self._server.http("POST", f"/v1/realtime/sessions{path}", body)
        assert status == 200, (status, answer)
        return answer


@contextlib.contextmanager
def serving(checkpoint: str | Path, folder: Path, **settings: Any) -> Iterator[Server]:
    """Serve for a while; see `Server`."""
    with Server(checkpoint, folder, **settings) as server:
        yield server

"""Clients of a served tiny model: a robot on its websocket, and a rollout of the HTTP endpoints."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_tiny import robot
from omni_tiny.inproc import PROMPT
from omni_tiny.tiny import LASTS_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from omni_tiny.crowd import Crowd
    from omni_tiny.serve import Server


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


class CrowdRobot:
    """One session of a `Crowd`, as a robot on a websocket of its own.

    Attributes:
        number: The session's.
        robot: The robot.
    """

    def __init__(self, server: Server, crowd: Crowd, number: int) -> None:
        self.number = number
        self.robot = server.robot(crowd.name(number))

    def step(self, session: str, *, rng: Any, prompt: str, frames: int) -> Any:
        """Take one step and return its actions; see `Crowd.run`."""
        self.robot.send(robot.observation(rng, session=session, prompt=prompt, frames=frames))
        return self.robot.receive()


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

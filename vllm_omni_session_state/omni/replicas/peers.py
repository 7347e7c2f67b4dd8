"""Farewell to a replica whose process has died, on the one thread that serves all replicas.

There vLLM-Omni sends it a last message, which waits until somebody is connected: every session of every
replica stands still for good. Then it waits up to ten seconds for the rest of the process to end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from vllm_omni_session_state.omni.hooks import patching

LOOK_EVERY_MS = 100
"""Between two looks whether the process still lives, while it is not connected."""


class _Careful:
    """Stands where a client's socket does; what is sent to a process that is gone is dropped."""

    def __init__(self, socket: Any, process: Any) -> None:
        import zmq  # noqa: PLC0415 - vLLM-Omni brings it

        self._socket = socket
        self._process = process
        self._writable = zmq.POLLOUT

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send(self, *args: Any, **kwargs: Any) -> Any:
        """Send as the socket does, unless there is nobody any more."""
        while not self._socket.poll(LOOK_EVERY_MS, self._writable):
            if not self._process.is_alive():
                return None
        return self._socket.send(*args, **kwargs)


def make_careful(client: Any) -> None:
    """Have the farewell to a local replica hold up nobody; one without a process of its own is left alone."""
    socket, manager = getattr(client, "_request_socket", None), getattr(client, "_proc_manager", None)
    process = getattr(manager, "proc", None)
    if socket is None or process is None or isinstance(socket, _Careful):
        return
    client._request_socket = _Careful(socket, process)
    _wait_apart(weakref.ref(client), manager)


def _wait_apart(client: weakref.ref[Any], manager: Any) -> None:
    """Have a dead replica's process be waited for in a thread of its own; any other is as ever."""

    def shutdown(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if getattr(client(), "_engine_dead", False):
            threading.Thread(target=original, args=args, kwargs=kwargs, name="session-state-farewell").start()
        else:
            original(*args, **kwargs)

    patching.wrap(manager, "shutdown", shutdown)

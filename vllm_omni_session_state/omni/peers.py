"""The host's socket to a replica's process, which must not wait for a process that is gone.

A send there waits until somebody is connected, on the one thread that serves all replicas. When a replica's
process has died, the host says its farewell to it like that, and every session of every replica stands still
for good.
"""

from __future__ import annotations

from typing import Any

LOOK_EVERY_MS = 100
"""Between two looks whether the process still lives, while it is not connected."""


class _Careful:
    """Stands where a client's socket does; what is sent to a process that is gone is dropped.

    Args:
        socket: The host's.
        process: At its other end.
    """

    def __init__(self, socket: Any, process: Any) -> None:
        import zmq  # noqa: PLC0415 - the host brings it

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
    """Have what is sent to a local replica of the host never wait for its dead process.

    Args:
        client: The host's; one without a process or a socket of its own is left as it is.
    """
    socket = getattr(client, "_request_socket", None)
    process = getattr(getattr(client, "_proc_manager", None), "proc", None)
    if socket is not None and process is not None and not isinstance(socket, _Careful):
        client._request_socket = _Careful(socket, process)

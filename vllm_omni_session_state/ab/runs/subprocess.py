"""Starts a process and hands on the events that it reports, one JSON object a line, until it ends.

They come on a file descriptor of their own, since vLLM-Omni's log takes standard output. The last of them
is ``end``, with ``error`` empty or in one line. Whatever happens, the process and those that it started are
gone afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_omni_session_state.base.settings import ENV_FLAG as FLAG

SILENCE_S = 240.0
"""A process that reports nothing for so long is given up, if it is not told otherwise."""

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables that say how many threads compute: one and two give different bits."""

_TICK_S = 0.2


class CouldNotRunError(Exception):
    """There is no result; the message is one line that says why."""


def settings(*, flag: bool | None) -> dict[str, str]:
    """The environment of a process: this one's, with nothing but the flag set, and threads pinned.

    Args:
        flag: What is set; ``None`` leaves it out.
    """
    threads = os.environ.get(THREADS[0]) or "1"
    kept = {name: value for name, value in os.environ.items() if name != FLAG}
    pinned = {**dict.fromkeys(THREADS, threads), "PYTHONUNBUFFERED": "1"}
    return {**kept, **pinned, **({} if flag is None else {FLAG: "1" if flag else "0"})}


def run_job(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, silence_s: float | None = None
) -> Iterator[dict[str, Any]]:
    """Run a process and yield its events, with an empty one about five times a second between them.

    Args:
        command: What is run; the number of the file descriptor for its events is added as last argument.
        environment: All of it.
        log: Where its standard output and error are added.
        silence_s: Seconds without an event after which it is given up; ``None``: `SILENCE_S`.

    Raises:
        CouldNotRunError: It reported an error, died, or fell silent.
    """
    reader, writer = os.pipe()
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(  # noqa: S603 - the command is the caller's own
                [*command, str(writer)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(writer,),
                start_new_session=True,
            )
    finally:
        os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as events, _gone_afterwards(process):
        yield from _events(events, process, SILENCE_S if silence_s is None else silence_s)


def _events(events: Any, process: subprocess.Popen[bytes], silence_s: float) -> Iterator[dict[str, Any]]:
    heard, rest = time.monotonic(), b""
    with selectors.DefaultSelector() as selector:
        selector.register(events, selectors.EVENT_READ)
        while True:
            status = process.poll()  # asked before reading: what a dead process wrote is still read
            if selector.select(_TICK_S):
                heard = time.monotonic()
                *lines, rest = (rest + (chunk := events.read(1 << 16))).split(b"\n")
                for event in map(json.loads, lines):
                    if event.get("error"):
                        raise CouldNotRunError(event["error"])
                    yield event
                    if "end" in event:
                        return
                if chunk:
                    continue
                time.sleep(_TICK_S)
            if status is not None:
                raise CouldNotRunError(f"its process ended early with {_ended(status)}")
            if time.monotonic() - heard > silence_s:
                raise CouldNotRunError(f"its process reported nothing for {silence_s:.0f} s")
            yield {}


def _ended(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"


@contextlib.contextmanager
def _gone_afterwards(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

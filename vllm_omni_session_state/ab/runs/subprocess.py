"""A process that reports events to the one that started it: both ends of it.

Events are JSON objects, one a line, on a file descriptor of their own, since vLLM-Omni's log takes standard
output. The last of them is ``end``, with ``error`` empty or in one line. Whatever happens, the process and
those that it started are gone afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_omni_session_state.base.settings import ENV_FLAG as FLAG

SILENCE_S = 240.0
"""A process that reports nothing for so long is given up, if it is not told otherwise."""

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables that say how many threads compute: one and two give different bits."""

Report = Callable[..., None]
"""Reports one event: its keyword arguments."""

_TICK_S = 0.2


class CouldNotRunError(Exception):
    """There is no result; the message is one line that says why."""


def settings(*, flag: bool | None) -> dict[str, str]:
    """The environment of a process: this one's, but the flag set or left out, and threads pinned."""
    threads = os.environ.get(THREADS[0]) or "1"
    kept = {name: value for name, value in os.environ.items() if name != FLAG}
    pinned = {**dict.fromkeys(THREADS, threads), "PYTHONUNBUFFERED": "1"}
    return {**kept, **pinned, **({} if flag is None else {FLAG: "1" if flag else "0"})}


def run_job(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, silence_s: float | None = None
) -> Iterator[dict[str, Any]]:
    """Run a process and yield its events, with an empty one about five times a second between them.

    The number of the file descriptor for events is added to the command; output and errors to the log.

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
    waiting = select.poll()
    waiting.register(events, select.POLLIN)
    while True:
        status = process.poll()  # asked before reading: what a dead process wrote is still read
        if waiting.poll(1000 * _TICK_S):
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


@contextlib.contextmanager
def reporting(descriptor: int) -> Iterator[Report]:
    """In the process: report for as long as the context lasts, and last that it ended, with what it raised.

    When nobody reads any more, as when its parent was killed, it and all that it started end at once: it
    would hold a device, and load for long. Only for a process that `run_job` started, which leads a group.

    Args:
        descriptor: From `run_job`. It is closed; the processes that this one starts do not get it.
    """
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with_reader, args=(descriptor,), daemon=True).start()
    with os.fdopen(descriptor, "w", buffering=1) as events:

        def report(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")

        error = ""
        try:
            yield report
        except BaseException as failure:  # noqa: BLE001 - whatever it is, the parent shall say it
            traceback.print_exc()
            error = f"{type(failure).__name__}: {' '.join(str(failure).split()) or 'without a word'}"
        report(end=True, error=error)


def _end_with_reader(descriptor: int) -> None:
    waiting = select.poll()
    waiting.register(descriptor, 0)  # of the end that writes: an error is that nobody reads
    waiting.poll()
    os.killpg(os.getpid(), signal.SIGKILL)

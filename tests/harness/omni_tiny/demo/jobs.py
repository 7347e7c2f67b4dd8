"""Starts one process of the demo and hands on what it reports, until it ends.

Its standard output and error go to the log. Whatever happens, the process and those that it started are
gone afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

FLAG = "OMNI_DIFFUSION_SESSION_STATE_MANAGER"
"""The plugin's environment flag; its other variables begin with it."""

SILENCE_S = 240.0
"""A process that reports nothing for so long is given up."""

_TICK_S = 0.2


class CouldNotRunError(Exception):
    """The demo has no result; the message is one line that says why."""


def settings(*, flag: bool | None) -> dict[str, str]:
    """The environment of a process: this one's, with nothing but the flag set of the plugin's variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FLAG)}
    # One thread, also because one and two give different bits; no look-up of anything on a network.
    quiet = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    return {**kept, **quiet, **({} if flag is None else {FLAG: "1" if flag else "0"})}


def run_job(
    job: str, scenarios: Sequence[str], folder: Path, *, environment: Mapping[str, str], log: Path
) -> Iterator[dict[str, Any]]:
    """Run one job of `child` and yield its events, with an empty one about five times a second between them.

    Raises:
        CouldNotRunError: It reported an error, died, or fell silent.
    """
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "omni_tiny.demo.child", job, *scenarios, os.fspath(folder), str(writer)]
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
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
        yield from _events(events, process)


def _events(events: Any, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
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
                raise CouldNotRunError(f"its process ended early with exit status {status}")
            if time.monotonic() - heard > SILENCE_S:
                raise CouldNotRunError(f"its process reported nothing for {SILENCE_S:.0f} s")
            yield {}


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

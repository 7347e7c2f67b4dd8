"""How a process reports to the one that started it: one JSON object a line, on a file descriptor."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

Report = Callable[..., None]
"""Reports one event: its keyword arguments."""


def end_with_reader(descriptor: int) -> None:
    """Have this process and all that it started end at once when nobody reads its reports any more.

    Its parent may be killed, and nobody would end it: it would hold a device, and load for long. Only for a
    process that `run_job` started, which leads a group of its own.
    """

    def wait() -> None:
        waiting = select.poll()
        waiting.register(descriptor, 0)  # of the end that writes: an error is that nobody reads
        waiting.poll()
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def reporting(descriptor: int) -> Iterator[Report]:
    """Report for as long as the context lasts, and last that it ended, with what it raised in one line.

    Args:
        descriptor: From `run_job`. It is closed; the processes that this one starts do not get it.
    """
    os.set_inheritable(descriptor, False)
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

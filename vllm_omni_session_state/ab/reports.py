"""How a process reports to the one that started it: one JSON object a line, on a file descriptor."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

Report = Callable[..., None]
"""Reports one event: its keyword arguments."""


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

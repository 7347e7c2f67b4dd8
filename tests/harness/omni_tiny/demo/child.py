"""One process of the demo: it writes the checkpoint, or serves the scenario once.

It reports on a file descriptor of its own, one JSON object per line, since the host's log takes standard
output: ``phase`` (a phase begins), ``done`` (operations done), ``outputs`` (digests by name), ``look`` (a
worker's listing) and last ``end``, with ``error`` empty or in one line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_tiny.demo.scenarios import SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_tiny.demo.scenarios import Scenario

    Report = Callable[..., None]

LOADING, STEPPING, STOPPING = "loading the model", "stepping", "stopping"
"""Phases of a served run."""


def digest(value: Any) -> str:
    """A hash of a tensor's, an array's or a plain value's kind, shape and every bit."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        kind, content = (
            f"{value.dtype}{tuple(value.shape)}",
            value.contiguous().view(torch.uint8).numpy().tobytes(),
        )
    elif isinstance(value, np.ndarray):
        kind, content = f"{value.dtype}{value.shape}", value.tobytes()
    else:
        kind, content = type(value).__name__, repr(value).encode()
    return hashlib.sha256(kind.encode() + b"\0" + content).hexdigest()


def serve(scenario: Scenario, folder: Path, report: Report) -> None:
    """Serve the scenario once and report what came out."""
    report(phase=LOADING)
    with scenario.open(folder) as model:
        report(phase=STEPPING)
        for number, operation in enumerate(scenario.operations, start=1):
            answers = operation.run(model)
            if operation.look:
                report(look={**answers, "from": os.getpid()})
            else:
                report(
                    outputs={
                        f"{number}. {operation.label}: {name}": digest(answers[name]) for name in answers
                    }
                )
            report(done=number)
        report(phase=STOPPING)


def main() -> None:
    """Do the one job that the command line names; a reported error is no exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=("write", "serve"))
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("events", type=int, help="file descriptor")
    arguments = parser.parse_args()
    os.set_inheritable(arguments.events, False)
    with os.fdopen(arguments.events, "w", buffering=1) as events:

        def report(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")

        scenario = SCENARIOS[arguments.scenario]()
        error = ""
        try:
            if arguments.job == "write":
                scenario.write(arguments.folder)
            else:
                serve(scenario, arguments.folder, report)
        except BaseException as failure:  # noqa: BLE001 - whatever it is, the parent shall say it
            traceback.print_exc()
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        report(end=True, error=error)


if __name__ == "__main__":  # the host's worker processes import this file again
    main()

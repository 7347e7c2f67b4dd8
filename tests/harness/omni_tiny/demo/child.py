"""One process of the demo: it writes the checkpoints of the scenarios, or serves each of them once.

It reports on a file descriptor of its own, one JSON object per line, since vLLM-Omni's log takes standard
output: ``phase`` (a phase begins), ``done`` (operations done), ``outputs`` (digests by name), ``look`` (a
worker's listing) and last ``end``, with ``error`` empty or in one line.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from omni_tiny.demo.scenarios import SCENARIOS
from vllm_omni_session_state.ab.runs.subprocess import reporting

if TYPE_CHECKING:
    from omni_tiny.demo.scenarios import Scenario
    from vllm_omni_session_state.ab.runs.subprocess import Report

LOADING, SERVING, STOPPING = "loading", "serving", "stopping"
"""Phases of a served run."""


def serve(scenario: Scenario, folder: Path, report: Report) -> None:
    """Serve the scenario once and report what came out."""
    from omni_tiny.digest import digest

    report(phase=LOADING)
    with scenario.open(folder) as model:
        report(phase=SERVING)
        for number, operation in enumerate(scenario.operations, start=1):
            answers = operation.run(model)
            if operation.look:
                report(look={**answers, "from": os.getpid(), "of": operation.label})
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
    parser.add_argument("scenarios", nargs="+", choices=SCENARIOS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("events", type=int, help="file descriptor")
    arguments = parser.parse_args()
    with reporting(arguments.events) as report:
        for name in arguments.scenarios:
            scenario, folder = SCENARIOS[name](), arguments.folder / name
            if arguments.job == "write":
                folder.mkdir()
                scenario.write(folder)
            else:
                serve(scenario, folder, report)


if __name__ == "__main__":  # vLLM-Omni's worker processes import this file again
    main()

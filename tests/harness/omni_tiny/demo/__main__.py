"""``python -m omni_tiny.demo``: exits 0 if both runs are equal to the bit, 1 if not, 2 if one did not run."""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from omni_tiny.demo import child
from omni_tiny.demo.course import Course, Phase
from omni_tiny.demo.face import Watch, say_equality, show_bytes
from omni_tiny.demo.jobs import FLAG, CouldNotRunError, run_job, settings
from omni_tiny.demo.scenarios import SCENARIOS
from omni_tiny.demo.verdict import Served, check_runs, differences

if TYPE_CHECKING:
    from omni_tiny.demo.scenarios import Scenario

WRITING = "writing random weights"
_SERVED_S = {child.LOADING: 20.0, child.STEPPING: 5.0, child.STOPPING: 5.0}


def course() -> Course:
    """What a demo takes."""
    served = [
        Phase(f"flag {word}: {name}", seconds)
        for word in ("off", "on")
        for name, seconds in _SERVED_S.items()
    ]
    return Course([Phase(WRITING, 12.0), *served])


def run(name: str, scenario: Scenario, folder: Path, log: Path, console: Console) -> tuple[Served, Served]:
    """Write the checkpoint and serve the scenario twice; returns the runs with the flag off and on."""
    runs = {False: Served(), True: Served()}
    plan = course()
    with Watch(console, plan).shown() as watch:
        watch.begin()
        for _ in run_job("write", name, folder, environment=settings(flag=None), log=log):
            watch.tick()
        for flag, served in runs.items():
            for event in run_job("serve", name, folder, environment=settings(flag=flag), log=log):
                served.take(event)
                if "phase" in event:
                    watch.begin()
                if "done" in event:
                    plan.reached(event["done"] / len(scenario.operations))
                watch.tick()
        watch.finish()
    return runs[False], runs[True]


def demo(name: str, console: Console) -> int:
    """Run the demo of one scenario; returns the exit status."""
    scenario = SCENARIOS[name]()
    folder = Path(tempfile.mkdtemp(prefix="session-state-demo-", dir=_memory()))
    log, keep_log = Path(tempfile.mkdtemp(prefix="session-state-demo-log-")) / "vllm-omni.log", False
    try:
        console.print(
            f"{scenario.model} on vLLM-Omni {_host_version()}, served twice from one deploy YAML,\n"
            f"first with {FLAG}=0, then with =1.\n"
            f"{scenario.story}.\n"
        )
        off, on = run(name, scenario, folder, log, console)
        check_runs(off, on)
    except CouldNotRunError as error:
        keep_log = True
        console.print("\n[bold red]COULD NOT RUN[/]:", end=" ")
        console.print(f"{error}\nThe log of vLLM-Omni: {log}", markup=False, soft_wrap=True)
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not keep_log:
            shutil.rmtree(log.parent, ignore_errors=True)
    different = differences(off, on)
    say_equality(console, scenario, total=len({**off.outputs, **on.outputs}), different=different)
    show_bytes(console, off, on)
    return 1 if different else 0


def _memory() -> Path | None:
    shared_memory = Path("/dev/shm")
    return shared_memory if shared_memory.is_dir() else None


def _host_version() -> str:
    try:
        return importlib.metadata.version("vllm-omni")
    except importlib.metadata.PackageNotFoundError:
        raise CouldNotRunError(
            "vLLM-Omni is not installed in this environment; `make demo` installs it"
        ) from None


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m omni_tiny.demo", description=__doc__)
    parser.add_argument("scenario", nargs="?", default="dreamzero", choices=SCENARIOS)
    arguments = parser.parse_args()
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100
    try:
        return demo(arguments.scenario, console)
    except KeyboardInterrupt:
        console.print("\n[bold red]COULD NOT RUN[/]: interrupted")
    except Exception as error:  # noqa: BLE001 - Python's own exit status 1 would say that outputs differ
        console.print(f"\nCOULD NOT RUN: {type(error).__name__}: {error}", markup=False, soft_wrap=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())

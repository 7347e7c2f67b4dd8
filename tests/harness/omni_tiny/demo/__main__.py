"""``python -m omni_tiny.demo``: one bar, then what each model's two runs show.

It exits 0 if they are equal to the bit and no request left state behind, 1 if not, 2 if one did not run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from omni_tiny import arithmetic
from omni_tiny.demo import child
from omni_tiny.demo.face import say_equality, say_left
from omni_tiny.demo.scenarios import SCENARIOS
from omni_tiny.demo.tables import SHOW
from omni_tiny.demo.verdict import Served, check_runs, differences, left_behind
from vllm_omni_session_state.ab.runs.progress import ProgressView
from vllm_omni_session_state.ab.runs.subprocess import FLAG, THREADS, CouldNotRunError, run_job, settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from omni_tiny.demo.scenarios import Scenario

WRITING = "writing random weights"
_AROUND_S = {child.LOADING: 20.0, child.STOPPING: 5.0}


def phases(scenarios: Iterable[Scenario]) -> dict[str, float]:
    """What a demo does -> seconds that it takes."""
    served = {
        f"{scenario.model}, flag {word}: {name}": _AROUND_S.get(name, scenario.seconds)
        for scenario in scenarios
        for word in ("off", "on")
        for name in (child.LOADING, child.SERVING, child.STOPPING)
    }
    return {WRITING: 12.0, **served}


def job(name: str, scenarios: Iterable[str], folder: Path) -> list[str]:
    """The command that runs a job of `child`."""
    return [sys.executable, "-m", child.__name__, name, *scenarios, os.fspath(folder)]


def environment(*, flag: bool | None) -> dict[str, str]:
    """What a process of the demo gets: only the flag of the plugin's variables, and nothing is looked up."""
    kept = {name: value for name, value in settings(flag=flag).items() if not name.startswith(f"{FLAG}_")}
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**kept, **quiet, arithmetic.VARIABLE: "1", **dict.fromkeys(THREADS, "1")}


def serve_twice(name: str, scenario: Scenario, folder: Path, log: Path, watch: ProgressView) -> list[Served]:
    """Serve one scenario; returns the runs with the flag off and on.

    Raises:
        CouldNotRunError: A run failed, or the two may not be compared.
    """
    runs = {False: Served(), True: Served()}
    for flag, served in runs.items():
        for event in run_job(job("serve", [name], folder), environment=environment(flag=flag), log=log):
            served.take(event)
            if "phase" in event:
                watch.begin()
            if "done" in event:
                watch.reached(event["done"] / len(scenario.operations))
            watch.tick()
    try:
        check_runs(*runs.values())
    except CouldNotRunError as error:
        raise CouldNotRunError(f"{scenario.model}: {error}") from None
    return list(runs.values())


def run(scenarios: dict[str, Scenario], folder: Path, log: Path, console: Console) -> bool:
    """Write the checkpoints, serve each scenario twice, show what came out; returns whether all is well."""
    results = {}
    with ProgressView(console, phases(scenarios.values())).shown() as watch:
        watch.begin()
        for _ in run_job(job("write", scenarios, folder), environment=environment(flag=None), log=log):
            watch.tick()
        for name, scenario in scenarios.items():
            results[name] = serve_twice(name, scenario, folder, log, watch)
        watch.finish()
    well = True
    for name, (off, on) in results.items():
        console.print(f"\n[bold]{scenarios[name].model}[/]")
        different, left = differences(off, on), left_behind(on)
        say_equality(console, scenarios[name], total=len({**off.outputs, **on.outputs}), different=different)
        say_left(console, left)
        SHOW[name](console, off, on)
        well = well and not different and not left
    return well


def demo(names: Sequence[str], console: Console) -> int:
    """Run the demo of some scenarios; returns the exit status."""
    scenarios = {name: SCENARIOS[name]() for name in names}
    folder = Path(tempfile.mkdtemp(prefix="session-state-demo-", dir=_memory()))
    log, keep_log = Path(tempfile.mkdtemp(prefix="session-state-demo-log-")) / "vllm-omni.log", False
    try:
        console.print(
            f"vLLM-Omni {_host_version()} serves each tiny model twice from one deploy YAML,\n"
            f"first with {FLAG}=0, then with =1."
        )
        for scenario in scenarios.values():
            console.print(f"{scenario.model}: {scenario.story[0].lower()}{scenario.story[1:]}.")
        console.print()
        return 0 if run(scenarios, folder, log, console) else 1
    except CouldNotRunError as error:
        keep_log = True
        console.print("\n[bold red]COULD NOT RUN[/]:", end=" ")
        console.print(f"{error}\nThe log of vLLM-Omni: {log}", markup=False, soft_wrap=True)
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not keep_log:
            shutil.rmtree(log.parent, ignore_errors=True)


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
    parser.add_argument("scenario", nargs="?", choices=SCENARIOS, help="one of them; otherwise all are run")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100
    try:
        return demo([arguments.scenario] if arguments.scenario else list(SCENARIOS), console)
    except KeyboardInterrupt:
        console.print("\n[bold red]COULD NOT RUN[/]: interrupted")
    except Exception as error:  # noqa: BLE001 - Python's own exit status 1 would say that outputs differ
        console.print(f"\nCOULD NOT RUN: {type(error).__name__}: {error}", markup=False, soft_wrap=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())

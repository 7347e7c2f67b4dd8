"""Results and files of outputs as a run leaves them, made without one."""

from __future__ import annotations

import numpy as np
from safetensors.numpy import save_file

from vllm_omni_session_state.ab.compare.comparison import Comparison, compare, output_file
from vllm_omni_session_state.ab.report.result import Result, Run, Step
from vllm_omni_session_state.ab.workload.dreamzero import Robots
from vllm_omni_session_state.ab.workload.requests import numbered


def write(folder, number, **arrays):
    """Write the outputs of one ask."""
    folder.mkdir(exist_ok=True, parents=True)
    path = output_file(folder, number)
    save_file(arrays, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def asks(count):
    """Steps of two sessions in turns."""
    return numbered([(1 + n % 2, "step", {"prompt": "wave", "seed": n}) for n in range(count)])


def result(folder, *, change=None, on_steps=None):
    """Two runs of DreamZero that are equal, but for what ``change`` does to the arrays of an ask."""
    sent = Robots(sessions=2, steps=4).asks
    runs = [Run(flag=flag, log=f"{flag}.log", outputs=str(folder / str(flag))) for flag in (False, True)]
    for run in runs:
        count = on_steps if run.flag and on_steps is not None else len(sent)
        for ask in sent[:count]:
            arrays = {
                "actions": np.arange(6, dtype=np.float32) + ask.number,
                "video": np.zeros((2, 3), np.uint8),
            }
            if run.flag and change is not None:
                change(ask, arrays)
            write(folder / str(run.flag), ask.number, **arrays)
            held = {f"session {n}": {"cuda:0": 5_000_000 * n, "cpu": 100 * ask.number} for n in (1, 2)}
            seconds = 0.0 if ask.do != "step" else 0.05 + ask.number / 10
            peak = 1 << 34 if ask.do == "step" else 0
            run.steps.append(Step(seconds, peak, held))
    made = Result(*runs, about={"model": "DreamZero", "deploy_config": "a.yaml"}, asks=sent)
    made.comparison = compare(folder / "False", folder / "True", sent[: made.both])
    assert isinstance(made.comparison, Comparison)
    return made

"""One served run: a deployment in this process, as its user serves it, and every ask sent to it.

It writes each answer to a file as it comes, and the session's state after it to another, and reports, beside
``end``: ``phase``, when one begins; ``model`` and ``asks``, once both are known; ``unlooked``, why no state
can be looked at; ``done`` for each ask, with its ``seconds``, the worker's ``peak_bytes`` as vLLM-Omni
measured them, ``sessions``, those that are there after it: bytes by device of each, and ``said``, the
plugin's WARNINGs.

The only file of the package beside the layers below that imports vLLM-Omni.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_omni_session_state.ab.compare.comparison import output_file, state_file
from vllm_omni_session_state.ab.runs.outputs import save_outputs, save_state, tensors_of
from vllm_omni_session_state.ab.runs.subprocess import Report, reporting
from vllm_omni_session_state.ab.workload.cosmos3 import Clips
from vllm_omni_session_state.ab.workload.dreamzero import Robots
from vllm_omni_session_state.ab.workload.requests import (
    CALLS,
    CHECKPOINTS,
    COSMOS3,
    DEFAULTS,
    DREAMZERO,
    MAX_SESSIONS,
    Observations,
    Request,
)
from vllm_omni_session_state.ab.workload.trace import Trace, write_recording
from vllm_omni_session_state.base.ids import export_key, redacted_id
from vllm_omni_session_state.base.settings import ENV_FLAG
from vllm_omni_session_state.omni.compat import read_deploy_config

LOADING, SERVING, STOPPING = "loading", "serving", "stopping"
"""Phases of a run."""

CLASSES = {"DreamZeroPipeline": DREAMZERO, "Cosmos3OmniDiffusersPipeline": COSMOS3}
"""vLLM-Omni's pipeline class -> the model."""

RPC_TIMEOUT_S = 120.0
EXTENSION = "worker_extension_cls"
"""vLLM-Omni's setting for a class that a stage's workers get, too."""
LOOK = "vllm_omni_session_state.ab.runs.worker_probe.ProbedWorker"


class RefusedError(ValueError):
    """It cannot be served as asked; the message says why, and is all that a user needs."""


class Stage(NamedTuple):
    """The stage of a deploy YAML that is looked at."""

    model: str
    number: int
    extended: bool  # its workers get a class of the user's own, and so none that looks at state


def served_in(path: str) -> Stage:
    """The first stage of a deploy YAML that serves a model with an adapter.

    Raises:
        RefusedError: There is none that has an adapter.
        ValueError: vLLM-Omni cannot read the file.
    """
    written = read_deploy_config(path)
    found = []
    for stage in written["stages"]:
        says = {**stage, **(stage.get("engine_args") or {})}
        name = says.get("model_class_name")
        found.append(name)
        if name in CLASSES:
            return Stage(CLASSES[name], int(stage.get("stage_id", 0)), bool(says.get(EXTENSION)))
    named = ", ".join(map(str, found)) or "none"
    raise RefusedError(
        f"{path} has no stage of a model whose session state this plugin knows: model_class_name is {named}, "
        f"not any of {', '.join(CLASSES)}"
    )


def observations(model: str, asked: argparse.Namespace) -> Observations:
    """What is sent to a model: drawn, or a recording, which may be damaged or of another model."""
    if asked.replay is not None:
        recording = Trace(asked.replay)
        if recording.model != model:
            raise RefusedError(
                f"{asked.replay} is of {recording.model}, and {asked.deploy_config} serves {model}"
            )
        return recording
    sessions, steps = DEFAULTS[model]
    drawn = Robots if model == DREAMZERO else Clips
    return drawn(sessions=asked.sessions or sessions, steps=asked.steps or steps)


class Served:
    """A deployment that is served: a checkpoint's name or folder, a YAML, and the model's stage in it."""

    def __init__(self, checkpoint: str, deploy: str, *, stage: Stage) -> None:
        from vllm_omni.entrypoints.omni import Omni  # noqa: PLC0415 - vLLM-Omni, and only here

        self._stage = stage.number
        # From the last on: "ab-1" begins "ab-12", too.
        ids = {f"ab-{number}": f"session {number}" for number in range(MAX_SESSIONS, 0, -1)}
        self._names = {**{redacted_id(session): name for session, name in ids.items()}, **ids}
        self.looks = not stage.extended
        more = {"stage_overrides": {str(stage.number): {EXTENSION: LOOK}}} if self.looks else {}
        self._omni = Omni(model=checkpoint, deploy_config=deploy, **more)

    def close(self) -> None:
        """Stop its processes."""
        self._omni.close()

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the stage's workers, or raise `RuntimeError` where it is none, or failed."""
        (answers,) = self._omni.engine.collective_rpc(
            method, args=args, timeout=RPC_TIMEOUT_S, stage_ids=[self._stage]
        )
        if isinstance(answers, Mapping):
            raise RuntimeError(  # noqa: TRY004 - it is vLLM-Omni's way to say that it failed
                f"the worker did not answer {method}: {answers.get('error', answers)}"
            )
        return list(answers)

    def answer(self, ask: Request, arrays: Mapping[str, Any]) -> Any:
        """Do what is asked for, or raise `RuntimeError` where vLLM-Omni refuses it."""
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams  # noqa: PLC0415 - vLLM-Omni

        if ask.do in CALLS:
            return self.call(f"{ask.do}_ar_diffusion_session", ask.session_id)[0]
        prompt, sampling = (_step if ask.do == "step" else _generate)(ask, arrays)
        (output,) = self._omni.generate(prompt, [OmniDiffusionSamplingParams(**sampling)], use_tqdm=False)
        if getattr(output, "error", None):
            raise RuntimeError(output.error)
        return output

    def state(self, ask: Request, *, last: bool) -> list[Any]:
        """The state of an ask's session as each rank sees it; see `worker_probe`."""
        return self._ranks("session_state_look", ask.session_id, last)

    def warned(self) -> list[str]:
        """What the plugin said at WARNING in the workers since this was asked last; each thing once."""
        if not self.looks:
            return []
        said = (text for rank in self._ranks("session_state_warned") for text in rank["said"])
        return list(dict.fromkeys(map(self._named, said)))

    def sessions(self) -> dict[str, dict[str, int]] | None:
        """Bytes by device of each session, over all ranks; ``None`` where nobody can look.

        Raises:
            RuntimeError: A rank could not say.
        """
        if not self.looks:
            return None
        found: dict[str, Counter[str]] = {}
        for rank in self._ranks("session_state_sizes"):
            if not rank["ok"]:
                raise RuntimeError(f"rank {rank['rank']} cannot count its sessions: {rank['error']}")
            for session, sizes in rank["sizes"].items():
                found.setdefault(self._named(session), Counter()).update(sizes)
        return dict(found)

    def _named(self, text: str) -> str:
        """A text with sessions named as the report names them, not as a listing or a log shows them."""
        for session, name in self._names.items():
            text = text.replace(session, name)
        return text

    def _ranks(self, method: str, *args: Any) -> list[Any]:
        """What each rank of each replica answers."""
        return [rank for answer in self.call(method, *args) for rank in answer["ranks"]]


def _step(ask: Request, arrays: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    prompt = ask.words["prompt"]
    seen = {**arrays, "prompt": prompt, "session_id": ask.session_id}
    extra: dict[str, Any] = {"session_id": ask.session_id, "robot_obs": seen}
    if ask.words.get("reset"):
        extra["reset"] = True
    if ask.words.get("close"):
        extra["close_session"] = True
    return prompt, {"seed": ask.words["seed"], "extra_args": extra}


def _generate(ask: Request, arrays: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    words = ask.words
    prompt: dict[str, Any] = {"prompt": words["prompt"], "negative_prompt": words["negative"]}
    if words["kind"] == "t2i":
        prompt["modalities"] = ["image"]
    if words["kind"] == "i2v":
        prompt["multi_modal_data"] = {"image": arrays["image"]}
    return prompt, {
        **{name: words[name] for name in ("height", "width", "seed")},
        "num_frames": words["frames"],
        "num_inference_steps": words["denoising"],
        "guidance_scale": words["guidance"],
    }


def _pictures(ask: Request) -> str:
    return "video" if ask.do == "step" else "picture" if ask.words.get("kind") == "t2i" else "clip"


def serve(asked: argparse.Namespace, report: Report, *, flag: bool) -> None:
    """Serve once, and send everything."""
    report(phase=LOADING)
    # First of all, and aloud: whatever stream is there when it is imported is where it logs to.
    from vllm_omni.entrypoints import omni as _  # noqa: F401, PLC0415 - vLLM-Omni

    stage = served_in(asked.deploy_config)
    sent = observations(stage.model, asked)
    if asked.record is not None:
        write_recording(asked.record, sent)
    report(
        model=stage.model,
        checkpoint=asked.model or CHECKPOINTS[stage.model],
        asks=[[ask.session, ask.do, dict(ask.words)] for ask in sent.asks],
    )
    if stage.extended:
        report(unlooked=f"the stage has a {EXTENSION} of its own")
    served = Served(asked.model or CHECKPOINTS[stage.model], asked.deploy_config, stage=stage)
    last = set(_last_looks(sent.asks))
    with contextlib.closing(served):
        if flag:
            _see_that_it_is_managed(served)
        report(phase=SERVING)
        for ask in sent.asks:
            arrays = sent.arrays(ask)
            begun = time.monotonic()
            try:
                output = served.answer(ask, arrays)
            except Exception as error:
                raise RuntimeError(f"{ask.place}: {type(error).__name__}: {error}") from error
            seconds = time.monotonic() - begun
            save_outputs(output_file(asked.out, ask.number), tensors_of(output, pictures=_pictures(ask)))
            if served.looks:
                save_state(state_file(asked.out, ask.number), served.state(ask, last=ask.number in last))
            report(
                done=ask.number + 1,
                seconds=seconds,
                peak_bytes=round(getattr(output, "peak_memory_mb", 0.0) * (1 << 20)),
                sessions=served.sessions(),
                said=served.warned(),
            )
        report(phase=STOPPING)


def _last_looks(asks: Sequence[Request]) -> Iterator[int]:
    """Numbers of the asks of which their session's next one ends it, or begins anew."""
    following: dict[int, Request] = {}
    for ask in reversed(asks):
        after = following.get(ask.session)
        if after is None or after.ends or after.do != "step" or after.words.get("reset"):
            yield ask.number
        following[ask.session] = ask


def _see_that_it_is_managed(served: Served) -> None:
    try:
        served.call("session_state_list")
    except RuntimeError as error:
        hint = "`vllm-omni-session-state doctor`, or a WARNING in the log, says why"
        why = "; ".join(served.warned()) or hint
        raise RefusedError(f"{ENV_FLAG}=1 did not turn the plugin on ({error}): {why}") from error


def main() -> None:
    """Do what the command line says; a reported error is no exit status."""
    parser = argparse.ArgumentParser()
    for name, kind in {"deploy-config": str, "model": str, "sessions": int, "steps": int}.items():
        parser.add_argument(f"--{name}", type=kind)
    for name in ("replay", "record", "out"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("events", type=int, help="file descriptor")
    asked = parser.parse_args()
    with reporting(asked.events) as report:
        export_key()  # the workers show sessions as this process does
        serve(asked, report, flag=os.environ.get(ENV_FLAG) == "1")


if __name__ == "__main__":  # vLLM-Omni's worker processes import this file again
    main()

"""A tiny model through `Omni`: engine, scheduler and a worker process, from a deploy YAML; here DreamZero.

The worker's objects are out of reach here; what a test wants to know it asks by remote call.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_tiny import robot
from omni_tiny.capacity import FREE_BYTES_VARIABLE, free_bytes
from omni_tiny.inproc import ENGINE, PROMPT, Step, environment

if TYPE_CHECKING:
    from numpy.random import Generator
    from typing_extensions import Self


def write_deploy(
    path: str | Path,
    checkpoint: str | Path,
    *,
    flag: bool | None = None,
    num_inference_steps: int = 2,
    model_config: dict[str, Any] | None = None,
    cfg_parallel_size: int = 1,
    executor: str = "mp",
    replicas: int = 1,
) -> Path:
    """Write the deploy YAML of one tiny DreamZero stage.

    Args:
        path: The file.
        checkpoint: From `write_dreamzero`.
        flag: The stage's ``enable_session_state_manager``; ``None`` leaves the line out.
        num_inference_steps: Denoising steps per chunk.
        model_config: More of the stage's free ``model_config``.
        cfg_parallel_size: Worker processes that share the branches of guidance.
        executor: ``"mp"`` for worker processes, ``"uni"`` for one worker in the engine's own process.
        replicas: Of the stage, each with worker processes of its own.

    Returns:
        The file.
    """
    stage: dict[str, Any] = {
        "devices": ",".join(map(str, range(cfg_parallel_size * replicas))),
        "model_class_name": "DreamZeroPipeline",
        "engine_backend": ENGINE,
        "model_paths": {"tokenizer": f"{checkpoint}/tokenizer"},
        "model_config": {
            "num_inference_steps": num_inference_steps,
            "ar_diffusion_kv_config": {"gpu_memory_fraction": 1.0},
            **(model_config or {}),
        },
    }
    if cfg_parallel_size > 1:
        stage["parallel_config"] = {"tensor_parallel_size": 1, "cfg_parallel_size": cfg_parallel_size}
    if replicas > 1:
        stage["num_replicas"] = replicas
    if flag is not None:
        stage["enable_session_state_manager"] = flag
    return write_stage(path, "dreamzero", stage, executor=executor)


def write_stage(path: str | Path, pipeline: str, stage: dict[str, Any], *, executor: str = "mp") -> Path:
    """Write the deploy YAML of one bfloat16 stage with a worker process; returns the file.

    Args:
        path: The file.
        pipeline: vLLM-Omni's name of the topology.
        stage: What is particular to it.
        executor: ``"mp"`` for worker processes, ``"uni"`` for one worker in the engine's own process.
    """
    import yaml

    deploy = {
        "pipeline": pipeline,
        "async_chunk": False,
        "distributed_executor_backend": executor,
        "dtype": "bfloat16",
        "stages": [{"stage_id": 0, "devices": "0", "max_num_seqs": 1, "enforce_eager": True, **stage}],
    }
    file = Path(path)
    file.write_text(yaml.safe_dump(deploy, sort_keys=False))
    return file


class OmniRun:
    """A model behind `Omni`; a context manager.

    Args:
        checkpoint: The folder.
        deploy: From `write_stage`.

    Attributes:
        omni: vLLM-Omni's `Omni`.
    """

    def __init__(self, checkpoint: str | Path, deploy: str | Path) -> None:
        # One thread and two give different bits; the worker process inherits this.
        with environment("OMP_NUM_THREADS", "1"):
            from vllm_omni.entrypoints.omni import Omni

            self.omni = Omni(model=os.fspath(checkpoint), deploy_config=os.fspath(deploy))

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker by name and return what the one worker answers.

        Raises:
            RuntimeError: The call failed there, or the worker has no such method.
        """
        (answers,) = self.omni.engine.collective_rpc(method, args=args, timeout=60, stage_ids=[0])
        if isinstance(answers, dict):
            raise RuntimeError(f"the worker did not answer {method!r}: {answers['error']}")  # noqa: TRY004
        (answer,) = answers
        return answer

    def shutdown(self) -> None:
        """Stop the engine and its worker process."""
        self.omni.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.shutdown()


class OmniDreamZero(OmniRun):
    """Tiny DreamZero behind `Omni`.

    Args:
        checkpoint: From `write_dreamzero`.
        deploy: From `write_deploy`.
        capacity: Sessions that the worker's runner keeps, 1 to 64.
    """

    def __init__(self, checkpoint: str | Path, deploy: str | Path, *, capacity: int = 8) -> None:
        with environment(FREE_BYTES_VARIABLE, str(free_bytes(capacity))):
            super().__init__(checkpoint, deploy)

    def step(
        self,
        session: str,
        *,
        rng: Generator,
        prompt: str = PROMPT,
        frames: int = 4,
        reset: bool = False,
        close: bool = False,
    ) -> Step:
        """Draw an observation and run one step; see `TinyDreamZero.step`.

        A failing step closes the engine: that is vLLM-Omni's way, not the harness's.
        """
        seen = robot.observation(rng, session=session, prompt=prompt, frames=frames)
        parameters = robot.sampling_params(seen, reset=reset, close=close)
        (output,) = self.omni.generate(prompt, [parameters], use_tqdm=False)
        # vLLM-Omni hands the latents out as the one picture and the rest by name.
        (video,) = output.images
        return Step(actions=output.multimodal_output["actions"], video=video)

    def reset(self, session: str) -> bool:
        """Reset a session by remote call."""
        return self.call("reset_ar_diffusion_session", session)

    def close(self, session: str) -> bool:
        """Close a session by remote call."""
        return self.call("close_ar_diffusion_session", session)

"""DreamZero in this process: vLLM-Omni's own worker, runner, engine KV, loader and pipeline.

Worker after worker may live in one process, and several side by side: torch's distributed state is made
by the first and taken down by the last. Only then does this file touch vLLM-Omni, by three names in the
worker's module (see `_share_process_groups`); requests, steps and sessions are vLLM-Omni's alone.

Not covered: the scheduler, the engine and the worker process (`omni_runs` has them).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from omni_tiny import robot
from omni_tiny.capacity import FREE_BYTES_VARIABLE, free_bytes
from omni_tiny.world import WORLD

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np
    from numpy.random import Generator
    from typing_extensions import Self

ENGINE = "vllm_omni.experimental.ar_diffusion.engine.ARDiffusionEngine"
"""The one engine that DreamZero runs on."""

PROMPT = "pick up the cup"
"""What a robot is told where a test does not care."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step returned.

    Attributes:
        actions: Robot actions, ``(horizon, dimensions)``, float32.
        video: Normalised video latents, ``(1, channels, frames, height, width)``, bfloat16, on the CPU.
    """

    actions: np.ndarray
    video: torch.Tensor

    def equals(self, other: Step) -> bool:
        """Whether both outputs are equal to the bit."""
        return self.actions.tobytes() == other.actions.tobytes() and torch.equal(self.video, other.video)


def dreamzero_config(
    checkpoint: str | Path,
    *,
    flag: bool | None = None,
    num_inference_steps: int = 2,
    model_config: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """Build vLLM-Omni's configuration of one tiny DreamZero.

    Args:
        checkpoint: From `write_dreamzero`.
        flag: ``enable_session_state_manager``; ``None`` leaves the field at vLLM-Omni's default. A set
            environment variable still wins over it.
        num_inference_steps: Denoising steps per chunk.
        model_config: More of the stage's free ``model_config``.
        fields: More fields of ``OmniDiffusionConfig``.

    In one of several ranks (see `ranks`) it is of a model whose ranks share the branches of guidance.
    """
    from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig

    if flag is not None:
        fields["enable_session_state_manager"] = flag
    model = {
        "num_inference_steps": num_inference_steps,
        # The whole of the free memory, so that the capacity is what `free_bytes` was asked for.
        "ar_diffusion_kv_config": {"gpu_memory_fraction": 1.0},
        **(model_config or {}),
    }
    return OmniDiffusionConfig(
        model=str(checkpoint),
        model_class_name="DreamZeroPipeline",
        model_paths={"tokenizer": f"{checkpoint}/tokenizer"},
        model_config=model,
        engine_backend=ENGINE,
        dtype=torch.bfloat16,
        enforce_eager=True,
        **{
            "num_gpus": WORLD.size,
            "parallel_config": DiffusionParallelConfig(cfg_parallel_size=WORLD.size),
            **fields,
        },
    )


def make_worker(config: Any, *, load: bool = True) -> Any:
    """Make vLLM-Omni's `DiffusionWorker` for a configuration, after vLLM-Omni's general plugins.

    The caller calls its ``shutdown()``.
    """
    from vllm_omni.plugins import load_omni_general_plugins

    # One thread and two give different bits: whoever compares two runs needs one.
    torch.set_num_threads(1)
    load_omni_general_plugins()
    _share_process_groups()
    from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker

    return DiffusionWorker(local_rank=WORLD.rank, rank=WORLD.rank, od_config=config, skip_load_model=not load)


@functools.cache
def _share_process_groups() -> None:
    # A worker of vLLM-Omni makes torch's process groups and takes them down at its end, refuses to find
    # any made, and prefixes this process's standard output. Count users instead, and leave the output.
    from vllm_omni.diffusion.worker import diffusion_worker as host

    world, groups, destroy = (
        host.init_distributed_environment,
        host.initialize_model_parallel,
        host.destroy_distributed_env,
    )
    users = 0

    def init_distributed_environment(*args: Any, **kwargs: Any) -> None:
        nonlocal users
        if not users and WORLD.size > 1:
            kwargs["distributed_init_method"] = WORLD.place()
        if not users:
            world(*args, **kwargs)
        users += 1

    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        if users == 1:
            groups(*args, **kwargs)

    def destroy_distributed_env() -> None:
        nonlocal users
        users -= 1
        if not users:
            destroy()

    host.init_distributed_environment = init_distributed_environment
    host.initialize_model_parallel = initialize_model_parallel
    host.destroy_distributed_env = destroy_distributed_env
    host._setup_diffusion_worker_proc_title_and_log_prefix = lambda *_args, **_kwargs: None


@contextlib.contextmanager
def empty_pipeline(checkpoint: str | Path) -> Iterator[Any]:
    """Build the pipeline of a checkpoint that has its configuration files but no weights yet."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm_omni.diffusion.forward_context import set_forward_context
    from vllm_omni.diffusion.registry import initialize_model

    config = dreamzero_config(checkpoint, flag=False)
    worker = make_worker(config, load=False)
    try:
        with (
            set_forward_context(vllm_config=worker.vllm_config, omni_diffusion_config=config),
            set_current_vllm_config(worker.vllm_config),
            set_default_torch_dtype(config.dtype),
        ):
            yield initialize_model(config)
    finally:
        worker.shutdown()


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set one environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class TinyDreamZero:
    """One loaded tiny DreamZero with its worker and runner; a context manager.

    Several may be open at once, also with different flags: each has its own pipeline, KV pool and
    sessions.

    Args:
        checkpoint: From `write_dreamzero`.
        flag: ``enable_session_state_manager`` of the configuration; ``None`` for vLLM-Omni's default.
        capacity: Sessions that the runner keeps, 1 to 64; one more evicts the least recently used.
        exact: Whether it must be so many; a plugin may give the memory away in another way.
        num_inference_steps: Denoising steps per chunk.
        fields: More for `dreamzero_config`.

    Attributes:
        worker: vLLM-Omni's `DiffusionWorker`; `runner` and `pipeline` are its own.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        flag: bool | None = None,
        capacity: int = 8,
        exact: bool = True,
        num_inference_steps: int = 2,
        **fields: Any,
    ) -> None:
        self.config = dreamzero_config(
            checkpoint, flag=flag, num_inference_steps=num_inference_steps, **fields
        )
        self._numbers = itertools.count()
        with environment(FREE_BYTES_VARIABLE, str(free_bytes(capacity))):
            self.worker = make_worker(self.config)
        found = self.capacity
        if exact and found != capacity:
            self.shutdown()
            raise RuntimeError(
                f"asked for a runner of {capacity} sessions and got {found}: "
                "omni_tiny.capacity no longer matches vLLM-Omni's geometry"
            )

    @property
    def runner(self) -> Any:
        """vLLM-Omni's `ARDiffusionModelRunner`."""
        return self.worker.model_runner

    @property
    def pipeline(self) -> Any:
        """vLLM-Omni's `DreamZeroPipeline`."""
        return self.runner.pipeline

    @property
    def capacity(self) -> int:
        """How many sessions the runner keeps."""
        return self.runner._session_capacity

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
        """Draw an observation and run one step; an exception of the forward comes through.

        Args:
            session: The session's id.
            rng: Source of the observation; give two models two generators of one state.
            prompt: What the robot is told to do.
            frames: Pictures per camera, 1 or 4.
            reset: Have the runner drop the session before the step.
            close: Have it drop the session after the step.
        """
        seen = robot.observation(rng, session=session, prompt=prompt, frames=frames)
        return self.execute(robot.sampling_params(seen, reset=reset, close=close), prompt=prompt)

    def execute(self, sampling_params: Any, *, prompt: str = PROMPT) -> Step:
        """Run one step with vLLM-Omni's sampling parameters, through the worker's own `execute_model`."""
        from vllm_omni.diffusion.request import OmniDiffusionRequest

        request = OmniDiffusionRequest(
            prompt=prompt, request_id=f"request-{next(self._numbers)}", sampling_params=sampling_params
        )
        output = self.worker.execute_model(request, self.config).output
        return Step(actions=output["actions"].copy(), video=output["video"].clone())

    def reset(self, session: str) -> bool:
        """Reset a session as the engine does by remote call."""
        return self.worker.reset_ar_diffusion_session(session)

    def close(self, session: str) -> bool:
        """Close a session as the engine does by remote call."""
        return self.worker.close_ar_diffusion_session(session)

    def shutdown(self) -> None:
        """Shut the worker down; after the last one torch's process groups are gone."""
        self.worker.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.shutdown()

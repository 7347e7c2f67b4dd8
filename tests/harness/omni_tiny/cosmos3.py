"""The tiny Cosmos3 in this process: vLLM-Omni's own loader, runner and pipeline on the CPU.

Covers loading, whole requests, single ``diffuse`` calls, several of them step by step in turns, and a
forward that fails on demand. Several models may be alive at once. Plugins are loaded as a worker loads them:
by entry point, once per process. Does not start an engine or a worker process.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from typing import TYPE_CHECKING, Any, Literal

import torch

from omni_tiny.cosmos3_requests import cosmos3_request
from omni_tiny.lockstep import Lockstep
from omni_tiny.world import WORLD

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Self

FLAG_VARIABLE = "OMNI_DIFFUSION_SESSION_STATE_MANAGER"


class TinyCosmos3:
    """One loaded model, from ``with`` to its end.

    Attributes:
        runner: vLLM-Omni's ``DiffusionModelRunner``.
        pipeline: What the loader returned, with whatever was attached to it.
    """

    runner: Any
    pipeline: Any

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        flag: bool | None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        **od: Any,
    ) -> None:
        """Take the settings; the model is built on entering.

        Args:
            checkpoint: Folder that ``write_cosmos3`` wrote.
            flag: ``enable_session_state_manager`` of the configuration, whatever the environment says.
                With None the configuration keeps its default and the environment decides.
            dtype: Of weights and latents.
            **od: Further fields of ``OmniDiffusionConfig``; ``cfg_parallel_size`` as a short cut.
        """
        self._checkpoint = str(checkpoint)
        self._flag = flag
        self._dtype = getattr(torch, dtype)
        self._cfg_parallel_size = od.pop("cfg_parallel_size", 1)
        self._od = od
        self._entered = False

    def __enter__(self) -> Self:
        from vllm_omni.diffusion.registry import get_diffusion_pre_process_func
        from vllm_omni.plugins import load_omni_general_plugins

        load_omni_general_plugins()
        # Sums of one and of two threads differ in their last bits: pin what outputs are compared over.
        torch.set_num_threads(1)
        with contextlib.ExitStack() as undo:
            self.runner = self._load(undo)
            undo.pop_all()
        self._entered = True
        self.pipeline = self.runner.pipeline
        self.pipeline.set_progress_bar_config(disable=True)
        self._preprocess = get_diffusion_pre_process_func(self.runner.od_config)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the model, and of the process group if it was the last; a second call does nothing."""
        if self._entered:
            self._entered = False
            del self.runner, self.pipeline, self._preprocess
            gc.collect()
            WORLD.leave()

    def generate(self, request_id: str, **words: Any) -> dict[str, torch.Tensor]:
        """Run one whole request.

        Args:
            request_id: vLLM-Omni takes it as the session id.
            **words: Of ``cosmos3_request``: kind, prompt, negative, guidance, seed, steps, n, media, extra.

        Returns:
            A copy of each output: ``video`` or ``image`` ``[B, 3, T, H, W]``, ``actions`` ``[B, T, D]``.

        Raises:
            Exception: Whatever the pipeline raised.
        """
        request = self._preprocess(cosmos3_request(request_id, **words))
        output = self.runner.execute_model(request).output
        payload = output.get("payload", output)
        return {name: value.clone() for name, value in payload.items() if isinstance(value, torch.Tensor)}

    def diffuse_call(self, request_id: str, **words: Any) -> dict[str, Any]:
        """Prepare one request as far as the call of ``diffuse``, and return that call's arguments.

        Each call has a scheduler and a generator of its own, so that several can be under way at once:
        the pipeline's own scheduler is shared and would be started anew by the second.
        """
        caught: list[dict[str, Any]] = []

        class _CaughtError(Exception):
            pass

        def catch(**arguments: Any) -> None:
            caught.append(arguments)
            raise _CaughtError

        with self._instead(diffuse=catch), contextlib.suppress(_CaughtError):
            self.generate(request_id, **words)
        arguments = caught[0]
        generator = torch.Generator().manual_seed(0)
        generator.set_state(arguments["generator"].get_state())
        return arguments | {"generator": generator, "scheduler": copy.deepcopy(arguments["scheduler"])}

    def diffuse(self, call: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """Run what ``diffuse_call`` prepared; one call runs once.

        Returns:
            The denoised latents: video ``[B, C, t, h, w]``, and actions if the request has them.
        """
        with self._forward_context():
            return self._diffuse(call)

    def interleave(self, calls: Sequence[dict[str, Any]], *, head_start: int = 0) -> list[Any]:
        """Run several calls on this one transformer, a denoising step at a time in turns.

        Args:
            calls: From ``diffuse_call``.
            head_start: Steps that the first is ahead when the second begins.

        Returns:
            For each call its latents, or the exception that it raised.
        """
        turns = Lockstep([lambda call=call: self._diffuse(call) for call in calls], head_start=head_start)

        def progress_bar(iterable: Iterable[Any]) -> Iterator[Any]:
            for item in iterable:
                turns.pass_on()
                yield item

        # The context is a global of vLLM-Omni: entered once around all, not once in each thread.
        with self._forward_context(), self._instead(progress_bar=progress_bar):
            return turns.run()

    @contextlib.contextmanager
    def failing_forward(self, number: int, error: BaseException) -> Iterator[None]:
        """Raise ``error`` in place of the transformer's ``number``-th forward from here, counted from 1."""
        left = number

        def count_down(*_: object) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise error

        hook = self.pipeline.transformer.register_forward_pre_hook(count_down)
        try:
            yield
        finally:
            hook.remove()

    def _diffuse(self, call: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode():
            latents = self.pipeline.diffuse(**call)
        return latents if isinstance(latents, tuple) else (latents,)

    def _forward_context(self) -> contextlib.AbstractContextManager[None]:
        from vllm_omni.diffusion.forward_context import set_forward_context

        return set_forward_context(
            vllm_config=self.runner.vllm_config, omni_diffusion_config=self.runner.od_config
        )

    @contextlib.contextmanager
    def _instead(self, **methods: Any) -> Iterator[None]:
        """Put attributes on the pipeline object for a while; what stood on the object itself comes back."""
        own = vars(self.pipeline)
        before = {name: own[name] for name in methods if name in own}
        own.update(methods)
        try:
            yield
        finally:
            for name in methods:
                del own[name]
            own.update(before)

    def _load(self, undo: contextlib.ExitStack) -> Any:
        from vllm.config import set_current_vllm_config
        from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
        from vllm_omni.diffusion.forward_context import set_forward_context
        from vllm_omni.diffusion.registry import get_diffusion_ir_op_priority_func
        from vllm_omni.diffusion.vllm_config import create_diffusion_vllm_config
        from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
        from vllm_omni.platforms import current_omni_platform

        device = torch.device("cpu")
        fields: dict[str, Any] = {} if self._flag is None else {"enable_session_state_manager": self._flag}
        fields |= self._od
        model_config = {"guardrails": False, **fields.pop("model_config", {})}
        if self._cfg_parallel_size > 1:
            fields["parallel_config"] = DiffusionParallelConfig(cfg_parallel_size=self._cfg_parallel_size)
        config = OmniDiffusionConfig(
            model=self._checkpoint,
            dtype=self._dtype,
            enforce_eager=True,
            num_gpus=WORLD.size,
            model_config=model_config,
            **fields,
        )
        config.enrich_config()
        vllm_config = create_diffusion_vllm_config(device, config)
        priority = current_omni_platform.get_default_ir_op_priority(vllm_config)
        model_priority = get_diffusion_ir_op_priority_func(config)
        if model_priority is not None:
            priority = model_priority(priority, vllm_config=vllm_config)
        vllm_config.kernel_config.ir_op_priority = priority
        with (
            set_forward_context(vllm_config=vllm_config, omni_diffusion_config=config),
            set_current_vllm_config(vllm_config),
            _without_flag_variable() if self._flag is not None else contextlib.nullcontext(),
        ):
            WORLD.enter(cfg_parallel_size=self._cfg_parallel_size)
            undo.callback(WORLD.leave)
            runner = DiffusionModelRunner(vllm_config=vllm_config, od_config=config, device=device)
            runner.load_model()
        return runner


@contextlib.contextmanager
def _without_flag_variable() -> Iterator[None]:
    """Hide the flag's environment variable, which would win over the configuration."""
    value = os.environ.pop(FLAG_VARIABLE, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[FLAG_VARIABLE] = value

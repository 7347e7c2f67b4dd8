"""What vLLM-Omni hard-codes, made small by module globals, and the one thing its worker cannot do on a CPU.

And steps that last, for a test in which something happens meanwhile; and loads that do not. The sizes that
stand in a checkpoint's own configuration are not here but in `checkpoint`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

TEXT_DIM = 32
"""Width of the text encoder; the transformer's ``text_dim``."""

VIEW_SIZE = (16, 32)
"""Height and width in pixels of one camera view; four are stitched, and a latent is an eighth of that."""

MODEL_OWNED_BYTES = 2 << 20
"""What the runner sets aside per session for state outside its KV pool."""

LASTS_S = "omni_tiny/lasts_s"
"""Key of an observation: for how many seconds its step lasts at least. A tiny step is over too soon."""

_TEXT: dict[str, int] = {
    "d_model": TEXT_DIM,
    "d_ff": 64,
    "d_kv": 8,
    "num_heads": 4,
    "num_layers": 2,
    "vocab_size": 512,
}
# Its width 1280 and its 257 tokens are fixed elsewhere in the model.
_IMAGE: dict[str, Any] = {"num_layers": 2, "mlp_ratio": 0.05, "num_heads": 8, "out_dim": 16}


def shrink_dreamzero(pipeline_dreamzero: ModuleType) -> None:
    """Make DreamZero's encoders, frames and reserved bytes small; no class or method is replaced."""
    from vllm_omni.diffusion.models.dreamzero import image_encoder
    from vllm_omni.diffusion.models.dreamzero.transform import droid

    text_config = pipeline_dreamzero.UMT5Config
    vision_transformer = image_encoder.DreamZeroVisionTransformer
    pipeline_dreamzero.UMT5Config = lambda **kwargs: text_config(**{**kwargs, **_TEXT})
    pipeline_dreamzero.DREAMZERO_MODEL_OWNED_STATE_BYTES_PER_SESSION = MODEL_OWNED_BYTES
    image_encoder.DreamZeroVisionTransformer = lambda **kwargs: vision_transformer(**{**kwargs, **_IMAGE})
    droid.DroidTransform._VIDEO_RESIZE_HW = VIEW_SIZE


def let_steps_last(pipeline_dreamzero: ModuleType) -> None:
    """Have a step whose observation asks for it last, inside of the forward."""
    pipeline = pipeline_dreamzero.DreamZeroPipeline
    host = pipeline.forward

    @functools.wraps(host)
    def forward(self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        output = host(self, req, *args, **kwargs)
        seen = (req.sampling_params.extra_args or {}).get("robot_obs") or {}
        time.sleep(seen.get(LASTS_S, 0.0))
        return output

    pipeline.forward = forward


def pack_outputs_without_stream(diffusion_worker: ModuleType) -> None:
    """Replace the worker process's output thread, which opens an accelerator stream and dies without one."""
    import torch

    if torch.accelerator.is_available():
        return
    host = diffusion_worker

    def pack(output: Any, output_id: str) -> Any:
        kind = host.AsyncOutputKind.OUTPUT_READY
        try:
            host.pack_diffusion_output_shm(output)
        except Exception:
            host.logger.exception("packing the output %s failed", output_id)
            error = "Packing the output into shared memory failed"
            return host.AsyncDiffusionOutput(kind=kind, async_output_id=output_id, error=error)
        return host.AsyncDiffusionOutput(kind=kind, async_output_id=output_id, output=output)

    def _async_output_loop(self: Any) -> None:
        while (item := self._async_output_queue.get()) is not None:
            output, output_id, _event = item
            self._enqueue_result(pack(output, output_id))
            with self._async_output_done:
                self._async_output_pending = max(0, self._async_output_pending - 1)
                self._async_output_done.notify_all()

    host.WorkerProc._async_output_loop = _async_output_loop


def keep_imported(_: ModuleType) -> None:
    """Have no collection of garbage walk what is imported: vLLM-Omni makes four while it loads a model."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # native modules say what is left when a process ends

"""The entry points through which vLLM-Omni finds this package, in the parent and in every worker."""

from __future__ import annotations

from omni_tiny.import_hooks import after_import


def platform() -> str | None:
    """Name the CPU platform, or none where an accelerator is present."""
    import torch

    return None if torch.accelerator.is_available() else "omni_tiny.platform.CpuOmniPlatform"


def general() -> None:
    """Once they are imported: make sizes small, the worker fit for a CPU; let it be asked; err if told to."""
    from omni_tiny import arithmetic, listing, mutant, request_watch, tiny

    arithmetic.compute_in_float32_if_wanted()
    after_import("vllm_omni.diffusion.models.dreamzero.pipeline_dreamzero", tiny.shrink_dreamzero)
    after_import("vllm_omni.diffusion.models.dreamzero.pipeline_dreamzero", tiny.let_steps_last)
    after_import("vllm_omni.diffusion.worker.diffusion_worker", tiny.keep_imported)
    after_import("vllm_omni.diffusion.worker.diffusion_worker", tiny.pack_outputs_without_stream)
    after_import("vllm_omni.diffusion.worker.diffusion_worker", listing.add_listing)
    after_import("vllm_omni.diffusion.worker.diffusion_worker", request_watch.add_watch)
    mutant.mutate()

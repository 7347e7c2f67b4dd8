"""Where each supported model keeps its session state: one file a model.

An adapter is a module with ``attach(pipeline, manager, patches, *, video_latents)``. It says where fields
live and nothing else; the model's logic stays vLLM-Omni's.
"""

from __future__ import annotations

ADAPTERS = {
    "vllm_omni.diffusion.models.cosmos3.pipeline_cosmos3.Cosmos3OmniDiffusersPipeline": "cosmos3",
    "vllm_omni.diffusion.models.dreamzero.pipeline_dreamzero.DreamZeroPipeline": "dreamzero",
}
"""Pipeline class by dotted name -> module of this package. A subclass is served by its base's adapter."""

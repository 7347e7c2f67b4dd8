"""A loader's module that stands in for vLLM-Omni's: what the hook must live with cannot be had from one host.

Everything else in this folder runs the installed vLLM-Omni.
"""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_omni_session_state.omni.hooks.seams import LOADER_MODULE


class DreamZeroPipeline:
    """Named like vLLM-Omni's, so that the adapter table knows it; its methods have the seams' signatures."""

    num_frame_per_block = 2

    def __init__(self):
        self.state = "its own"

    def _get_or_create_state(self, session_id): ...

    def _drop_ar_diffusion_session_state(self, session_id): ...

    def bind_ar_diffusion_state(self, session_id, state): ...

    def decode_accumulated_video_latents(self, session_id=None): ...

    def clear_accumulated_video_latents(self, session_id=None): ...

    def warmup_compile(self): ...


DreamZeroPipeline.__module__ = "vllm_omni.diffusion.models.dreamzero.pipeline_dreamzero"


@dataclass
class Config:
    """The one field of vLLM-Omni's configuration that the hook reads."""

    enable_session_state_manager: object = True


class OldConfig:
    """Of a host that has no such field."""


class OtherPipeline:
    """A model that keeps no session state."""


def loader_module(pipeline):
    """A module like vLLM-Omni's, whose loader loads ``pipeline``."""
    module = types.ModuleType(LOADER_MODULE)

    class DiffusersPipelineLoader:
        def __init__(self, od_config):
            self.od_config = od_config

        def load_model(self, load_device, load_format="default", custom_pipeline_name=None, device=None):
            return pipeline

    module.DiffusersPipelineLoader = DiffusersPipelineLoader
    return module


@contextmanager
def installed(module):
    """``module`` stands where vLLM-Omni's loader would, whether that is imported or not."""
    before = sys.modules.get(LOADER_MODULE)
    sys.modules[LOADER_MODULE] = module
    try:
        yield module
    finally:
        if before is None:
            del sys.modules[LOADER_MODULE]
        else:
            sys.modules[LOADER_MODULE] = before

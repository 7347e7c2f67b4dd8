"""The CPU as an out-of-tree platform of vLLM-Omni, for every model the harness runs.

Each method below is asked for by vLLM-Omni before or during the first request; what is not here comes
from vLLM's own CPU platform (device type, ``gloo``).
"""

from __future__ import annotations

import os

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from omni_tiny.capacity import FREE_BYTES_VARIABLE, LESS_BYTES_VARIABLE

FREE_BYTES = 512 << 20
"""Free memory where no figure is set: enough for as many sessions as a model ever holds."""


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """One device, no streams, and as much free memory as a run is told."""

    _omni_enum = OmniPlatformEnum.OOT
    # vLLM's own variable for the CPU is a list of cores; the stage launcher writes device ids into this one.
    device_control_env_var = "OMNI_TINY_VISIBLE_DEVICES"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        pass

    @classmethod
    def synchronize(cls, device: torch.device | None = None) -> None:
        pass

    @classmethod
    def empty_cache(cls) -> None:
        pass

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | None = None) -> None:
        pass

    @classmethod
    def max_memory_reserved(cls, device: torch.device | None = None) -> int:
        return psutil.Process().memory_info().rss

    max_memory_allocated = max_memory_reserved

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        # It bounds the KV pool, whose pages are tiny here: the machine's real figure would ask for millions.
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        less = int(os.environ.get(f"{LESS_BYTES_VARIABLE}{rank}", "0"))
        return int(os.environ.get(FREE_BYTES_VARIABLE, FREE_BYTES)) - less

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls,
        selected_backend: str | None,
        head_size: int,
        allow_trtllm_default: bool = False,  # noqa: FBT001, FBT002
    ) -> str:
        return "omni_tiny.attention.CpuSDPABackend"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

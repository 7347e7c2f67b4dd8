"""Torch's own attention for a platform that vLLM-Omni does not know by name.

Apart from `platform`, since vLLM-Omni's attention asks for the platform while it is imported.
"""

from __future__ import annotations

from typing import Any

from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuSDPAImpl(SDPAImpl):
    """vLLM-Omni's implementation, whose dispatch by platform name has no branch for a CPU."""

    def forward(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
        return self._forward_impl(query, key, value, attn_metadata)


class CpuSDPABackend(SDPABackend):
    """The backend that hands out `CpuSDPAImpl`."""

    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        return CpuSDPAImpl

"""Arithmetic in bfloat16 on a CPU that has none: computed in float32, and rounded.

Torch's own way around it takes four to ten times as long. Only what takes the time is here: linear layers,
convolutions and products of matrices. The outputs are of the same type, and the same ones each time. All
processes of a run compute so.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable


@functools.cache
def compute_in_float32() -> None:
    """Replace the functions that layers call, where oneDNN has none for this CPU; idempotent."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for name in ("linear", "conv2d", "conv3d"):
        setattr(functional, name, _in_float32(getattr(functional, name)))
    torch.matmul = _in_float32(torch.matmul)


def _in_float32(host: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(host)
    def compute(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: A002 - torch's name
        if input.dtype is not torch.bfloat16 or input.device.type != "cpu":
            return host(input, *args, **kwargs)
        with torch.autocast("cpu", enabled=False):  # else it would make them bfloat16 again
            wide = {name: _wide(value) for name, value in kwargs.items()}
            return host(input.float(), *map(_wide, args), **wide).to(torch.bfloat16)

    return compute


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) else value

"""Arithmetic in bfloat16 on a CPU that has none: computed in float32, and rounded.

Torch's own way around it takes four to ten times as long. Only what takes the time is here: linear layers,
convolutions and products of matrices. The outputs are of the same type, and the same ones each time. Tests
and the demo ask for it by a variable, so all processes of a run compute so. A benchmark that measures shares
of a step does not.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

VARIABLE = "OMNI_TINY_BFLOAT16_IN_FLOAT32"
"""Environment: ``1`` asks for it, in this process and in those that it starts."""


@functools.cache
def compute_in_float32_if_wanted() -> None:
    """Replace the functions that layers call, where oneDNN has none for this CPU; idempotent."""
    if os.environ.get(VARIABLE) != "1":
        return
    import torch  # here: the demo's own process needs the variable, and no torch
    from torch.nn import functional

    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for name in ("linear", "conv2d", "conv3d"):
        setattr(functional, name, _in_float32(getattr(functional, name)))
    torch.matmul = _in_float32(torch.matmul)


def _in_float32(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    import torch

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) else value

    @functools.wraps(plain)
    def compute(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: A002 - torch's name
        if input.dtype is not torch.bfloat16 or input.device.type != "cpu":
            return plain(input, *args, **kwargs)
        with torch.autocast("cpu", enabled=False):  # else it would make them bfloat16 again
            named = {name: wide(value) for name, value in kwargs.items()}
            return plain(input.float(), *map(wide, args), **named).to(torch.bfloat16)

    return compute

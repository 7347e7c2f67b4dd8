"""bfloat16 at a bearable speed on a CPU that has no instructions for it.

There torch multiplies bfloat16 one number at a time: the first step of a tiny DreamZero takes six seconds.
Here the large products are computed in float32 and rounded once, as instructions for bfloat16 would do it.
The shapes, the types and the calls of the model stay; a processor that has the instructions is left alone.
Tests and the demo ask for it by a variable. A benchmark that measures shares of a step does not.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "OMNI_TINY_BFLOAT16_IN_FLOAT32"
"""Environment: ``1`` asks for it, in this process and in those that it starts."""

WORTH_IT = 1 << 14
"""Elements of the input, times the output's channels, from which conversions cost less than they save."""

_NAMES = ("linear", "conv1d", "conv2d", "conv3d")


def through_float32_if_wanted() -> None:
    """Patch ``torch.nn.functional``, once, where the processor has no instructions for bfloat16."""
    if os.environ.get(VARIABLE) != "1":
        return
    import torch
    from torch.nn import functional

    if torch.ops.mkldnn._is_mkldnn_bf16_supported() or hasattr(functional.linear, "in_float32"):
        return
    for name in _NAMES:
        setattr(functional, name, _in_float32(getattr(functional, name)))


def _in_float32(plain: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def up(value: Any) -> Any:
        return value.to(torch.bfloat16).float()

    @functools.wraps(plain)
    def product(taken: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
        casts = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
        if (
            not (casts or taken.dtype is weight.dtype is torch.bfloat16)
            or taken.device.type != "cpu"
            or taken.numel() * weight.shape[0] < WORTH_IT
            or torch.compiler.is_compiling()
        ):
            return plain(taken, weight, bias, *args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            found = plain(up(taken), up(weight), None if bias is None else up(bias), *args, **kwargs)
            return found.to(torch.bfloat16)

    product.in_float32 = True  # type: ignore[attr-defined]
    return product

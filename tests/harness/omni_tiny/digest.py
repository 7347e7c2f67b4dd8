"""Values as short texts that differ as soon as one bit does: what two runs compare across processes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch


def digest(value: Any) -> str:
    """A hash of a tensor's, an array's or a plain value's kind, shape and every bit."""
    if isinstance(value, torch.Tensor):
        kind, content = (
            f"{value.dtype}{tuple(value.shape)}",
            value.contiguous().view(torch.uint8).numpy().tobytes(),
        )
    elif isinstance(value, np.ndarray):
        kind, content = f"{value.dtype}{value.shape}", value.tobytes()
    else:
        kind, content = type(value).__name__, repr(value).encode()
    return hashlib.sha256(kind.encode() + b"\0" + content).hexdigest()

"""What the Cosmos3 tests run over, and what they mean by equal."""

from __future__ import annotations

import torch
from omni_tiny.cosmos3_requests import ACTION_KINDS, SERVES
from profiles import LONG

# The action checkpoint serves the regular kinds by the regular code: one of them is enough.
SERVED = [
    (variant, kind)
    for variant, kinds in SERVES.items()
    for kind in kinds
    if variant != "action" or kind in {"t2v", *ACTION_KINDS}
]

SERVED_AS = [
    (variant, kind, dtype)
    for variant, kind in SERVED
    for dtype in ("float32", "bfloat16")
    if LONG or dtype == "float32" or (variant, kind) == ("regular", "t2v")
]
"""The same with a type of the weights: in the short run one has both, each of which is a model more."""


def equal(left, right):
    """Whether two requests gave the same tensors, to the last bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)

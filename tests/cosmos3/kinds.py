"""What the Cosmos3 tests run over, and what they mean by equal."""

from __future__ import annotations

import torch
from omni_tiny.cosmos3_requests import ACTION_KINDS, SERVES

# The action checkpoint serves the regular kinds by the regular code: one of them is enough.
SERVED = [
    (variant, kind)
    for variant, kinds in SERVES.items()
    for kind in kinds
    if variant != "action" or kind in {"t2v", *ACTION_KINDS}
]


def equal(left, right):
    """Whether two requests gave the same tensors, to the last bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)

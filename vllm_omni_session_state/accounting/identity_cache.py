"""Whether some values are the very tensors that they were, where they were: then they need no walk.

The tensors are remembered by weak references, which keep nothing alive and never mistake another tensor at
a recycled address for the one that was there.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

_address = torch.Tensor.data_ptr


class UnchangedTensors:
    """What some plain tensors were at a walk.

    Args:
        tensors: Of which ``is_plain()`` is true.
    """

    __slots__ = ("_addresses", "_tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._addresses = list(map(_address, tensors))

    def same(self, items: Sequence[Any]) -> bool:
        """Whether these are the same, in the same order."""
        return (
            len(items) == len(self._tensors)
            and all(map(is_, [tensor() for tensor in self._tensors], items))
            and list(map(_address, items)) == self._addresses
        )


def items_of(values: Sequence[Any]) -> list[Any]:
    """The items of values that are lists, and the others themselves; without ``None``."""
    items: list[Any] = []
    for value in values:
        items += value if type(value) is list else (value,)
    return [item for item in items if item is not None]


def is_plain(item: object) -> bool:
    """Whether this is a tensor that keeps nothing alive but one storage, which stays its own."""
    return (
        type(item) is torch.Tensor
        and item.layout is torch.strided
        and not item.requires_grad
        and not item.__dict__
        and item.grad is None
        and not item.is_quantized
        and not item.is_nested
    )

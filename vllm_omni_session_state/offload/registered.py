"""Types of a model's own that files hold: an adapter registers how a value is taken apart and made again."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_omni_session_state.offload.schema import SCALARS

MOST_DEEP = 16
"""How deep registered values may stand in each other."""


@dataclass(frozen=True, slots=True)
class RegisteredKind:
    """How values of one type are written; see ``register_kind()``."""

    kind: type
    name: str
    to_tree: Callable[[Any], object]
    from_tree: Callable[[Any], object]


registered: dict[str, RegisteredKind] = {}


def register_kind(
    kind: type, name: str, *, to_tree: Callable[[Any], object], from_tree: Callable[[Any], object]
) -> None:
    """Let values of one more type be written. A later call for the same type and name replaces.

    Args:
        kind: The type itself; subclasses are registered on their own.
        name: What files call it: the same for as long as files live.
        to_tree: Hands out a value's content as plain values, containers, tensors and arrays.
        from_tree: Makes a value from such a content, which it owns. It is also called for trial, on a copy,
            when a value is written: what it refuses then is not written.

    Raises:
        TypeError: ``kind`` is not a class.
        ValueError: ``kind`` is written already, or the name means another type.
    """
    if not isinstance(kind, type):
        raise TypeError(f"register_kind takes a class, not {kind!r}: pass type(value)")
    plain = {list, tuple, dict, OrderedDict, deque, np.ndarray, torch.Tensor, *SCALARS}
    if kind in plain or issubclass(kind, np.generic):
        raise ValueError(f"{kind.__qualname__} is written already: register another class")
    for other in registered.values():
        if (other.name == name) != (other.kind is kind):
            raise ValueError(f"{other.kind.__qualname__} is registered as {other.name!r}: take another name")
    registered[name] = RegisteredKind(kind, name, to_tree, from_tree)


def kind_of(value: object) -> RegisteredKind | None:
    """How a value's type is registered, if it is."""
    return next((each for each in registered.values() if each.kind is type(value)), None)

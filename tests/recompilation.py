"""Compiled code that counts its compilations, and restores that bring back something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace

from vllm_omni_session_state.offload.schema import Tensor
from vllm_omni_session_state.offload.unpack import _Unpacking


class CountingBackend:
    """A backend of ``torch.compile`` that runs the graph as it is; what was compiled before is forgotten.

    Attributes:
        compilations: How often it was asked.
    """

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.compilations = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.compilations += 1
        return graph.forward


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor of that shape whose elements lie one after the other."""
    return torch.empty(shape, device="meta").stride()


MUTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "an inference tensor comes back as an ordinary one": lambda slot: replace(slot, inference=False),
    "an ordinary tensor comes back as an inference one": lambda slot: replace(slot, inference=True),
    "strides are lost": lambda slot: replace(slot, stride=contiguous(slot.size)),
    "requires_grad is lost": lambda slot: replace(slot, requires_grad=False),
}
"""What a careless restore would do to a tensor."""


def bring_back_changed(monkeypatch, mutant: str) -> None:
    """Have every restore from now on do so."""
    restored, change = _Unpacking._tensor, MUTANTS[mutant]
    monkeypatch.setattr(_Unpacking, "_tensor", lambda self, slot: restored(self, change(slot)))

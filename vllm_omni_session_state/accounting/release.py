"""What a release really freed, judged afterwards.

Use counts lie (a view, an alias, a caller that kept a reference), so nothing is inferred from them: the
owner of each allocation is watched through a weak reference, the content is let go, and then the owners are
asked whether they are gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from vllm_omni_session_state.accounting.allocations import Allocation, distinct
from vllm_omni_session_state.accounting.footprint import owned_allocations


class Watch:
    """The allocations of some values, each with a way to ask whether its owner is gone."""

    __slots__ = ("_gone",)

    def __init__(self, *values: object) -> None:
        self._gone = [(each, _question(owner)) for owner, each in owned_allocations(*values)]

    def alive(self) -> tuple[Allocation, ...]:
        """The allocations of which an owner is still there."""
        return distinct([each for each, gone in self._gone if not gone()])

    def freed(self) -> int:
        """Bytes that were there when the watch began and are not any more."""
        before = distinct([each for each, _ in self._gone])
        return sum(each.nbytes for each in before) - sum(each.nbytes for each in self.alive())


def _question(owner: Any) -> Callable[[], bool]:
    if isinstance(owner, torch.UntypedStorage):
        return cast("Callable[[], bool]", StorageWeakRef(owner).expired)  # type: ignore[no-untyped-call]
    try:
        reference = weakref.ref(owner)
    except TypeError:  # bytes and the like: nobody can tell, so they count as still there
        return lambda: False
    return lambda: reference() is None

"""A list that knows how much of it has only been appended to, so that this much need not be looked at again.

It is a real list (``torch.cat`` takes a subclass), and behaves as one in every way, equality, copies and
pickles included; a copy is a plain list. It sees what is done through its own methods: C code that writes
into a list past them (``heapq``, ``list.sort(chunks)``) is not noticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import is_
from typing import Any, TypeVar

ItemT = TypeVar("ItemT")

_DISTURB = (
    "__init__ __setitem__ __delitem__ __imul__ clear insert pop remove reverse sort".split()  # noqa: SIM905
)
"""What changes a list otherwise than by putting items behind its last one."""


@dataclass(slots=True, eq=False)
class StablePrefix:
    """Leading items of a list that have stayed as they were.

    Attributes:
        count: How many of them somebody has noted.
    """

    count: int = 0


class AppendTrackedList(list[ItemT]):
    """A list that is mostly appended to.

    Attributes:
        run: What somebody has noted of it; ``None`` once it was changed otherwise than by appending.
    """

    __slots__ = ("run",)
    run: StablePrefix | None

    def begin(self) -> StablePrefix:
        """Start noting anew."""
        self.run = run = StablePrefix()
        return run

    def succeed(self, other: AppendTrackedList[Any]) -> None:
        """Stand in for ``other`` from now on: take its run over, if this begins with its very items."""
        run = other.run
        if run is not None and len(self) >= run.count and all(map(is_, islice(other, run.count), self)):
            self.run = run

    def __reduce_ex__(self, _: object) -> tuple[Callable[..., Any], tuple[()], None, Iterator[ItemT]]:
        return list, (), None, iter(self)


def _disturbing(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    @functools.wraps(method)
    def disturb(self: AppendTrackedList[Any], *arguments: Any, **options: Any) -> Any:
        try:
            return method(self, *arguments, **options)
        finally:  # afterwards, and also where it failed half-way: who looks meanwhile is told later
            self.run = None

    return disturb


for _name in _DISTURB:
    setattr(AppendTrackedList, _name, _disturbing(_name))

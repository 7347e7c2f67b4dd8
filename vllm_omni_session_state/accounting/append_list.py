"""Lists that are mostly appended to: what their leading items reach is charged once and not walked again.

An ``AppendTrackedList`` knows how much of it has only been appended to. What these items reach stays in an
``AllocationLog``, of which each ledger knows by a number how much it has charged, so that a settlement looks
at what came behind them. Once one of a session's lists is changed in another way, is replaced or goes, its
log is left, and a new one begins with a walk of all.

Only plain tensors join: what they reach stays as it is. A list of something else is walked to its end each
time, from the first item that is no plain tensor on. Each item that joins counts for itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from operator import is_
from typing import Any, TypeVar

import torch

from vllm_omni_session_state.accounting.allocations import Allocation
from vllm_omni_session_state.accounting.footprint import owned_allocations

ItemT = TypeVar("ItemT")

SHORT = 16
"""Items of a list that costs less to walk each time than to keep account of."""

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
    """A list that knows whether it was only appended to.

    It is a real list (``torch.cat`` takes a subclass), and behaves as one in every way, equality, copies and
    pickles included; a copy is a plain list. It sees what is done through its own methods: C code that writes
    into a list past them (``heapq``, ``list.sort(chunks)``) is not noticed.

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


class AllocationLog:
    """Different allocations in the order of their arrival; none ever leaves.

    Attributes:
        runs: Of each list how much the log covers.
        order: The allocations.
        known: The same.
        nbytes_by_device: Their bytes.
    """

    __slots__ = ("known", "nbytes_by_device", "order", "runs")

    def __init__(self, runs: Sequence[StablePrefix] = ()) -> None:
        self.runs = runs
        self.order: list[Allocation] = []
        self.known: set[Allocation] = set()
        self.nbytes_by_device: dict[str, int] = {}

    def add(self, allocations: Iterable[Allocation]) -> None:
        """Note those that are not there yet."""
        for each in allocations:
            if each not in self.known:
                self.known.add(each)
                self.order.append(each)
                self.nbytes_by_device[each.device] = self.nbytes_by_device.get(each.device, 0) + each.nbytes

    def nbytes_with(self, allocations: Iterable[Allocation]) -> dict[str, int]:
        """Bytes by device of the log and of ``allocations`` together."""
        found = dict(self.nbytes_by_device)
        for device, _, nbytes in set(allocations) - self.known:
            found[device] = found.get(device, 0) + nbytes
        return found


@dataclass(frozen=True, slots=True)
class Appended:
    """What a walk of some growing lists found behind what their log covers.

    Attributes:
        log: Where it belongs.
        counts: How many leading items of each list the log covers with it.
        found: What these reach.
        rest: Items that cannot join, to be walked each time.
    """

    log: AllocationLog
    counts: tuple[int, ...]
    found: list[Allocation]
    rest: list[Any]

    def join(self) -> None:
        """Put it into the log; twice is once, and an older walk takes nothing back. Lock held."""
        self.log.add(self.found)
        for run, count in zip(self.log.runs, self.counts, strict=True):
            run.count = max(run.count, count)


def scan_appended(lists: Sequence[AppendTrackedList[Any]], log: AllocationLog | None) -> Appended:
    """Walk what is new in some growing lists.

    Args:
        lists: All of them; if they are not exactly those of ``log``, as they were but for what was
            appended, everything in them is new.
        log: That of the last walk.
    """
    if log is None or [each.run for each in lists] != log.runs:
        log = AllocationLog([each.begin() for each in lists])
    joining: list[Any] = []
    rest: list[Any] = []
    counts: list[int] = []
    for each, run in zip(lists, log.runs, strict=True):
        covered = run.count
        new = each[covered:]
        plain = list(takewhile(is_plain, new))
        joining += plain
        rest += new[len(plain) :]
        counts.append(covered + len(plain))
    return Appended(log, tuple(counts), [found for _, found in owned_allocations(*joining)], rest)


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

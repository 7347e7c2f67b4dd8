"""The contract of one typed unit of session state.

It speaks of bytes, growth, read views, commitment and release; never of tokens, layers or attention.
Writes have two phases: ``stage()`` holds data for a window in progress, ``commit()`` promotes it,
``discard()`` drops it. ``export_payload()`` and ``import_payload()`` are the one pair on which moving a
session anywhere is built.

Who calls: a model's adapter, on the thread that runs the forward; the manager while nobody uses the
session. No method locks and none blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from vllm_omni_session_state.accounting.append_list import AppendTrackedList
from vllm_omni_session_state.accounting.footprint import Footprint, footprint
from vllm_omni_session_state.accounting.release import Watch
from vllm_omni_session_state.base.errors import NothingStagedError

PayloadT = TypeVar("PayloadT")
"""What writers pass to ``stage()``, ``commit()`` and ``append()``."""

ViewT = TypeVar("ViewT")
"""What ``view()`` hands to the consumer; not necessarily the payload's type."""


class StateObject(ABC, Generic[PayloadT, ViewT]):
    """One typed unit of session state.

    A subclass holds its bytes itself or is a handle to bytes that another component owns, to which it
    then delegates. The class says how the state may be reclaimed; there is no flag for it.

    Attributes:
        recompute_source: What this object can be rebuilt from. ``None``: from nothing, so it must be
            kept or moved, never merely evicted.
        recompute_cost: Estimated work to rebuild it while its source is resident, in any one unit.
    """

    recompute_source: StateObject[Any, Any] | None = None
    recompute_cost: int = 0
    _staged: tuple[PayloadT] | None = None  # in a tuple, so that ``None`` can be staged

    @abstractmethod
    def allocate(self) -> None:
        """Bring the storage to its empty state; sizes are keyword-only arguments of the subclass."""

    def stage(self, payload: PayloadT) -> None:
        """Hold ``payload`` for the window in progress, in place of what was staged before."""
        self._staged = (payload,)

    def commit(self, payload: PayloadT | None = None) -> None:
        """Promote data to the committed storage.

        Args:
            payload: What to write; ``None`` promotes the staged payload and unstages it.

        Raises:
            NothingStagedError: If there is neither.
            NotAllocatedError: Before ``allocate()``. What was staged stays staged.
        """
        if payload is not None:
            self._write(payload)
            return
        if self._staged is None:
            raise NothingStagedError(type(self).__name__)
        self._write(self._staged[0])
        self._staged = None

    def discard(self) -> None:
        """Drop the staged payload; committed bytes are never touched."""
        self._staged = None

    def append(self, payload: PayloadT) -> None:
        """``stage()`` and ``commit()`` in one; a writer with a single window uses only this."""
        self._write(payload)

    @abstractmethod
    def _write(self, payload: PayloadT) -> None:
        """Write ``payload`` into the committed storage."""

    @abstractmethod
    def view(self, *, include_staged: bool = True) -> ViewT:
        """What the consumer reads.

        Args:
            include_staged: Whether the staged payload is part of it.

        Raises:
            NotAllocatedError: Before ``allocate()`` and after ``reset()`` or ``evict()``.
        """

    def evict(self) -> int:
        """Release the committed storage, never the staged payload.

        Call it only while nobody uses the object.

        Returns:
            The bytes that are really gone. Judged after the release: what something else keeps alive
            (a view, an alias, the staged payload) is not counted.
        """
        watch = Watch(self.holds()) if self.resident else None
        self._release()
        return 0 if watch is None else watch.freed()

    def reset(self) -> None:
        """Back to the unallocated state, without committed and without staged data."""
        self._release()
        self._staged = None

    @abstractmethod
    def _release(self) -> None:
        """Let go of the committed storage; afterwards the object is not resident."""

    @property
    @abstractmethod
    def resident(self) -> bool:
        """Whether the committed storage is in memory."""

    @property
    def recomputable(self) -> bool:
        """Whether the object could be dropped and rebuilt now: its source is there and resident."""
        return self.recompute_source is not None and self.recompute_source.resident

    @abstractmethod
    def export_payload(self) -> Any:
        """Hand out the committed content by reference, as a plain tree.

        Returns:
            Tensors, arrays, scalars, strings, lists, tuples and dicts, nested; the staged payload is
            not part of it.

        Raises:
            NotAllocatedError: If the object is not resident.
        """

    @abstractmethod
    def import_payload(self, tree: Any) -> None:
        """Take back what ``export_payload()`` handed out; afterwards the object is resident.

        Raises:
            BadPayloadError: If this kind of object never exported such a tree; nothing has changed.
        """

    def holds(self) -> Any:
        """Where the books find the memory of the committed content: walked, never kept nor changed.

        By default what ``export_payload()`` hands out. A handle whose export is a copy says its blocks.

        Raises:
            NotAllocatedError: If the object is not resident.
        """
        return self.export_payload()

    @property
    def growing(self) -> AppendTrackedList[Any] | None:
        """The list that is all of the committed content, if it is one that is mostly appended to."""
        return None

    @property
    def live(self) -> object | None:
        """The container that consumers are handed, if an export hands out another one of the same items."""
        return None

    def footprint(self) -> Footprint:
        """The memory that the committed content keeps alive."""
        return footprint(self.holds()) if self.resident else footprint()

    @property
    def staged(self) -> tuple[PayloadT] | None:
        """The staged payload in a tuple, ``None`` where nothing is staged."""
        return self._staged

    def nbytes_by_device(self) -> dict[str, int]:
        """Bytes of the committed content by device; what it reaches twice counts once."""
        return self.footprint().nbytes_by_device()

    @property
    def nbytes(self) -> int:
        """Bytes of the committed content over all devices; a budget wants them by device."""
        return self.footprint().nbytes

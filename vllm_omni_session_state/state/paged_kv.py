"""Engine KV as a state object: a handle to blocks that a serving engine owns.

The engine allocates, writes and frees; the handle counts, takes out and puts back. Nothing here knows which
engine: that is behind ``EngineKV``.
"""

from __future__ import annotations

from typing import Any, Protocol

from vllm_omni_session_state.accounting.allocations import Blocks
from vllm_omni_session_state.accounting.release import Watch
from vllm_omni_session_state.base.errors import EngineOwnedError, NotAllocatedError
from vllm_omni_session_state.state.state_object import StateObject


class EngineKV(Protocol):
    """One session's KV in an engine. What fails changes nothing."""

    @property
    def state(self) -> Any:
        """The engine's own object for that session."""

    @property
    def closed(self) -> bool:
        """Whether the engine holds nothing of the session any more."""

    def blocks(self) -> Blocks:
        """The session's blocks in the engine's pool; of a closed one, none."""

    def beside(self) -> Any:
        """What the engine holds of the session beside its pool, by reference."""

    def in_flight(self) -> tuple[str, ...]:
        """The branches that are in the middle of a chunk."""

    def gather(self) -> Any:
        """A plain tree of all that ``put_back()`` needs; what lies in the pool is copied.

        Raises:
            MidChunkError: In the middle of a chunk.
        """

    def put_back(self, tree: Any) -> None:
        """Give the engine back what ``gather()`` handed out, in blocks that are this session's alone.

        Raises:
            BadPayloadError: If ``gather()`` of an engine of this shape never handed out such a tree.
            KVOccupiedError: If the engine holds some of the session.
            PoolFullError: If there is no room.
        """

    def reopen(self) -> None:
        """Let go of everything, and be ready for a session that begins."""

    def close(self) -> None:
        """Free every block of the session, and what is held beside; a second time does nothing."""


class PagedKV(StateObject[Any, Any]):
    """A handle to one session's KV in the engine's pool; never a second allocation.

    It counts exactly the session's blocks, although they lie in tensors that all sessions share. Its export
    is a copy, for by reference it would be the whole pool; so the books ask ``holds()`` instead. In the
    middle of a chunk something is staged, by the engine, and the export is refused.

    Args:
        engine: The session's KV.
    """

    def __init__(self, engine: EngineKV) -> None:
        self._engine = engine

    def allocate(self) -> None:
        """Empty the session's KV."""
        self._engine.reopen()

    def view(self, *, include_staged: bool = True) -> Any:  # noqa: ARG002 - what is staged is the engine's own
        """The engine's own object for the session, for whoever runs its forward."""
        if self._engine.closed:
            raise NotAllocatedError(type(self).__name__)
        return self._engine.state

    def evict(self) -> int:
        """Have the engine free the session's KV.

        Returns:
            The bytes of its blocks, which the pool can give to others now, and of what was held beside the
            pool as much as is gone.
        """
        before = self._nbytes_of_blocks()
        watch = Watch(self._engine.beside())
        self._release()
        return before - self._nbytes_of_blocks() + watch.freed()

    def _nbytes_of_blocks(self) -> int:
        return sum(block.nbytes for block in self._engine.blocks())

    @property
    def resident(self) -> bool:
        """Whether the engine's state of the session is open."""
        return not self._engine.closed

    @property
    def staged(self) -> tuple[Any] | None:
        """The names of the branches that are in the middle of a chunk, in a tuple; ``None`` at a boundary."""
        branches = self._engine.in_flight()
        return (branches,) if branches else None

    def export_payload(self) -> Any:
        """A copy of the KV and all that belongs to it, as a plain tree.

        Raises:
            NotAllocatedError: If it is not resident.
            MidChunkError: In the middle of a chunk.
        """
        if self._engine.closed:
            raise NotAllocatedError(type(self).__name__)
        return self._engine.gather()

    def import_payload(self, tree: Any) -> None:
        """Take back what ``export_payload()`` handed out.

        Raises:
            BadPayloadError: If it is another engine's, or none.
            KVOccupiedError: If the session has KV already.
            PoolFullError: If there are too few free blocks. After each of them nothing has changed.
        """
        self._engine.put_back(tree)

    def holds(self) -> dict[str, Any]:
        """``{"blocks": its blocks in the pool, "beside": tensors}``."""
        if self._engine.closed:
            raise NotAllocatedError(type(self).__name__)
        return {"blocks": self._engine.blocks(), "beside": self._engine.beside()}

    def _write(self, payload: Any) -> None:  # noqa: ARG002 - refused, whatever it is
        raise EngineOwnedError(type(self).__name__)

    def _release(self) -> None:
        self._engine.close()

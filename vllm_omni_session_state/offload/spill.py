"""Spilling: the older items of an append buffer go to the disk tier in segments, and are read from there.

A segment is one file of the tier. Its handle stands in the buffer, so that whatever ends the buffer's
content ends the file too; a handle that nobody holds any more is collected, and its file removed later.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter, deque
from typing import Any

from vllm_omni_session_state.base.ids import fingerprint
from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.offload.disk_tier import DiskTier, FileAllocation
from vllm_omni_session_state.offload.pack import pack_whole
from vllm_omni_session_state.offload.unpack import prove, unpack
from vllm_omni_session_state.state.buffers import LatentBuffer

SEGMENT = 64
"""Items of a segment: 14 MiB of DreamZero's chunks at the documented size.

A file costs two ``fsync()``, whatever its size: with so many items that is little for each. And a session
holds at most one more than these in memory, so that neither its bytes nor the model's walk over its list
at each step grow.
"""


class Spiller:
    """Moves items of buffers to one disk tier.

    Args:
        tier: The tier.
    """

    def __init__(self, tier: DiskTier) -> None:
        self._nbytes: Counter[str] = Counter()  # of the segments' files, by a session's hashed identity
        self.orphans: deque[FileAllocation] = (
            deque()
        )  # filled by the garbage collector, at any time in any thread
        self._tier = tier
        self._lock = threading.Lock()
        self._failed: weakref.WeakKeyDictionary[LatentBuffer[Any], int] = weakref.WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Of the segments' files."""
        with self._lock:
            return self._nbytes.total()

    def nbytes_of(self, key: str) -> int:
        """Of the segments' files of one session."""
        with self._lock:
            return self._nbytes[fingerprint(key).hex()]

    def spill(self, key: str, buffer: LatentBuffer[Any]) -> None:
        """Move the oldest items of an append buffer to the disk, once there are enough of them.

        Never raises: it runs after a forward's own body. What cannot be written stays in memory, said once;
        it is tried again when as many items as a segment has have come, or have gone.

        Args:
            key: The session's.
            buffer: Nobody else uses it meanwhile.
        """
        self.sweep()
        items = buffer.growing
        if items is None or len(items) <= SEGMENT:  # the newest stays: the model may hold it still
            return
        failed = self._failed.get(buffer)
        if failed is not None and failed <= len(items) < failed + SEGMENT:
            return
        try:
            segment = self._write(key, items[:SEGMENT])
        except Exception as error:  # noqa: BLE001 - a disk can fail in any way, and nothing has changed then
            self._failed[buffer] = len(items)
            log_once(
                logging.WARNING,
                ("spill", type(error).__name__),
                "video latents stay in host memory and are tried again after %d more chunks: %s",
                SEGMENT,
                error,
            )
            return
        self._failed.pop(buffer, None)
        buffer.move_out(segment)

    def sweep(self) -> None:
        """Remove the files of which nobody holds the handle any more. Never raises."""
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while self.orphans:
                self.remove(self.orphans.popleft())

    def read(self, ticket: FileAllocation) -> list[Any]:
        """The items of a segment.

        Raises:
            TierFaultError: If they cannot be read; their file stays.
            MemoryError: If the machine has no room.
        """
        contents = self._tier.get(ticket)
        items: list[Any] = unpack(contents.tree, contents.storages)
        return items

    def remove(self, ticket: FileAllocation) -> None:
        """Remove a segment's file."""
        self._tier.drop(ticket)
        with self._lock:
            self._nbytes[ticket.session] -= ticket.nbytes
            if not self._nbytes[ticket.session]:
                del self._nbytes[ticket.session]

    def _write(self, key: str, items: list[Any]) -> _OnDisk:
        packed = pack_whole(items)
        prove(packed)
        ticket = self._tier.put(packed.tree, packed.memory, session=fingerprint(key).hex())
        with self._lock:
            self._nbytes[ticket.session] += ticket.nbytes
        return _OnDisk(self, ticket, len(items))


class _OnDisk:
    """The handle of a segment, as ``segments.Segment`` wants it."""

    __slots__ = ("__weakref__", "_end", "_spiller", "_ticket", "count")

    def __init__(self, spiller: Spiller, ticket: FileAllocation, count: int) -> None:
        self.count = count
        self._spiller = spiller
        self._ticket = ticket
        self._end = weakref.finalize(self, spiller.orphans.append, ticket)
        self._end.atexit = False

    def read(self) -> list[Any]:
        return self._spiller.read(self._ticket)

    def drop(self) -> None:
        if self._end.detach() is not None:
            self._spiller.remove(self._ticket)

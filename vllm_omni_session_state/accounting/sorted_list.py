"""Ascending addresses: the neighbours of one are found, and one comes or goes, by a binary search."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

NONE = -1
"""No address: there is none on that side."""

CHUNK = 512
"""Addresses in a chunk at most: one memory move of 4 KiB."""


class SortedList:
    """Ascending addresses, in chunks: an insertion moves one chunk, however many addresses there are."""

    __slots__ = ("chunks", "heads")

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []
        self.heads: list[int] = []  # the first address of each chunk

    def addresses(self) -> list[int]:
        """All of them; asserts that the chunks are sound."""
        assert self.heads == [chunk[0] for chunk in self.chunks], "a chunk does not begin with its head"
        return [address for chunk in self.chunks for address in chunk]

    def upward(self, address: int) -> Iterator[int]:
        """The addresses from the last one that is not above ``address`` on."""
        at = max(bisect_right(self.heads, address) - 1, 0)
        for chunk in self.chunks[at : at + 1]:
            yield from chunk[max(bisect_right(chunk, address) - 1, 0) :]
        for chunk in self.chunks[at + 1 :]:
            yield from chunk

    def add(self, address: int) -> tuple[int, int]:
        """Insert an address that is not there; its neighbours, ``NONE`` where there is none."""
        heads = self.heads
        at = bisect_right(heads, address) - 1
        if at < 0:  # below everything
            first = heads[0] if heads else NONE
            if heads:
                self.chunks[0].insert(0, address)
                heads[0] = address
                self._split(0)
            else:
                self.chunks.append([address])
                heads.append(address)
            return NONE, first
        chunk = self.chunks[at]
        index = bisect_right(chunk, address)
        before = chunk[index - 1]
        above = chunk[index : index + 1] or heads[at + 1 : at + 2]
        after = above[0] if above else NONE
        chunk.insert(index, address)
        if len(chunk) > CHUNK:
            self._split(at)
        return before, after

    def _split(self, at: int) -> None:
        chunk = self.chunks[at]
        if len(chunk) > CHUNK:
            self.chunks.insert(at + 1, chunk[CHUNK // 2 :])
            self.heads.insert(at + 1, chunk[CHUNK // 2])
            del chunk[CHUNK // 2 :]

    def remove(self, address: int) -> None:
        """Take out an address that is there."""
        at = bisect_right(self.heads, address) - 1
        chunk = self.chunks[at]
        index = bisect_right(chunk, address) - 1
        del chunk[index]
        if index:
            return
        if chunk:
            self.heads[at] = chunk[0]
        else:
            del self.chunks[at]
            del self.heads[at]

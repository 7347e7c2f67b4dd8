"""Memory regions: what a value keeps alive, as plain addresses.

A region is the extent of one allocation, not of the view that was looked at. Whoever counts regions
never needs the tensor again: two views of one storage yield the same region, so they count once.
"""

from __future__ import annotations

from dataclasses import dataclass

HOST = "cpu"
"""The device name of pageable host memory."""

PINNED = "pinned"
"""The device name of page-locked host memory: host memory that the accelerator can read directly."""


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """One extent of memory.

    Attributes:
        device: The pool it lies in: ``"cpu"``, ``"pinned"``, ``"cuda:0"``, ...
        start: Address of its first byte within that device's address space.
        nbytes: Its length in bytes; never 0 (a value of no bytes has no region).
    """

    device: str
    start: int
    nbytes: int

    @property
    def stop(self) -> int:
        """Address one past the last byte."""
        return self.start + self.nbytes

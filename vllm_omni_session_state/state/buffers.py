"""The kinds of state object that models use today. A class lands with its first user."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from vllm_omni_session_state.accounting.append_list import AppendTrackedList
from vllm_omni_session_state.base.errors import (
    AlreadyEncodedError,
    BadPayloadError,
    IdentityMismatchError,
    NotAllocatedError,
)
from vllm_omni_session_state.state.segments import Segment, Segments
from vllm_omni_session_state.state.state_object import StateObject

ItemT = TypeVar("ItemT")
"""A frame or a chunk: a pixel array, a latent tensor."""

EncodedT = TypeVar("EncodedT")
"""What an encoder hands out in one piece: all layers' K/V and whatever belongs to them."""


class LatentBuffer(StateObject[ItemT, list[ItemT]], Generic[ItemT]):
    """Frames or latents in the order of their arrival: all of them, or a ring of the last ones.

    Its content lives in one container that the object owns and hands out (``container``), because a
    model's code appends to it, slices it and passes it to ``torch.cat``, which takes only a real list (or
    one of a subclass) or tuple.

    Its older items may be elsewhere, in segments; then all that is said here of its content is said of
    the others. Segments survive a payload's going and coming, and go with a reset or with other content.
    """

    def __init__(self) -> None:
        self._items: AppendTrackedList[ItemT] | deque[ItemT] | None = None
        self._maxlen: int | None = None
        self._segments = Segments()

    def allocate(self, *, maxlen: int | None = None) -> None:
        """Empty the buffer.

        Args:
            maxlen: Items that a ring keeps, at least 1; ``None`` keeps them all.

        Raises:
            ValueError: For a ``maxlen`` below 1; nothing has changed.
        """
        self.replace((), maxlen=maxlen)

    def replace(self, items: Iterable[ItemT], *, maxlen: int | None = None) -> None:
        """Hold ``items``, in a container of this object's own, instead of what was held.

        Args:
            items: The new content. The iterable itself is not kept: whoever holds it cannot change
                the buffer through it.
            maxlen: As for ``allocate()``.

        Raises:
            ValueError: For a ``maxlen`` below 1; nothing has changed.
        """
        if maxlen is not None and maxlen < 1:
            raise ValueError(f"LatentBuffer maxlen={maxlen} keeps nothing; pass 1 or more, or None for all")
        maxlen = None if maxlen is None else int(operator.index(maxlen))  # as a payload has it
        last = self.growing
        self._items = AppendTrackedList(items) if maxlen is None else deque(items, maxlen=maxlen)
        self._maxlen = maxlen
        self._segments.keep(self._items)
        if last is not None and self.growing is not None:
            self.growing.succeed(last)

    @property
    def maxlen(self) -> int | None:
        """Items that the ring keeps, ``None`` for an append buffer; survives ``reset()``."""
        return self._maxlen

    @property
    def container(self) -> AppendTrackedList[ItemT] | deque[ItemT]:
        """The buffer's own list (append) or deque (ring), live: writing to it writes to the buffer.

        Raises:
            NotAllocatedError: Before ``allocate()``.
        """
        if self._items is None:
            raise NotAllocatedError(type(self).__name__)
        return self._items

    @property
    def growing(self) -> AppendTrackedList[ItemT] | None:
        """The list of an append buffer."""
        return self._items if isinstance(self._items, AppendTrackedList) else None

    @property
    def live(self) -> AppendTrackedList[ItemT] | deque[ItemT] | None:
        """The container, ``None`` before ``allocate()``."""
        return self._items

    def extend(self, payloads: Iterable[ItemT]) -> None:
        """Append several items.

        Raises:
            NotAllocatedError: Before ``allocate()``.
        """
        self.container.extend(payloads)

    def move_out(self, segment: Segment) -> None:
        """Hold a segment in place of the oldest items, which are in it.

        Args:
            segment: Of fewer items than the list of this append buffer has.
        """
        items = self.growing
        assert items is not None, "a ring has no segments"
        assert segment.count < len(items), "the newest item stays: by it the model's list is known again"
        self._segments.keep(items)
        del items[: segment.count]
        self._segments.add(segment, items)

    @property
    def segments(self) -> list[Segment]:
        """Where the items are that came before those in the container; oldest first."""
        return [] if self._items is None else self._segments.before(self._items)

    def whole(self) -> list[ItemT]:
        """All items, oldest first, as a new list; those in segments are read and not kept.

        Raises:
            NotAllocatedError: Before ``allocate()``.
            Exception: As ``Segment.read()``.
        """
        items: list[ItemT] = []
        for segment in self.segments:
            items += segment.read()
        return items + list(self.container)

    def view(self, *, include_staged: bool = True) -> list[ItemT]:
        """The items, oldest first, as a new list; a staged item stands where a commit would put it."""
        items = list(self.container)
        if include_staged and self._staged is not None:
            items.append(self._staged[0])
            if self._maxlen is not None:
                items = items[-self._maxlen :]
        return items

    def __len__(self) -> int:
        return 0 if self._items is None else len(self._items)

    def __bool__(self) -> bool:
        """True also when empty: a buffer is a place, and an empty one is still there."""
        return True

    @property
    def resident(self) -> bool:
        """Whether the buffer is allocated."""
        return self._items is not None

    def export_payload(self) -> dict[str, Any]:
        """``{"maxlen": int | None, "items": list}``; the items themselves, not copies."""
        return {"maxlen": self._maxlen, "items": list(self.container)}

    def import_payload(self, tree: Any) -> None:
        """Take back what ``export_payload()`` handed out."""
        kind = type(self).__name__
        if not isinstance(tree, dict) or set(tree) != {"maxlen", "items"}:
            raise BadPayloadError(kind, "it wants a dict of 'maxlen' and 'items'")
        maxlen, items = tree["maxlen"], tree["items"]
        if not isinstance(items, list):
            raise BadPayloadError(kind, f"'items' is a {type(items).__name__}, not a list")
        if maxlen is not None and (type(maxlen) is not int or maxlen < max(1, len(items))):
            raise BadPayloadError(kind, f"maxlen={maxlen!r} cannot hold {len(items)} items")
        self._segments.arrive(items)
        self.replace(items, maxlen=maxlen)

    def _write(self, payload: ItemT) -> None:
        self.container.append(payload)

    def _release(self) -> None:
        if self._items is not None:
            self._segments.keep(self._items)
            self._segments.leave()
        self._items = None

    def reset(self) -> None:
        """Back to the unallocated state, without segments."""
        super().reset()
        self._segments.drop()


class EncodeOnceKV(StateObject[EncodedT, EncodedT], Generic[EncodedT]):
    """Conditioning K/V, computed once and read many times.

    It is written in one piece, so it is never half there, and it holds the identity of what it was
    computed from: whoever reads says what their own input is, and gets an error rather than another
    prompt's K/V.
    """

    def __init__(self) -> None:
        self._identity: str | None = None
        self._encoded: tuple[EncodedT] | None = None

    def allocate(self, *, identity: str = "") -> None:
        """Become empty.

        Args:
            identity: A digest of everything that the content will be computed from.
        """
        self._identity = identity
        self._encoded = None

    @property
    def identity(self) -> str | None:
        """Digest of what the content is computed from, ``None`` before ``allocate()``."""
        return self._identity

    def read(self, identity: str) -> EncodedT | None:
        """The content for an asker whose input has this identity; ``None`` while nothing is written.

        Raises:
            IdentityMismatchError: If the content was, or will be, computed from something else.
            NotAllocatedError: Before ``allocate()``.
        """
        if self._identity is None:
            raise NotAllocatedError(type(self).__name__)
        if identity != self._identity:
            raise IdentityMismatchError(type(self).__name__, held=self._identity, asked=identity)
        return None if self._encoded is None else self._encoded[0]

    def view(self, *, include_staged: bool = True) -> EncodedT:
        """The content, whoever asks; for those who move or list it. A model reads by identity."""
        if include_staged and self._staged is not None:
            return self._staged[0]
        if self._encoded is None:
            raise NotAllocatedError(type(self).__name__)
        return self._encoded[0]

    @property
    def resident(self) -> bool:
        """Whether the content is written and in memory."""
        return self._encoded is not None

    def export_payload(self) -> dict[str, Any]:
        """``{"identity": str, "encoded": content}``; the content itself, not a copy."""
        if self._encoded is None:
            raise NotAllocatedError(type(self).__name__)
        return {"identity": self._identity, "encoded": self._encoded[0]}

    def import_payload(self, tree: Any) -> None:
        """Take back what ``export_payload()`` handed out, for the same identity or into a fresh object."""
        kind = type(self).__name__
        if not isinstance(tree, dict) or set(tree) != {"identity", "encoded"}:
            raise BadPayloadError(kind, "it wants a dict of 'identity' and 'encoded'")
        if not isinstance(tree["identity"], str):
            raise BadPayloadError(kind, f"'identity' is a {type(tree['identity']).__name__}, not a str")
        if self._identity not in (None, tree["identity"]):
            raise BadPayloadError(kind, f"it holds {self._identity} and was given {tree['identity']}")
        self._identity = tree["identity"]
        self._encoded = (tree["encoded"],)

    def _write(self, payload: EncodedT) -> None:
        if self._identity is None:
            raise NotAllocatedError(type(self).__name__)
        if self._encoded is not None:
            raise AlreadyEncodedError(type(self).__name__)
        self._encoded = (payload,)

    def _release(self) -> None:
        self._encoded = None

    def reset(self) -> None:
        """Back to the unallocated state, for no identity."""
        super().reset()
        self._identity = None

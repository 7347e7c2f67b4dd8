"""What the ranks of one model tell each other before all of them go on, or none does.

A message has one size, whatever it says: so it is one collective call, with nothing to agree on before it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from vllm_omni_session_state.base.errors import (
    SessionRestoreFailedError,
    SessionStateError,
    error_text,
    without_frames,
)
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.base.log import log_once

T = TypeVar("T")

SIZE = 512
"""Bytes of a message."""

AllGather = Callable[[bytes], Sequence[bytes]]
"""Hands a message of `SIZE` bytes to all ranks; returns theirs, by rank.

A collective call: every rank makes it, or the others wait until one of them is gone, or the group's timeout.
"""


class RankStatus(NamedTuple):
    """What one rank tells the others.

    Attributes:
        about: What all of them speak of, one line.
        said: What this rank has of it, one line.
        failed: What went wrong on this rank, cut where the message ends; ``""`` for nothing.
    """

    about: str
    said: str
    failed: str = ""

    def packed(self) -> bytes:
        """As a message."""
        lines = (self.about, " ".join(self.said.split()), self.failed)
        return "\n".join(lines).encode(errors="backslashreplace")[:SIZE].ljust(SIZE, b"\0")


def status_of(message: bytes) -> RankStatus:
    """The reverse of ``Word.packed()``."""
    return RankStatus(*message.rstrip(b"\0").decode(errors="ignore").split("\n", 2))


def gather_status(
    exchange: AllGather | None, about: str, said: str = "", failed: str = ""
) -> list[RankStatus]:
    """Tell all ranks; what each of them told, by rank.

    Args:
        exchange: ``None`` where there is one rank.
        about: As in ``Word``.
        said: As in ``Word``.
        failed: As in ``Word``.

    Raises:
        Exception: If a rank is gone, or did not come within the group's timeout.
    """
    message = RankStatus(about, said, failed).packed()
    return list(map(status_of, [message] if exchange is None else exchange(message)))


def failures(words: Sequence[RankStatus]) -> str:
    """What went wrong, with the rank if there are several; the same on all, ``""`` where nothing did."""
    if len({word.about for word in words}) > 1:
        return "the ranks do not speak of the same"
    if len(words) == 1:
        return words[0].failed
    return "; ".join(f"rank {rank}: {word.failed}" for rank, word in enumerate(words) if word.failed)


class Ranks:
    """The ranks of one model, as its manager asks them; false where there is one.

    Args:
        exchange: How they tell each other.
    """

    def __init__(self, exchange: AllGather | None) -> None:
        self._exchange = exchange

    def __bool__(self) -> bool:
        return self._exchange is not None

    def agree(self, key: str, place: str, failed: Exception | None = None) -> Exception | None:
        """Whether all ranks have a session where this one has it, and each its part ready.

        Args:
            key: The session's.
            place: Where this rank had it when it was asked for; one line.
            failed: Why this rank's part is not ready.

        Returns:
            What keeps all of them from using it, the same on all; ``None`` if nothing does.
        """
        if self._exchange is None:
            return failed
        about = hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        try:
            words = gather_status(self._exchange, about, place, error_text(failed))
        except Exception as error:  # noqa: BLE001 - a rank is gone: the session stays where it is
            return without_frames(error)
        reasons = failures(words)
        if len({word.said for word in words}) > 1:
            where = ", ".join(f"rank {rank}: {word.said}" for rank, word in enumerate(words))
            reasons = f"the ranks do not agree where that is ({where}{reasons and '; '}{reasons})"
        return SessionStateError(reasons) if reasons else None

    def meet(self, key: str, place: str) -> None:
        """As ``agree()``, for a rank that has nothing to bring back.

        Raises:
            SessionRestoreFailedError: On all ranks; nothing has changed.
        """
        failed = self.agree(key, place)
        if failed is not None:
            raise SessionRestoreFailedError(display_id(key), failed) from failed

    def moved_or_left(self, move: Callable[[], T], leave: Callable[[], T]) -> T:
        """What ``move`` made; where other ranks have moved theirs and this one cannot, what ``leave`` made.

        Raises:
            Exception: Whatever ``move`` raised, where there is one rank.
        """
        try:
            return move()
        except Exception as error:
            if self._exchange is None:
                raise
            log_once(
                logging.WARNING,
                ("in place",),
                "what this rank has of a parked session stays where it is, beyond its budget: %s",
                error_text(error),
            )
        return leave()

"""What the ranks of one model tell each other before all of them go on, or none does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from vllm_omni_session_state.errors import SessionStateError, without_frames
from vllm_omni_session_state.events import say_once

T = TypeVar("T")

Exchange = Callable[[str | None], Sequence[str | None]]
"""Tells all ranks what went wrong on this one, if anything; returns what each of them told, by rank."""


def failed_somewhere(exchange: Exchange, failed: Exception | None) -> Exception | None:
    """What went wrong on any rank, the same on all of them; ``None`` where nothing did.

    Args:
        exchange: A collective call: every rank makes it.
        failed: What went wrong on this one.
    """
    try:
        told = exchange(None if failed is None else f"{type(failed).__name__}: {failed}")
    except Exception as error:  # noqa: BLE001 - a rank is gone: the session stays where it is
        return without_frames(error)
    reasons = [f"rank {rank}: {why}" for rank, why in enumerate(told) if why is not None]
    return SessionStateError("; ".join(reasons)) if reasons else None


def moved_or_left(exchange: Exchange | None, move: Callable[[], T], leave: Callable[[], T]) -> T:
    """What ``move`` made; where other ranks have moved theirs and this one cannot, what ``leave`` made.

    Raises:
        Exception: Whatever ``move`` raised, where there is one rank.
    """
    try:
        return move()
    except Exception as error:
        if exchange is None:
            raise
        say_once(
            logging.WARNING,
            ("in place",),
            "what this rank has of a parked session stays where it is, beyond its budget: %s: %s",
            type(error).__name__,
            error,
        )
    return leave()

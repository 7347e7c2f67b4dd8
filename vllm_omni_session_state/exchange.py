"""What the ranks of one model tell each other before all of them go on, or none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_omni_session_state.errors import SessionStateError, without_frames

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

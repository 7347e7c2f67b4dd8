"""What the answers to an operator show of a worker's engine: whose KV it has, and how much of its pool.

Looking changes nothing and refreshes nobody.
"""

from __future__ import annotations

import os
from typing import Any

from vllm_omni_session_state.base.ids import digest, display_id, redacted_id
from vllm_omni_session_state.manager.manager import SessionStateManager

AGREED = ("sessions", "parked_sessions", "hits", "misses", "evictions", "kv_sessions", "ends")
"""Those of ``figures()`` in which all ranks of a model must say the same. Bytes and blocks may differ."""

_MOST_NAMES, _LONGEST_NAME = 100, 64


def figures(manager: SessionStateManager, runner: Any, ends: dict[str, int]) -> dict[str, Any]:
    """What is known of a worker without a look at any session, as plain data of bounded length.

    Args:
        manager: Of its sessions.
        runner: vLLM-Omni's.
        ends: How many ends arrived.

    Returns:
        The manager's ``stats()``; ``pid``; ``bounds`` that are set; ``kv`` of the engine's pool, and how many
        ``kv_sessions`` it holds; ``ends``; and ``only_kv``, sessions of which nothing but engine KV is there,
        as they are shown, by their digest.
    """
    with_kv = kv_sessions(runner)
    only_kv = [key for key in with_kv if key not in manager]
    return {
        "pid": os.getpid(),
        **manager.stats(),
        "bounds": manager.bounds(),
        "kv": kv(runner),
        "kv_sessions": len(with_kv),
        "ends": dict(ends),
        "only_kv": {digest(key): _shown_short(key) for key in only_kv[:_MOST_NAMES]},
    }


def all_figures(manager: SessionStateManager, runner: Any, ends: dict[str, int]) -> dict[str, Any]:
    """The same with ``moves``: histograms of how long they took and how much they moved."""
    return {**figures(manager, runner, ends), "moves": manager.moves.figures()}


def _shown_short(key: str) -> str:
    name = display_id(key)
    return name if len(name) <= _LONGEST_NAME else redacted_id(key)


def kv_sessions(runner: Any) -> tuple[str, ...]:
    """Ids of the sessions for which an AR-Diffusion runner holds KV; none for another runner."""
    return tuple(getattr(runner, "_sessions", ()))


def kv(runner: Any) -> dict[str, int] | None:
    """Sessions and blocks of the engine's KV pool; ``None`` for a runner that has none."""
    pool = getattr(getattr(getattr(runner, "kv_cache", None), "manager", None), "block_pool", None)
    if pool is None:
        return None
    blocks = pool.num_gpu_blocks - 1  # without the null block, which is nobody's
    return {"sessions": len(kv_sessions(runner)), "blocks": blocks, "free": pool.get_num_free_blocks()}

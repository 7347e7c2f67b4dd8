"""What the answers to an operator show of a worker's parts: who is in use, how much is where, the bounds.

Looking changes nothing and refreshes nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_omni_session_state.ids import find, session_key, shown
from vllm_omni_session_state.manager import SessionStateManager


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


def named(name: str | None, keys: Iterable[str], *, only_id: bool) -> str | None:
    """The key that a name means, which is an id or, unless ``only_id``, what a listing shows."""
    if only_id:
        key = session_key(name)
        return key if key in keys else None
    return find(name, keys)


def who(
    manager: SessionStateManager, names: tuple[str | None, ...], keys: Iterable[str], *, only_id: bool
) -> dict[str, list[Any]]:
    """Who is meant by each name: whether it is there, whether it is in use, and how it is shown."""
    there = list(keys)
    found = [named(name, there, only_id=only_id) for name in names]
    return {
        "found": [key is not None for key in found],
        "used": [key is not None and manager.used(key) for key in found],
        "shown": [None if key is None else shown(key) for key in found],
    }

"""What the answers to an operator show of a worker's engine: whose KV it has, and how much of its pool.

Looking changes nothing and refreshes nobody.
"""

from __future__ import annotations

from typing import Any


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

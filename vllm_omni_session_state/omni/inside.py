"""What the answers to an operator show of a worker's parts: who is in use, how much is where, the bounds.

Looking changes nothing and refreshes nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_omni_session_state.ids import find, session_key, shown
from vllm_omni_session_state.manager import SessionStateManager
from vllm_omni_session_state.parking import Filed


def in_use(manager: SessionStateManager) -> frozenset[str]:
    """Keys of the sessions that somebody uses or that are on their way."""
    table = manager._table
    with table.lock:
        return frozenset(key for key, seat in table.seats.items() if seat.leases or seat.moving)


def parked_nbytes(manager: SessionStateManager) -> dict[str, int]:
    """Bytes that each parked session takes where it is parked, by its shown id: of its slab or its file."""
    table = manager._table
    with table.lock:
        held = {key: seat.parked.held for key, seat in table.seats.items() if seat.parked is not None}
    return {
        shown(key): each.ticket.nbytes if isinstance(each, Filed) else each.slab.nbytes
        for key, each in held.items()
        if each is not None
    }


def bounds(manager: SessionStateManager) -> dict[str, int]:
    """What is enforced: ``device``, ``host`` and ``disk`` in bytes where they are set, and ``max_parked``."""
    host, disk = manager.cascade.host, manager.cascade.disk
    held = {
        "device": manager.room.device_budget,
        "host": None if host is None else host.budget,
        "disk": None if disk is None else disk.budget,
        "max_parked": manager.cascade.max_parked,
    }
    return {name: value for name, value in held.items() if value is not None}


def parked_on_host_nbytes(manager: SessionStateManager) -> int:
    """Bytes of host memory in which sessions are parked, as reserved."""
    return 0 if manager.cascade.host is None else manager.cascade.host.nbytes


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
    there, used = list(keys), in_use(manager)
    found = [named(name, there, only_id=only_id) for name in names]
    return {
        "found": [key is not None for key in found],
        "used": [key in used for key in found],
        "shown": [None if key is None else shown(key) for key in found],
    }

"""A worker method that says what the worker's sessions hold: `tiny_listing`, as plain data.

It reads and refreshes nobody. It asks the plugin's manager where there is one; where there is none it
can only name the sessions in the model's own table, if the model has one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


def add_listing(diffusion_worker: ModuleType) -> None:
    """Give vLLM-Omni's worker class the method, which a client calls by name."""
    diffusion_worker.DiffusionWorker.tiny_listing = tiny_listing


def tiny_listing(worker: Any, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """List the worker's sessions, least recently used first.

    Args:
        worker: vLLM-Omni's worker.
        names: Session ids to be shown in the clear; a listing shows the hash of any other.

    Returns:
        ``pid`` of the worker; ``manager``, the class of the manager by dotted name, or ``None``; ``kv``,
        the runner's sessions and the blocks of its pool, where it has one; and ``sessions``, one mapping
        each with ``session``, ``nbytes`` by device and ``values``. Without the plugin's manager nothing
        counts bytes, and there is only ``session``.
    """
    pipeline = worker.model_runner.pipeline
    manager = pipeline._memory_manager
    said: dict[str, Any] = {"pid": os.getpid(), "manager": None, "kv": _kv(worker.model_runner)}
    if manager is None:
        return {**said, "sessions": [{"session": name} for name in getattr(pipeline, "_states", ())]}
    said["manager"] = f"{type(manager).__module__}.{type(manager).__qualname__}"
    if not hasattr(manager, "listing"):  # vLLM-Omni's own manager
        return {**said, "sessions": []}
    from vllm_omni_session_state.base.ids import display_id

    clear = {display_id(name): name for name in names}
    sessions = [
        {
            "session": clear.get(entry.session, entry.session),
            "nbytes": dict(entry.nbytes),
            "values": [
                {"name": value.name, "bucket": value.bucket, "nbytes": dict(value.nbytes)}
                for value in entry.values
            ],
        }
        for entry in manager.listing()
    ]
    return {**said, "sessions": sessions}


def _kv(runner: Any) -> dict[str, int]:
    cache = getattr(runner, "kv_cache", None)
    if cache is None:
        return {}
    pool = cache.manager.block_pool
    # One block of the pool is the null block, which is nobody's.
    return {
        "sessions": len(runner._sessions),
        "free": pool.get_num_free_blocks(),
        "blocks": pool.num_gpu_blocks - 1,
    }

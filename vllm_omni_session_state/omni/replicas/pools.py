"""The hook where vLLM-Omni brings a stage's replicas together: with the flag on, their pool gets affinity.

With the flag off the one wrapper hands through, and every pool is as vLLM-Omni made it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from vllm_omni_session_state.base.errors import SeamMismatchError
from vllm_omni_session_state.omni.hooks import patching, seams
from vllm_omni_session_state.omni.hooks.import_hook import when_imported
from vllm_omni_session_state.omni.replicas.affinity import Affinity, say_split
from vllm_omni_session_state.omni.replicas.peers import make_careful
from vllm_omni_session_state.omni.replicas.stages import keeps_sessions, stages_with_sessions

_RUNTIME, _POOL = seams.POOL_SEAMS
_AFFINITY = "_session_state_affinity"
"""Attribute of a pool of vLLM-Omni: the affinity of its sessions."""


def install() -> None:
    """Wait for this process to bring replicas together, if it does. Idempotent."""
    when_imported(seams.RUNTIME_MODULE, wrap)


def wrap(module: ModuleType) -> None:
    """Wrap the method that brings replicas together, once; one that looks otherwise is left alone."""
    runtime = getattr(module, _RUNTIME.rpartition(".")[2], None)
    try:
        seams.check(runtime or module, seams.POOL_SEAMS[_RUNTIME])
    except SeamMismatchError as error:
        say_split("any stage", error)
        return
    patching.wrap(runtime, "_assemble_stage_pools", _assemble_stage_pools)


def _assemble_stage_pools(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    pools = original(self, *args, **kwargs)
    for pool in pools:
        _follow(pool, self)
    return pools


def affinity_of(pool: Any) -> Affinity | None:
    """The affinity of a pool's sessions; ``None`` where the flag is off or vLLM-Omni looks otherwise."""
    found = getattr(pool, _AFFINITY, None)
    return found if isinstance(found, Affinity) else None


def _follow(pool: Any, runtime: Any) -> None:
    """Hook one pool if its stage has the flag on. Never raises."""
    try:
        stage = runtime._stage_configs[pool.stage_id]
        settings = next(iter(stages_with_sessions(SimpleNamespace(stage_configs=[stage])).values()), None)
        if settings is None:
            return
        seams.check(type(pool), seams.POOL_SEAMS[_POOL])
        seams.check_fields(pool, seams.POOL_FIELDS)
        affinity = Affinity(pool, strict=settings.on_lost == "error")
        if keeps_sessions(stage):
            affinity.follow()
        for client in pool.clients:
            make_careful(client)
        setattr(pool, _AFFINITY, affinity)
    except Exception as error:  # noqa: BLE001 - a hook never breaks serving
        say_split(f"stage {getattr(pool, 'stage_id', '?')}", error)

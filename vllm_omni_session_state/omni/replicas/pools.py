"""The hook where vLLM-Omni brings a stage's replicas together: with the flag on, their pool gets affinity.

With the flag off the one wrapper hands through, and every pool is as vLLM-Omni made it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_omni_session_state.base.log import tried
from vllm_omni_session_state.omni.hooks import patching, seams
from vllm_omni_session_state.omni.replicas.affinity import Affinity, sessions_split
from vllm_omni_session_state.omni.replicas.peers import make_careful
from vllm_omni_session_state.omni.replicas.stages import keeps_sessions, settings_of

_RUNTIME, _POOL = seams.POOL_SEAMS
_AFFINITY = "_session_state_affinity"
"""Attribute of a pool of vLLM-Omni: the affinity of its sessions."""


def wrap(module: ModuleType) -> None:
    """Wrap the method that brings replicas together, once; one that looks otherwise is left alone."""
    tried(lambda: _wrap(module), sessions_split("any stage"))


def _wrap(module: ModuleType) -> None:
    runtime = getattr(module, _RUNTIME.rpartition(".")[2], None)
    seams.check(runtime or module, seams.POOL_SEAMS[_RUNTIME])
    patching.wrap(runtime, "_assemble_stage_pools", _assemble_stage_pools)


def _assemble_stage_pools(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    pools = original(self, *args, **kwargs)
    for pool in pools:
        stage = f"stage {getattr(pool, 'stage_id', '?')}"
        tried(functools.partial(_follow, pool, self), sessions_split(stage))
    return pools


def affinity_of(pool: Any) -> Affinity | None:
    """The affinity of a pool's sessions; ``None`` where the flag is off or vLLM-Omni looks otherwise."""
    found = getattr(pool, _AFFINITY, None)
    return found if isinstance(found, Affinity) else None


def _follow(pool: Any, runtime: Any) -> None:
    """Hook one pool if its stage has the flag on."""
    stage = runtime._stage_configs[pool.stage_id]
    settings = settings_of(stage)
    if settings is None:
        return
    seams.check(type(pool), seams.POOL_SEAMS[_POOL])
    seams.check_fields(pool, seams.POOL_FIELDS)
    affinity = Affinity(pool, strict=settings.on_lost == "error")
    if keeps_sessions(stage):
        patching.wrap(pool, "submit_initial", affinity.submit)
    for client in pool.clients:
        make_careful(client)
    setattr(pool, _AFFINITY, affinity)

"""Manager-backed session state for world models served by vLLM-Omni.

Importing this package needs neither vLLM nor torch: the names below are looked up when they are first
used (PEP 562), so that finding the plugin through its entry point costs nothing where the flag is off.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_omni_session_state.base.errors import (
        AlreadyEncodedError,
        BadFileError,
        BadPayloadError,
        BudgetFixedError,
        CannotParkError,
        EngineOwnedError,
        IdentityMismatchError,
        KVOccupiedError,
        LatentsUnreadableError,
        MidChunkError,
        NoRoomError,
        NotAllocatedError,
        NothingStagedError,
        NotWritableError,
        PoolFullError,
        SeamMismatchError,
        SessionParkedError,
        SessionRestoreFailedError,
        SessionStateError,
        SessionStateLostError,
        TierFaultError,
        TierFullError,
    )
    from vllm_omni_session_state.manager.manager import SessionStateManager
    from vllm_omni_session_state.offload.disk_tier import DiskTier
    from vllm_omni_session_state.offload.host_tier import HostTier
    from vllm_omni_session_state.state.buffers import EncodeOnceKV, LatentBuffer
    from vllm_omni_session_state.state.paged_kv import PagedKV
    from vllm_omni_session_state.state.session import Declaration, SessionAttr, SessionState
    from vllm_omni_session_state.state.state_object import StateObject

__version__ = "0.1.0"

_HOMES = {
    "Declaration": "state.session",
    "DiskTier": "offload.disk_tier",
    "EncodeOnceKV": "state.buffers",
    "HostTier": "offload.host_tier",
    "LatentBuffer": "state.buffers",
    "PagedKV": "state.paged_kv",
    "SessionAttr": "state.session",
    "SessionState": "state.session",
    "SessionStateManager": "manager.manager",
    "StateObject": "state.state_object",
}
"""The module of each public name but the errors, which are all in ``base.errors``."""

__all__ = [
    "AlreadyEncodedError",
    "BadFileError",
    "BadPayloadError",
    "BudgetFixedError",
    "CannotParkError",
    "Declaration",
    "DiskTier",
    "EncodeOnceKV",
    "EngineOwnedError",
    "HostTier",
    "IdentityMismatchError",
    "KVOccupiedError",
    "LatentBuffer",
    "LatentsUnreadableError",
    "MidChunkError",
    "NoRoomError",
    "NotAllocatedError",
    "NotWritableError",
    "NothingStagedError",
    "PagedKV",
    "PoolFullError",
    "SeamMismatchError",
    "SessionAttr",
    "SessionParkedError",
    "SessionRestoreFailedError",
    "SessionState",
    "SessionStateError",
    "SessionStateLostError",
    "SessionStateManager",
    "StateObject",
    "TierFaultError",
    "TierFullError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'base.errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Manager-backed session state for world models served by vLLM-Omni.

Importing this package needs neither vLLM nor torch: the names below are looked up when they are first
used (PEP 562), so that finding the plugin through its entry point costs nothing where the flag is off.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_omni_session_state.state.state_object import StateObject
    from vllm_omni_session_state.manager.manager import SessionStateManager
    from vllm_omni_session_state.state.buffers import LatentBuffer
    from vllm_omni_session_state.state.paged_kv import PagedKV
    from vllm_omni_session_state.state.session import SessionAttr, SessionState

__version__ = "0.1.0"

_HOMES = {
    "LatentBuffer": "objects",
    "PagedKV": "paged",
    "SessionAttr": "session",
    "SessionState": "session",
    "SessionStateManager": "manager",
    "StateObject": "contract",
}

__all__ = [
    "LatentBuffer",
    "PagedKV",
    "SessionAttr",
    "SessionState",
    "SessionStateManager",
    "StateObject",
    "__version__",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

"""The hook on the AR-Diffusion runner: what must happen outside its fail-closed scope.

The runner drops a session on any exception inside the scope of a forward. A restore that failed there
would destroy the session that it failed to read, so it happens before, where the runner looks for the
session. And the runner knows why it releases a session, which the pipeline is not told.

Patched on the class, once, and only where a pipeline has a manager; for any other pipeline both methods
are the host's.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_omni_session_state.losses import Reason
from vllm_omni_session_state.manager import SessionStateManager
from vllm_omni_session_state.omni import seams

_MARK = seams.MARK
_LOST = {"lru_eviction": Reason.KV_EVICTION, "forward_exception": Reason.FORWARD_EXCEPTION}


def hook_runner() -> None:
    """Wrap the runner's two methods; idempotent.

    Raises:
        SeamMismatchError: If they do not look as expected; nothing has changed.
    """
    from vllm_omni.experimental.ar_diffusion.runner import ARDiffusionModelRunner  # noqa: PLC0415

    if hasattr(ARDiffusionModelRunner._get_or_create_session, _MARK):
        return
    seams.check(ARDiffusionModelRunner, seams.RUNNER_SEAMS)
    _wrap(ARDiffusionModelRunner)


def _wrap(runner: Any) -> None:
    find, release = runner._get_or_create_session, runner._release_session

    @functools.wraps(find)
    def _get_or_create_session(self: Any, session_id: str) -> Any:
        manager = _manager_of(self)
        if manager is not None:
            manager.prepare(session_id)
        return find(self, session_id)

    @functools.wraps(release)
    def _release_session(self: Any, session_id: str, *, reason: str, **how: Any) -> None:
        manager = _manager_of(self)
        lost = _LOST.get(reason) if manager is not None and session_id in manager else None
        try:
            release(self, session_id, reason=reason, **how)
        finally:
            if manager is not None and lost is not None:
                manager.mark_lost(session_id, lost)

    setattr(_get_or_create_session, _MARK, True)
    runner._get_or_create_session = _get_or_create_session
    runner._release_session = _release_session


def _manager_of(runner: Any) -> SessionStateManager | None:
    manager = getattr(runner.pipeline, "_memory_manager", None)
    return manager if isinstance(manager, SessionStateManager) else None

"""The hook on the AR-Diffusion runner: what must happen outside its fail-closed scope.

The runner drops a session on any exception inside the scope of a forward. A restore that failed there
would destroy the session that it failed to read, so it happens before, where the runner looks for the
session. There is also where room is made in the pool, before the runner's own loop would drop somebody, and
where a session's KV joins what its manager knows of it. The session is pinned from there on: the forward's
lease takes the pin over, and one that no lease took is given back before vLLM-Omni drops the session. And
the runner knows why it releases a session, which the pipeline is not told. Where it makes its KV pool, the
ranks of a model agree how they go on.

Patched on the class, once, and only where a pipeline has a manager; for any other pipeline the methods are
vLLM-Omni's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from vllm_omni_session_state.base.errors import SeamMismatchError
from vllm_omni_session_state.base.log import tried
from vllm_omni_session_state.manager.losses import Reason
from vllm_omni_session_state.manager.manager import SessionStateManager
from vllm_omni_session_state.omni.hooks import patching, seams
from vllm_omni_session_state.omni.worker import agreement, engine_kv
from vllm_omni_session_state.state.session import SessionState

_LOST = {"lru_eviction": Reason.KV_EVICTION, "forward_exception": Reason.FORWARD_EXCEPTION}


def hook_runner() -> bool:
    """Wrap the runner's methods; idempotent.

    Returns:
        Whether also the one in which ranks agree when a model is loaded.

    Raises:
        SeamMismatchError: If they do not look as expected; nothing has changed.
    """
    from vllm_omni.experimental.ar_diffusion.runner import ARDiffusionModelRunner  # noqa: PLC0415

    seams.check(ARDiffusionModelRunner, seams.RUNNER_SEAMS)
    for around in (_get_or_create_session, _bound_ar_session, _release_session):
        patching.wrap(ARDiffusionModelRunner, around.__name__, around)
    try:
        seams.check(ARDiffusionModelRunner, seams.SIZING_SEAMS)
    except SeamMismatchError as error:
        agreement.say_host_sizes(error)
        return False
    patching.wrap(ARDiffusionModelRunner, "_preallocate_kv_cache", _preallocate_kv_cache)
    return True


def _get_or_create_session(original: Callable[..., Any], self: Any, session_id: str) -> Any:
    manager = _manager_of(self)
    if manager is None:
        return original(self, session_id)
    if manager.kv_slots is None:
        agreement.take_pool(self, manager)
    pin = manager.prepare(session_id)  # the forward's lease takes it over
    session = None if pin is None else pin.session
    try:
        if session is not None and session.empty and session_id in self._sessions:
            # A new session, and the engine has KV of one that was lost under its id.
            self._sessions.pop(session_id).close()
        state = original(self, session_id)
        # An engine that looks otherwise keeps its KV to itself.
        tried(lambda: _join(self, session, state), "engine KV is neither counted nor parked")
    except BaseException:
        manager.give_back(session_id)
        raise
    return state


@contextlib.contextmanager
def _bound_ar_session(original: Callable[..., Any], self: Any, session_id: str, **how: Any) -> Iterator[None]:
    try:
        with original(self, session_id, **how):
            yield
    finally:
        if (manager := _manager_of(self)) is not None:
            manager.give_back(session_id)


def _release_session(
    original: Callable[..., Any], self: Any, session_id: str, *, reason: str, **how: Any
) -> None:
    manager = _manager_of(self)
    lost = _LOST.get(reason) if manager is not None and session_id in manager else None
    if manager is not None:
        manager.give_back(session_id)  # while it is pinned, a drop of it would wait
    try:
        original(self, session_id, reason=reason, **how)
    finally:
        if manager is not None and lost is not None:
            manager.mark_lost(session_id, lost)


def _preallocate_kv_cache(
    original: Callable[..., Any], self: Any, *, available_bytes: int | None = None
) -> None:
    agreement.preallocate(self, functools.partial(original, self), available_bytes)


def _join(runner: Any, session: SessionState | None, state: Any) -> None:
    if session is not None:
        engine_kv.join(session, state, runner._sessions)


def _manager_of(runner: Any) -> SessionStateManager | None:
    manager = getattr(runner.pipeline, "_memory_manager", None)
    return manager if isinstance(manager, SessionStateManager) else None

"""The hook on the worker's sleep: session state leaves the device before the host frees its own memory.

The host's sleep frees what its allocator keeps in pools, and a session's tensors are in none of them. What
is parked comes back at the session's next lease, which is after the wake-up. Engine KV is the host's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from vllm_omni_session_state.errors import CannotParkError
from vllm_omni_session_state.events import LOGGER, say_once
from vllm_omni_session_state.manager import SessionStateManager
from vllm_omni_session_state.omni import seams


def hook_sleep(worker: type, manager_of: Callable[[Any], SessionStateManager | None]) -> None:
    """Wrap ``sleep`` of the host's worker class; idempotent.

    Args:
        worker: The class.
        manager_of: The manager of a worker's model, if it has one.

    Raises:
        SeamMismatchError: If it does not look as expected; nothing has changed.
    """
    host = getattr(worker, "sleep", None)
    if hasattr(host, seams.MARK):
        return
    seams.check(worker, seams.SLEEP_SEAMS)
    assert host is not None, "as just checked"

    @functools.wraps(host)
    def sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
        manager = manager_of(self)
        if manager is not None:
            leave_device(manager)
        return host(self, *args, **kwargs)

    setattr(sleep, seams.MARK, True)
    worker.sleep = sleep  # type: ignore[attr-defined]


def leave_device(manager: SessionStateManager) -> None:
    """Park every session that nobody uses; what stays is said. Never raises."""
    try:
        if not manager.cascade:
            if len(manager):
                say_once(
                    logging.WARNING,
                    ("sleep",),
                    "the worker sleeps and its sessions stay on the device: there is nowhere to park them; "
                    "set host_budget, or disk.path and disk.budget",
                )
            return
        refused = []
        for key in manager.keys():  # noqa: SIM118 - a manager is no mapping
            try:
                manager.park(key)
            except CannotParkError as error:  # noqa: PERF203 - one that stays keeps no other from going
                refused.append(error)
        LOGGER.info("the worker sleeps: %d sessions are parked", manager.stats()["parked_sessions"])
        if refused:
            LOGGER.warning("the worker sleeps, %d sessions stay on the device: %s", len(refused), refused[0])
    except Exception as error:  # noqa: BLE001 - a hook never breaks serving
        LOGGER.warning("the worker sleeps, and its sessions stay where they are: %s", error)

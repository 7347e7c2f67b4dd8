"""The hooks on the worker's sleep and its shutdown: what session state does before vLLM-Omni's own.

vLLM-Omni's sleep frees what its allocator keeps in pools, and a session's tensors are in none of them. What
is parked, engine KV with the rest, comes back at the session's next lease, which is after the wake-up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from vllm_omni_session_state.base.errors import CannotParkError, error_text, without_frames
from vllm_omni_session_state.base.log import LOGGER, log_once
from vllm_omni_session_state.manager.manager import SessionStateManager
from vllm_omni_session_state.omni.hooks import patching, seams

WAIT_S = 10.0
"""Seconds for which all sessions that are on their way are waited for: whoever moves one may be gone."""

ManagerOf = Callable[[Any], SessionStateManager | None]


def hook_sleep(worker: type, manager_of: ManagerOf) -> None:
    """Have every session leave the device before vLLM-Omni's worker sleeps; idempotent.

    Raises:
        SeamMismatchError: If the worker's class does not look as expected; nothing has changed.
    """
    _before(worker, seams.SLEEP_SEAM, leave_device, manager_of)


def hook_shutdown(worker: type, manager_of: ManagerOf) -> None:
    """Have the disk tier closed before vLLM-Omni's worker shuts down. See ``hook_sleep()``."""
    _before(worker, seams.SHUTDOWN_SEAM, leave_process, manager_of)


def _before(
    worker: type, seam: seams.Seam, act: Callable[[SessionStateManager], None], manager_of: ManagerOf
) -> None:
    def method(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        manager = manager_of(self)
        if manager is not None:
            act(manager)
        return original(self, *args, **kwargs)

    seams.check(worker, (seam,))
    patching.wrap(worker, seam.name, method)


def leave_device(manager: SessionStateManager) -> None:
    """Park every session that nobody uses; what stays is said. Never raises."""
    try:
        if not manager.has_tier:
            if len(manager):
                log_once(
                    logging.WARNING,
                    ("sleep",),
                    "the worker sleeps and its sessions stay on the device: there is nowhere to park them; "
                    "set host_budget, or disk.path and disk.budget",
                )
            return
        refused = _park_all(manager)
        LOGGER.info("the worker sleeps: %d sessions are parked", manager.stats()["parked_sessions"])
        if refused:
            LOGGER.warning("the worker sleeps, %d sessions stay on the device: %s", len(refused), refused[0])
    except Exception as error:  # noqa: BLE001 - a hook never breaks serving
        LOGGER.warning("the worker sleeps, and its sessions stay where they are: %s", error)


def leave_process(manager: SessionStateManager) -> None:
    """Leave nothing on the disk, or all sessions where they are to be kept.

    Nothing of its own is raised. What stops the process meanwhile goes on once the disk is closed: vLLM-Omni
    turns the signal that ends a worker's time for its shutdown into ``SystemExit``, and would have to kill a
    worker that took no notice.
    """
    manager.watch.close()
    disk = manager.disk
    if disk is None or disk.closed:
        return
    try:
        if disk.keep:
            _keep_all(manager)
    except Exception as error:  # noqa: BLE001 - a hook never breaks serving
        LOGGER.warning("what is parked on the disk stays there: %s", error_text(error))
    except BaseException as stop:
        kept, name = manager.stats()["disk_sessions"], type(stop).__name__
        LOGGER.warning("%s while sessions are written: %d of %d are kept", name, kept, len(manager))
        raise
    finally:
        try:
            disk.close()
        except Exception as error:  # noqa: BLE001 - as above
            LOGGER.warning("%s. The next worker that starts there cleans it", error)


def _keep_all(manager: SessionStateManager) -> None:
    """Bring all sessions to the disk, as far as that goes."""
    refused = _park_all(manager)
    manager.flush_to_disk()
    kept = manager.stats()["disk_sessions"]
    LOGGER.info("the worker shuts down: %d of %d sessions are on the disk", kept, len(manager))
    if refused:
        LOGGER.warning("%d sessions are not kept: %s", len(refused), refused[0])


def _park_all(manager: SessionStateManager) -> list[Exception]:
    """Park every session that nobody uses; what kept those that stay, refusals first.

    For all that are on their way together it waits `WAIT_S` at most.
    """
    refused: list[Exception] = []
    until = time.monotonic() + WAIT_S
    for key in manager.keys():  # noqa: SIM118 - a manager is no mapping
        try:
            manager.park(key, until=until)
        except Exception as error:  # noqa: BLE001, PERF203 - one that stays keeps no other from going
            refused.append(without_frames(error))
    return sorted(refused, key=lambda error: not isinstance(error, CannotParkError))

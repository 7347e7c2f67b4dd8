"""What the ranks of a model agree on when it is loaded: who keeps session state, where, and how much.

Each of these could go otherwise on one rank: an adapter fails there, a folder cannot be opened, somebody else
has some of the device's memory. Then sessions would be elsewhere on that rank, and a forward would wait for
it. So each rank tells what came of it, whatever that was, and all take the same way.

They meet where the engine makes its KV pool. Every rank comes there once a load, however often its loader had
to begin anew.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_session_state.adapters.patches import Patches
from vllm_omni_session_state.base.errors import SeamMismatchError, TierFaultError, error_text
from vllm_omni_session_state.base.log import LOGGER, log_once
from vllm_omni_session_state.manager.consensus import AllGather, failures, gather_status
from vllm_omni_session_state.manager.manager import SessionStateManager
from vllm_omni_session_state.omni.worker import budgets, engine_kv, kv_sizing, ranks
from vllm_omni_session_state.omni.worker.lifecycle import leave_process


@dataclass(slots=True, eq=False)
class Load:
    """One pipeline whose settings ask for a manager, and what came of that on this rank.

    Attributes:
        od_config: vLLM-Omni's configuration that it was loaded from.
        pipeline: The pipeline; whoever loaded it holds it.
        manager: Its manager, which it holds.
        patches: What was set on it.
        terms: What was asked for, one line; the same on all ranks.
        failed: Why it has no manager.
        no_disk: Why it has no disk tier although one is asked for.
        sizes_pool: Whether the device budget decides how large the engine's KV pool is.
    """

    od_config: object
    pipeline: weakref.ref[Any]
    manager: weakref.ref[SessionStateManager] | None = None
    patches: Patches = field(default_factory=Patches)
    terms: str = ""
    failed: str = ""
    no_disk: str = ""
    sizes_pool: bool = False


loads: list[Load] = []
"""Of this process, the latest one last."""


class RunnerPool:
    """The places of a runner's KV pool, as the manager asks for them.

    Args:
        runner: Held weakly: it holds the pipeline, which reaches the manager.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = weakref.ref(runner)

    @property
    def places(self) -> int:
        """Sessions that it has room for."""
        runner = self._runner()
        return 0 if runner is None else int(runner._session_capacity)

    def holds(self, key: str) -> bool:
        """Whether it has KV of a session."""
        runner = self._runner()
        return runner is not None and key in runner._sessions

    def has_place(self, key: str) -> bool:
        """Whether a session has a place or can have one now."""
        runner = self._runner()
        return runner is None or self.holds(key) or len(runner._sessions) < runner._session_capacity


def preallocate(runner: Any, original: Callable[..., None], available_bytes: int | None) -> None:
    """vLLM-Omni's ``_preallocate_kv_cache``, after which all ranks have the same sessions in the same places.

    Args:
        runner: vLLM-Omni's, with its pipeline loaded.
        original: vLLM-Omni's own method, bound.
        available_bytes: As vLLM-Omni gives it.
    """
    load = next((load for load in reversed(loads) if load.pipeline() is runner.pipeline), None)
    manager = None if load is None else _managed_together(load)
    if load is None or manager is None:
        original(available_bytes=available_bytes)
        return
    reserved, failed = None, ""
    try:
        if load.sizes_pool:
            reserved = _sized_together(runner, manager, original, available_bytes)
        if reserved is None:
            original(available_bytes=available_bytes)
    except BaseException as error:
        failed = error_text(error)
        raise
    finally:
        take_pool(runner, manager, failed=failed)
    if reserved is not None:
        LOGGER.info(
            "the engine's pool has room for the KV of %d sessions; %d bytes are reserved for the rest of "
            "them",
            runner._session_capacity,
            reserved,
        )


def take_pool(runner: Any, manager: SessionStateManager, *, failed: str = "") -> None:
    """Have the manager count with the places of the runner's pool, as many as the smallest one has.

    It does so also where nothing is parked: else the engine would drop its oldest session on one rank alone.

    Args:
        runner: vLLM-Omni's.
        manager: Of its pipeline.
        failed: Why this rank has no pool.
    """
    mine = "0 0"
    try:
        mine = mine if failed else f"{runner._session_capacity} {_kv_nbytes(runner)}"
    except Exception as error:  # noqa: BLE001 - the others wait
        failed = error_text(error)
    try:
        words = gather_status(_exchange(), "KV pool", mine, failed)
        reasons = failures(words)
    except Exception as error:  # noqa: BLE001 - a rank is gone; without it no forward ends well
        reasons = f"the ranks cannot be asked: {error}"
    if reasons:
        LOGGER.warning("the ranks have not agreed how many sessions the engine's KV pool holds: %s", reasons)
        return
    places, nbytes = zip(*(map(int, word.said.split()) for word in words), strict=True)
    if runner._session_capacity > min(places):
        LOGGER.info(
            "the engine's pool has room for the KV of %d sessions; of %s on the ranks, the fewest count",
            runner._session_capacity,
            ", ".join(map(str, places)),
        )
    runner._session_capacity = min(places)
    manager.use_kv_slots(RunnerPool(runner), nbytes=max(nbytes))
    budgets.say(budgets.too_small(manager))


def say_host_sizes(why: object) -> None:
    """Say that the pool is as vLLM-Omni plans it, although it should not be."""
    log_once(logging.WARNING, ("sizing",), "the engine's KV pool is as large as without the plugin: %s", why)


def _managed_together(load: Load) -> SessionStateManager | None:
    """The manager of a load, where all ranks have one."""
    reasons = _reasons("session state", load.terms, load.failed)
    manager = None if load.manager is None else load.manager()
    if reasons or manager is None:
        pipeline = load.pipeline()
        name = type(pipeline).__qualname__
        log_once(
            logging.WARNING,
            ("attach", name),
            "%s keeps its own session state: %s. It serves as without the plugin",
            name,
            reasons,
        )
        load.patches.undo()
        if manager is not None:
            leave_process(manager)
        return None
    load.patches.forget()
    reasons = _reasons("disk tier", failed=load.no_disk)
    if reasons:
        _leave_disk(load, manager, reasons)
    return manager


def _leave_disk(load: Load, manager: SessionStateManager, why: str) -> None:
    """Park nothing on the disk, since one of the ranks cannot."""
    disk = manager.leave_disk()
    load.sizes_pool &= manager.has_tier
    if disk is not None:
        with contextlib.suppress(TierFaultError):  # the next worker that starts there cleans
            disk.close()
    budgets.say([budgets.no_disk(why)])


def _sized_together(
    runner: Any, manager: SessionStateManager, original: Callable[..., None], available_bytes: int | None
) -> int | None:
    """Make the pool that the device budget leaves room for, on all ranks or on none.

    Returns:
        What is reserved for the rest of the sessions, in bytes; ``None`` if it was not made.
    """
    failed, reserved = "", None
    try:
        reserved = kv_sizing.preallocate(runner, manager, original, available_bytes)
    except Exception as error:  # noqa: BLE001 - a hook never breaks serving
        failed = error_text(error)
    except BaseException as error:
        _reasons("sizing", failed=error_text(error))
        raise
    reasons = _reasons("sizing", failed=failed)
    if reasons:
        runner.kv_cache = None  # vLLM-Omni makes another one, and there may be no room for both
        _give_back()
        say_host_sizes(reasons)
        return None
    manager.fix_device_budget()
    return reserved


def _give_back() -> None:
    from vllm_omni.platforms import current_omni_platform  # noqa: PLC0415

    gc.collect()
    current_omni_platform.empty_cache()


def _reasons(about: str, said: str = "", failed: str = "") -> str:
    """What went wrong on any rank, or in what they differ; the same on all of them, ``""`` for nothing."""
    try:
        words = gather_status(_exchange(), about, said, failed)
    except Exception as error:  # noqa: BLE001 - a rank is gone, and nothing is served without it
        return f"the ranks cannot be asked: {error}"
    if reasons := failures(words):
        return reasons
    if len({word.said for word in words}) > 1:
        return "; ".join(f"rank {rank}: {word.said}" for rank, word in enumerate(words))
    return ""


def _exchange() -> AllGather | None:
    try:
        return ranks.exchange()
    except SeamMismatchError:
        return None  # on no rank, and each has said so


def _kv_nbytes(runner: Any) -> int:
    """KV of one session at most; none of an engine whose KV is not parked."""
    try:
        return engine_kv.most_nbytes(runner.kv_cache)
    except SeamMismatchError:
        return 0  # said when a session should hold it

"""From a loaded pipeline to manager-backed session state, or to one line that says why not."""

from __future__ import annotations

import importlib
import logging
import os
import weakref
from typing import TYPE_CHECKING

from vllm_omni_session_state.adapters import ADAPTERS
from vllm_omni_session_state.base import settings
from vllm_omni_session_state.base.errors import error_text
from vllm_omni_session_state.base.ids import show_in_the_clear
from vllm_omni_session_state.base.log import LOGGER, log_once
from vllm_omni_session_state.omni.worker import budgets

if TYPE_CHECKING:
    from vllm_omni_session_state.manager.consensus import AllGather
    from vllm_omni_session_state.omni.worker.agreement import Load
    from vllm_omni_session_state.omni.worker.budgets import Bounds

_NO_FIELD = object()


def attach(pipeline: object, od_config: object) -> None:
    """Give a freshly loaded pipeline manager-backed session state, if the settings ask for it.

    Whatever goes wrong is said in one WARNING per pipeline class, and the pipeline is left as it was
    loaded. It never raises.
    """
    try:
        _attach(pipeline, od_config)
    except Exception as error:  # noqa: BLE001 - a hook never breaks serving
        what = "%s keeps its own session state: %s. It serves as without the plugin"
        name = type(pipeline).__qualname__
        log_once(logging.WARNING, ("attach", name), what, name, error_text(error))


def _attach(pipeline: object, od_config: object) -> None:
    known = next((name for name in map(_dotted, type(pipeline).__mro__) if name in ADAPTERS), None)
    flag = getattr(od_config, settings.FLAG, _NO_FIELD)
    if flag is _NO_FIELD and known is not None:
        log_once(
            logging.WARNING,
            ("no field",),
            "this vLLM-Omni's %s has no field %s: a deploy config cannot carry the flag; set %s=1 instead",
            type(od_config).__name__,
            settings.FLAG,
            settings.ENV_FLAG,
        )
    chosen, complaints = settings.resolve(
        None if flag is _NO_FIELD else flag, os.environ, options=settings.options_of(od_config)
    )
    budgets.say(complaints)
    if not chosen.enabled:
        return
    if known is None:
        name = type(pipeline).__qualname__
        log_once(logging.INFO, ("no adapter", name), "%s has no session state that this plugin knows", name)
        return
    _give(pipeline, od_config, known, chosen)


def _give(pipeline: object, od_config: object, known: str, chosen: settings.Settings) -> None:
    # Imported here: these pull in torch, which a process that never turns the flag on need not pay for.
    from vllm_omni_session_state.omni.hooks import seams  # noqa: PLC0415
    from vllm_omni_session_state.omni.worker import agreement, ranks, runner  # noqa: PLC0415

    _end_earlier_loads(od_config)
    load = agreement.Load(od_config, weakref.ref(pipeline))
    agreement.loads.append(load)
    exchange = None
    try:
        owner = next(base for base in type(pipeline).__mro__ if _dotted(base) == known)
        seams.check(owner, seams.PIPELINE_SEAMS[known])
        apart, exchange = ranks.apart(od_config), ranks.exchange()
        several_ranks = exchange is not None
        if known not in seams.RUNNER_PIPELINES:
            exchange = None  # its sessions end with their calls: there is nothing to agree on
        elif not runner.hook_runner() and several_ranks:
            apart = "this vLLM-Omni's ranks cannot agree on the engine's KV pool when it is made"
        bounds, ignored = budgets.bounds_of(chosen, several_ranks=several_ranks, apart=apart)
        budgets.say(ignored)
        _manage(pipeline, load, known, chosen, bounds=bounds, exchange=None if apart else exchange)
    except Exception as error:
        load.patches.undo()
        load.failed = error_text(error)
        raise
    finally:
        if exchange is None:
            load.patches.forget()  # no other rank can have it undone


def _manage(
    pipeline: object,
    load: Load,
    known: str,
    chosen: settings.Settings,
    *,
    bounds: Bounds,
    exchange: AllGather | None,
) -> None:
    """Make the manager and attach the adapter; what has failed here, the ranks tell each other later."""
    from vllm_omni_session_state.manager.manager import SessionStateManager  # noqa: PLC0415
    from vllm_omni_session_state.offload.host_tier import HostTier  # noqa: PLC0415
    from vllm_omni_session_state.omni.worker import rpc  # noqa: PLC0415

    adapter = importlib.import_module(f"vllm_omni_session_state.adapters.{ADAPTERS[known]}")
    disk, load.no_disk = budgets.disk_tier(bounds, keep=chosen.keep_on_exit)
    if load.no_disk and exchange is None:
        budgets.say([budgets.no_disk(load.no_disk)])
    manager = SessionStateManager(
        max_sessions=chosen.max_sessions,
        device_budget=bounds.device,
        tier=None if bounds.host is None else HostTier(budget=bounds.host),
        disk=disk,
        max_parked=chosen.max_parked,
        on_lost=chosen.on_lost,
        idle_drop_s=chosen.idle_drop_s,
        exchange=exchange,
    )
    has_budget = manager.has_tier and bounds.device is not None
    load.sizes_pool = has_budget and chosen.kv_pool == "budget"
    more = chosen.max_parked, chosen.on_lost, chosen.kv_pool, chosen.video_latents
    load.terms = f"{chosen.max_sessions} sessions, {bounds}, {more}"
    try:
        adapter.attach(pipeline, manager, load.patches, video_latents=chosen.video_latents)
        rpc.install()
    except BaseException:
        if disk is not None:
            disk.close()
        raise
    load.manager = weakref.ref(manager)
    budgets.say(budgets.too_small(manager))
    show_in_the_clear(chosen.show_ids)
    LOGGER.info(
        "session state manager (experimental) is on for %s: %d sessions are kept, %s",
        type(pipeline).__qualname__,
        chosen.max_sessions,
        bounds,
    )


def _end_earlier_loads(od_config: object) -> None:
    """Drop what an earlier load from the same configuration holds: its pipeline will not serve again."""
    from vllm_omni_session_state.omni.worker import agreement, lifecycle  # noqa: PLC0415

    for load in list(agreement.loads):
        if load.pipeline() is not None and load.od_config is not od_config:
            continue  # another model of this process
        agreement.loads.remove(load)
        manager = None if load.manager is None else load.manager()
        if manager is not None:
            dropped = manager.drop_all()
            lifecycle.leave_process(manager)
            LOGGER.warning("the model was loaded again: %d sessions of the earlier load are dropped", dropped)


def _dotted(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"

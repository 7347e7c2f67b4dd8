"""From a loaded pipeline to manager-backed session state, or to one line that says why not."""

from __future__ import annotations

import importlib
import logging
import os
import weakref
from dataclasses import dataclass

from vllm_omni_session_state import config
from vllm_omni_session_state.adapters import ADAPTERS
from vllm_omni_session_state.events import LOGGER, say_once
from vllm_omni_session_state.ids import show_in_the_clear

_NO_FIELD = object()


@dataclass(frozen=True, slots=True)
class _Load:
    """One pipeline that was given a manager: the configuration that it was loaded from, and the manager."""

    od_config: object
    manager: weakref.ref[object]


_loads: list[_Load] = []


def attach(pipeline: object, od_config: object) -> None:
    """Give a freshly loaded pipeline manager-backed session state, if the settings ask for it.

    Whatever goes wrong is said in one WARNING per pipeline class, and the pipeline is left as it was
    loaded. It never raises.

    Args:
        pipeline: What ``load_model`` returned.
        od_config: The host's configuration that it was loaded from.
    """
    try:
        _attach(pipeline, od_config)
    except Exception as error:  # noqa: BLE001 - a hook never breaks serving
        name = type(pipeline).__qualname__
        say_once(
            logging.WARNING,
            ("attach", name),
            "%s keeps its own session state: %s: %s. It serves as without the plugin",
            name,
            type(error).__name__,
            error,
        )


def _attach(pipeline: object, od_config: object) -> None:
    known = next((name for name in map(_dotted, type(pipeline).__mro__) if name in ADAPTERS), None)
    flag = getattr(od_config, config.FLAG, _NO_FIELD)
    if flag is _NO_FIELD and known is not None:
        say_once(
            logging.WARNING,
            ("no field",),
            "this vLLM-Omni's %s has no field %s: a deploy config cannot carry the flag; set %s=1 instead",
            type(od_config).__name__,
            config.FLAG,
            config.ENV_FLAG,
        )
    settings, complaints = config.resolve(
        None if flag is _NO_FIELD else flag, os.environ, options=config.options_of(od_config)
    )
    for complaint in complaints:
        say_once(logging.WARNING, ("complaint", complaint.setting, complaint.value), "%s", complaint)
    if not settings.enabled:
        return
    if known is None:
        name = type(pipeline).__qualname__
        say_once(logging.INFO, ("no adapter", name), "%s has no session state that this plugin knows", name)
        return
    _end_earlier_loads(od_config)
    _give(pipeline, od_config, known, settings)


def _give(pipeline: object, od_config: object, known: str, settings: config.Settings) -> None:
    # Imported here: these pull in torch, which a process that never turns the flag on need not pay for.
    from vllm_omni_session_state.adapters.patches import Patches  # noqa: PLC0415
    from vllm_omni_session_state.manager import SessionStateManager  # noqa: PLC0415
    from vllm_omni_session_state.omni import budgets, ranks, rpc, runner, seams  # noqa: PLC0415
    from vllm_omni_session_state.tiers.host import HostTier  # noqa: PLC0415

    owner = next(base for base in type(pipeline).__mro__ if _dotted(base) == known)
    seams.check(owner, seams.PIPELINE_SEAMS[known])
    if known in seams.RUNNER_PIPELINES:
        runner.hook_runner()
    adapter = importlib.import_module(f"vllm_omni_session_state.adapters.{ADAPTERS[known]}")
    exchange = ranks.exchange()
    bounds = budgets.bounds_of(settings, several_ranks=exchange is not None)
    disk = budgets.disk_tier(bounds, exchange, keep=settings.keep_on_exit)
    manager = SessionStateManager(
        max_sessions=settings.max_sessions,
        device_budget=bounds.device,
        tier=None if bounds.host is None else HostTier(budget=bounds.host),
        disk=disk,
        max_parked=settings.max_parked,
        on_lost=settings.on_lost,
        exchange=exchange,
    )
    has_budget = bool(manager.cascade) and bounds.device is not None
    manager.room.sizes_pool = has_budget and settings.kv_pool == "budget"
    patches = Patches()
    try:
        adapter.attach(pipeline, manager, patches, video_latents=settings.video_latents)
        rpc.install()
    except BaseException:
        patches.undo()
        if disk is not None:
            disk.close()
        raise
    show_in_the_clear(settings.show_ids)
    _loads.append(_Load(od_config, weakref.ref(manager)))
    LOGGER.info(
        "session state manager (experimental) is on for %s: %d sessions are kept, %s",
        type(pipeline).__qualname__,
        settings.max_sessions,
        bounds,
    )


def _end_earlier_loads(od_config: object) -> None:
    """Drop what an earlier load from the same configuration holds: its pipeline will not serve again."""
    from vllm_omni_session_state.manager import SessionStateManager  # noqa: PLC0415
    from vllm_omni_session_state.omni.sleep import leave_process  # noqa: PLC0415

    for load in list(_loads):
        manager = load.manager()
        if isinstance(manager, SessionStateManager) and load.od_config is not od_config:
            continue  # another model of this process
        _loads.remove(load)
        if isinstance(manager, SessionStateManager):
            dropped = manager.drop_all()
            leave_process(manager)
            LOGGER.warning("the model was loaded again: %d sessions of the earlier load are dropped", dropped)


def _dotted(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"

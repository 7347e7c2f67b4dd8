"""What can be asked of a worker by name: methods added to the host's diffusion worker class.

They are reached through the host's ``collective_rpc``, which runs them on every rank between two steps.
Each gathers what all ranks say over the host's CPU group and answers for all of them, as plain JSON-able
data; call them on all ranks at once, never on one. A rank that fails says so in its part of the answer:
nothing raises before the gather, so that no rank waits for one that will not come.

With several replicas of a stage the host asks each and hands back one answer a replica.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from vllm_omni_session_state.errors import SessionStateError
from vllm_omni_session_state.events import LOGGER, say_once
from vllm_omni_session_state.ids import shown
from vllm_omni_session_state.losses import Reason
from vllm_omni_session_state.manager import SessionStateManager
from vllm_omni_session_state.omni import inside, seams
from vllm_omni_session_state.omni.imports import when_imported
from vllm_omni_session_state.omni.sleep import hook_shutdown, hook_sleep

Answer = dict[str, Any]

_COUNTS = "_session_state_ends"
"""Attribute of a worker: how many ends arrived, by what came of them."""


def install() -> None:
    """Add the methods to the host's worker class. Idempotent; called once a manager is attached."""
    when_imported(seams.WORKER_MODULE, _add)


def _add(module: ModuleType) -> None:
    def methods() -> None:
        seams.check(module, seams.WORKER_SEAMS)
        for name, method in METHODS.items():
            setattr(module.DiffusionWorker, name, method)

    _tried(methods, "this worker cannot be asked about its sessions, and ends of sessions do not reach it")
    _tried(
        lambda: hook_sleep(module.DiffusionWorker, manager_of),
        "when this worker sleeps, its sessions stay on the device",
    )
    _tried(
        lambda: hook_shutdown(module.DiffusionWorker, manager_of),
        "when this worker shuts down, what is parked on the disk stays until the next one starts there",
    )


def _tried(hook: Callable[[], None], otherwise: str) -> None:
    try:
        hook()
    except Exception as error:  # noqa: BLE001 - a hook never breaks serving
        say_once(logging.WARNING, ("worker", otherwise), "%s: %s: %s", otherwise, type(error).__name__, error)


def stats(worker: Any) -> Answer:
    """The manager's figures, the runner's KV pool, and the ends that arrived here, by rank.

    Args:
        worker: The host's worker; as for all methods here, it is the ``self`` of the call.

    Returns:
        ``ranks``, one mapping each: ``rank``, ``ok``, then the figures or ``error``; and ``agree``,
        whether all ranks did well and count the same sessions and ends. Bytes may differ by rank.
    """

    def figures() -> Answer:
        manager = _manager(worker)
        return {
            "pid": os.getpid(),
            **manager.stats(),
            "bounds": manager.room.bounds(),
            "moves": manager.cascade.moves.figures(),
            "kv": inside.kv(worker.model_runner),
            "ends": dict(_counts(worker)),
        }

    return on_every_rank(
        figures, ("sessions", "parked_sessions", "hits", "misses", "evictions", "kv", "ends")
    )


def list_sessions(worker: Any) -> Answer:
    """Every session, least recently used first, with its bytes by device; listing refreshes nobody.

    Returns:
        As for ``stats``; each rank has ``sessions``, and ``only_kv``, the sessions of which nothing but
        engine KV is there. Ranks agree if they hold the same sessions in the same order.
    """

    def sessions() -> Answer:
        manager = _manager(worker)
        entries = [
            {key: value for key, value in dataclasses.asdict(entry).items() if key != "values"}
            for entry in manager.listing()
        ]
        only_kv = [shown(key) for key in inside.kv_sessions(worker.model_runner) if key not in manager]
        order = [entry["session"] for entry in entries]
        return {"sessions": entries, "only_kv": only_kv, "order": order}

    return on_every_rank(sessions, ("order", "only_kv"))


def inspect(worker: Any, name: str | None = None, *, only_id: bool = False) -> Answer:
    """One session with every value that it holds; looking refreshes nobody.

    Args:
        worker: The host's worker.
        name: Its id, or as a listing shows it.
        only_id: Take ``name`` for an id and nothing else.

    Returns:
        As for ``stats``; each rank has ``found``, and ``session`` or ``None``.
    """

    def look() -> Answer:
        manager = _manager(worker)
        key = inside.named(name, manager.keys(), only_id=only_id)
        wanted = None if key is None else shown(key)
        entry = next((entry for entry in manager.listing() if entry.session == wanted), None)
        return {"found": entry is not None, "session": None if entry is None else dataclasses.asdict(entry)}

    return on_every_rank(look, ("found",))


def holds(worker: Any, name: str | None = None, *, only_id: bool = False) -> Answer:
    """Whether the model's state of a session is there: each rank has ``found``. See ``inspect``."""

    def look() -> Answer:
        return {"found": inside.named(name, _manager(worker).keys(), only_id=only_id) is not None}

    return on_every_rank(look, ("found",))


def close(worker: Any, *names: str | None, only_id: bool = False, only_idle: bool = False) -> Answer:
    """End sessions and free all of them: the model's state and, where an engine keeps it, their KV.

    Args:
        worker: The host's worker.
        *names: Their ids, or as a listing shows them.
        only_id: Take a name for an id and nothing else.
        only_idle: Leave a session that is in use as it is.

    Returns:
        As for ``stats``; each rank has, one for each name, ``found``: whether there was such a session,
        ``used``: whether it was in use, and ``shown``: how it is shown, ``None`` where there is none.
    """
    return _end(worker, "close", names, only_id=only_id, only_idle=only_idle)


def reset(worker: Any, *names: str | None, only_id: bool = False, only_idle: bool = False) -> Answer:
    """Free what sessions hold so that their next steps start anew, by the host's own reset. See ``close``."""
    return _end(worker, "reset", names, only_id=only_id, only_idle=only_idle)


def park(worker: Any, *names: str | None, only_id: bool = False) -> Answer:
    """Park sessions that nobody uses. See ``close``.

    Returns:
        As for ``close``; each rank has ``parked`` too: for each name, whether it is parked now. A rank on
        which one of them could not be parked is not ``ok``, and the others of its names are parked.
    """

    def park_all() -> Answer:
        manager = _manager(worker)
        named = inside.who(manager, names, manager.keys(), only_id=only_id)
        return {**named, "parked": _each(names, manager.keys(), manager.park, only_id=only_id)}

    return on_every_rank(park_all, ("found", "used", "parked"))


def restore(worker: Any, *names: str | None, only_id: bool = False) -> Answer:
    """Bring parked sessions back to the device. See ``close``; one that is in use is there already.

    Returns:
        As for ``close``; each rank has ``restored`` too: for each name, whether it is on the device now.
        One for which the budget has no room is parked again.
    """

    def restore_all() -> Answer:
        manager = _manager(worker)

        named = inside.who(manager, names, manager.keys(), only_id=only_id)
        return {**named, "restored": _each(names, manager.keys(), manager.restore, only_id=only_id)}

    return on_every_rank(restore_all, ("found", "used", "restored"))


def begin_restore(worker: Any, *names: str | None, only_id: bool = False) -> Answer:
    """Read sessions that are parked on the disk into host memory, in the background. See ``close``.

    Returns:
        As for ``stats``; each rank has ``begun``: for each name, whether it is being read.
    """

    def begin_all() -> Answer:
        manager = _manager(worker)
        return {"begun": _each(names, manager.keys(), manager.begin_restore, only_id=only_id)}

    return on_every_rank(begin_all, ("begun",))


def expire(worker: Any, *names: str | None, only_id: bool = False) -> Answer:
    """End sessions that are parked, as ``close`` does, and count them as lost. See ``close``.

    Returns:
        As for ``stats``; each rank has ``gone``: for each name, whether there is no such session now. One
        that is on the device stays.
    """

    def expire_all() -> Answer:
        manager, runner = _manager(worker), worker.model_runner

        def end(key: str) -> bool:
            session = manager.peek(key)
            if session is not None and session.parked:
                _end_one(manager, runner, "close", key)
                manager.mark_lost(key, Reason.EXPIRED)
            return key not in manager

        keys = manager.keys()
        there = _each(names, keys, end, only_id=only_id)
        known = [inside.named(name, keys, only_id=only_id) is not None for name in names]
        return {"gone": [gone or not was for gone, was in zip(there, known, strict=True)]}

    return on_every_rank(expire_all, ("gone",))


METHODS: dict[str, Callable[..., Answer]] = {
    "session_state_stats": stats,
    "session_state_list": list_sessions,
    "session_state_inspect": inspect,
    "session_state_holds": holds,
    "session_state_close": close,
    "session_state_reset": reset,
    "session_state_park": park,
    "session_state_restore": restore,
    "session_state_begin_restore": begin_restore,
    "session_state_expire": expire,
}
"""By the name under which the worker class has them."""


def _end(worker: Any, how: str, names: tuple[str | None, ...], *, only_id: bool, only_idle: bool) -> Answer:
    def end_all() -> Answer:
        manager, runner, counts = _manager(worker), worker.model_runner, _counts(worker)
        keys = {*manager.keys(), *inside.kv_sessions(runner)}
        named = inside.who(manager, names, keys, only_id=only_id)

        def end(key: str) -> bool:
            if not (only_idle and manager.used(key)):
                counts[how] += 1
                _end_one(manager, runner, how, key)
            return True

        counts["absent"] += named["found"].count(False)
        return {**named, "found": _each(names, keys, end, only_id=only_id)}

    return on_every_rank(end_all, ("found", "used"))


def _each(
    names: tuple[str | None, ...], keys: Iterable[str], act: Callable[[str], bool], *, only_id: bool
) -> list[bool]:
    """What ``act`` answers for each session that is named; false for one that is not there.

    Raises:
        SessionStateError: If sessions refused it; it was called for the others all the same.
        RuntimeError: If it failed for any in another way.
    """
    answers, failures, there, refused = [], [], list(keys), True
    for name in names:
        key = inside.named(name, there, only_id=only_id)
        try:
            answers.append(key is not None and act(key))
        except Exception as error:  # noqa: BLE001 - the others shall be done all the same
            failures.append(f"{type(error).__name__}: {error}")
            refused = refused and isinstance(error, SessionStateError)
    if failures:
        raise (SessionStateError if refused else RuntimeError)("; ".join(failures))
    return answers


def _end_one(manager: SessionStateManager, runner: Any, how: str, key: str) -> None:
    # The runner's own way where it has one: it frees the engine's KV and has the pipeline end the rest.
    of_runner = getattr(runner, f"{how}_session", None)
    try:
        if callable(of_runner):
            of_runner(key)
    finally:
        manager.drop_session(key)


def on_every_rank(work: Callable[[], Answer], agree_on: tuple[str, ...]) -> Answer:
    """Do something on each rank that calls this at once, and answer for all of them. It never raises.

    Args:
        work: What it is; its answer is plain JSON-able data.
        agree_on: Names of that in which all ranks should say the same.

    Returns:
        ``ranks``, one mapping each, and ``agree``; see ``stats``.
    """
    try:
        mine = {"ok": True, **work()}
    except Exception as error:  # noqa: BLE001 - the others are waiting in the gather
        LOGGER.exception("a session state call failed on this rank")
        refused = isinstance(error, SessionStateError)
        mine = {"ok": False, "error": f"{type(error).__name__}: {error}", "refused": refused}
    ranks = [{"rank": rank, **answer} for rank, answer in enumerate(_gather(mine))]
    views = [[answer.get(name) for name in agree_on] for answer in ranks]
    agree = all(answer["ok"] for answer in ranks) and all(view == views[0] for view in views)
    return {"agree": agree, "ranks": ranks}


def _gather(mine: Answer) -> list[Answer]:
    from vllm_omni.diffusion.worker.diffusion_worker import _all_gather_rank_values  # noqa: PLC0415

    values: list[Answer] = _all_gather_rank_values(mine)
    return values


def _manager(worker: Any) -> SessionStateManager:
    manager = manager_of(worker)
    if manager is None:
        pipeline = type(getattr(worker.model_runner, "pipeline", None)).__qualname__
        raise TypeError(f"{pipeline} keeps its own session state; see this worker's log for why")
    return manager


def manager_of(worker: Any) -> SessionStateManager | None:
    """The manager of a worker's model; ``None`` where that keeps its own session state."""
    pipeline = getattr(getattr(worker, "model_runner", None), "pipeline", None)
    manager = getattr(pipeline, "_memory_manager", None)
    return manager if isinstance(manager, SessionStateManager) else None


def _counts(worker: Any) -> dict[str, int]:
    counts: dict[str, int] = vars(worker).setdefault(_COUNTS, {"close": 0, "reset": 0, "absent": 0})
    return counts

"""What can be asked of a worker by name: methods added to vLLM-Omni's diffusion worker class.

They are reached through vLLM-Omni's ``collective_rpc``, which runs them on every rank between two steps.
Each gathers what all ranks say over vLLM-Omni's CPU group and answers for all of them, as plain JSON-able
data; call them on all ranks at once, never on one. A rank that fails says so in its part of the answer:
nothing raises before the gather, so that no rank waits for one that will not come.
With several replicas of a stage vLLM-Omni asks each and hands back one answer a replica.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from vllm_omni_session_state.base.ids import digest, display_id
from vllm_omni_session_state.base.log import log_failure, tried
from vllm_omni_session_state.manager.losses import Reason
from vllm_omni_session_state.manager.manager import SessionStateManager
from vllm_omni_session_state.omni.hooks import seams
from vllm_omni_session_state.omni.hooks.import_hook import when_imported
from vllm_omni_session_state.omni.worker import engine_view, publisher
from vllm_omni_session_state.omni.worker.lifecycle import hook_shutdown, hook_sleep
from vllm_omni_session_state.omni.worker.per_name import PerName, about

Answer = dict[str, Any]

_COUNTS = "_session_state_ends"
"""Attribute of a worker: how many ends arrived, by what came of them."""


def install() -> None:
    """Add the methods to vLLM-Omni's worker class. Idempotent; called once a manager is attached."""
    when_imported(seams.WORKER_MODULE, _add)


def _add(module: ModuleType) -> None:
    def methods() -> None:
        seams.check(module, seams.WORKER_SEAMS)
        for name, method in METHODS.items():
            setattr(module.DiffusionWorker, name, method)

    tried(methods, "this worker cannot be asked about its sessions, and ends of sessions do not reach it")
    tried(
        lambda: hook_sleep(module.DiffusionWorker, manager_of),
        "when this worker sleeps, its sessions stay on the device",
    )
    tried(
        lambda: hook_shutdown(module.DiffusionWorker, manager_of),
        "when this worker shuts down, what is parked on the disk stays until the next one starts there",
    )


def stats(worker: Any) -> Answer:
    """The manager's figures, the runner's KV pool, and the ends that arrived here, by rank.

    Args:
        worker: vLLM-Omni's worker; as for all methods here, it is the ``self`` of the call.

    Returns:
        ``ranks``, one mapping each: ``rank``, ``ok``, then the figures or ``error``; and ``agree``,
        whether all ranks did well and count the same sessions and ends. Bytes and blocks may differ.
    """
    return on_every_rank(
        lambda: engine_view.all_figures(_manager(worker), worker.model_runner, _counts(worker)),
        engine_view.AGREED,
    )


def publish_figures(worker: Any) -> Answer:
    """Begin to write figures and rows to a file, see ``publish``; both as they are now, and where.

    Returns:
        As for ``stats``; each rank has ``rows`` too, the path of the ``file``, or ``None``, and ``order``, in
        which ranks agree as well.
    """
    return on_every_rank(
        lambda: publisher.answer(worker, _manager(worker), _counts(worker)), (*engine_view.AGREED, "order")
    )


def list_sessions(worker: Any) -> Answer:
    """Every session, least recently used first, with its bytes by device; listing refreshes nobody.

    Returns:
        As for ``stats``; each rank has ``sessions``, and ``only_kv``, the sessions of which nothing but
        engine KV is there. ``order`` tells all of them apart, in this order, also where two are shown alike.
        Ranks agree if they hold the same sessions in the same order.
    """

    def sessions() -> Answer:
        manager = _manager(worker)
        entries = [
            {key: value for key, value in dataclasses.asdict(entry).items() if key != "values"}
            for entry in manager.listing()
        ]
        only_kv = [key for key in engine_view.kv_sessions(worker.model_runner) if key not in manager]
        order = [*(entry["digest"] for entry in entries), *map(digest, only_kv)]
        return {"sessions": entries, "only_kv": [display_id(key) for key in only_kv], "order": order}

    return on_every_rank(sessions, ("order",))


def inspect(worker: Any, name: str | None = None, **only: bool) -> Answer:
    """One session with every value that it holds; looking refreshes nobody.

    Args:
        worker: vLLM-Omni's worker.
        name: Its id, or as a listing shows it.
        **only: As for ``close``.

    Returns:
        As for ``stats``; each rank has ``found``, and ``session`` or ``None``.
    """

    def look() -> Answer:
        manager = _manager(worker)
        key = PerName(manager, [name], manager.keys(), **only).one()
        entry = None if key is None else manager.inspect(key)
        return {"found": entry is not None, "session": None if entry is None else dataclasses.asdict(entry)}

    return on_every_rank(look, ("found",))


def holds(worker: Any, *names: str | None, **only: bool) -> Answer:
    """Whether the model's state of sessions is there: each rank has ``found`` for each. See ``close``.

    Returns:
        As for ``close``; each rank has ``lost`` too: for each name, whether that session was lost and its
        client does not know it yet.
    """

    def look() -> Answer:
        manager = _manager(worker)
        lost = [isinstance(name, str) and manager.has_lost(name) for name in names]
        return PerName(manager, names, manager.keys(), **only).answer(lost=lost)

    return on_every_rank(look, ("found",))


def close(worker: Any, *names: str | None, only_idle: bool = False, **only: bool) -> Answer:
    """End sessions and free all of them: the model's state and, where an engine keeps it, their KV.

    Args:
        worker: vLLM-Omni's worker.
        *names: Their ids, or as a listing shows them.
        only_idle: Leave a session that is in use as it is.
        **only: ``only_id`` takes a name for an id and nothing else, ``only_shown`` for an id only where no
            session could be shown like that.

    Returns:
        As for ``stats``; each rank has, one for each name, ``found``: whether there was such a session,
        ``used``: whether it was in use, ``shown``: how it is shown, ``None`` where there is none, and
        ``errors``: what went wrong with it, ``None`` where nothing did. A rank on which something did is
        not ``ok``, and has done the rest.
    """
    return _end(worker, "close", names, only_idle=only_idle, **only)


def reset(worker: Any, *names: str | None, only_idle: bool = False, **only: bool) -> Answer:
    """Free what sessions hold so that their next steps start anew, by vLLM-Omni's own reset. As ``close``."""
    return _end(worker, "reset", names, only_idle=only_idle, **only)


def park(worker: Any, *names: str | None, **only: bool) -> Answer:
    """Park sessions that nobody uses. See ``close``.

    Returns:
        As for ``close``; each rank has ``parked`` too: for each name, whether it is parked now.
    """
    return _move(worker, names, "park", "parked", "a session was not parked", **only)


def restore(worker: Any, *names: str | None, **only: bool) -> Answer:
    """Bring parked sessions back to the device. See ``close``; one that is in use is there already.

    Returns:
        As for ``close``; each rank has ``restored`` too: for each name, whether it is on the device now.
        One for which the budget has no room is parked again.
    """
    return _move(worker, names, "restore", "restored", "a session was not restored", meets=True, **only)


def begin_restore(worker: Any, *names: str | None, **only: bool) -> Answer:
    """Read sessions that are parked on the disk into host memory, in the background. See ``close``.

    Returns:
        As for ``close``; each rank has ``begun`` too: for each name, whether it is being read.
    """
    return _move(worker, names, "begin_restore", "begun", "a session was not read ahead", **only)


def mark_stale(worker: Any, *names: str | None, **only: bool) -> Answer:
    """Mark sessions that nobody has stepped for ``idle_drop_s``; without a name: say that one would be.

    Returns:
        As for ``close``; each rank has ``stale`` too: for each name, whether it is marked.
    """
    if (manager := manager_of(worker)) is not None:
        manager.expect_marks()
    return _move(worker, names, "mark_stale", "stale", "a session was not marked stale", **only)


def expire(worker: Any, *names: str | None, **only: bool) -> Answer:
    """End sessions that are parked, as ``close`` does, and count them as lost. See ``close``.

    Returns:
        As for ``close``; each rank has ``gone`` too: for each name, whether there is no such session now.
        One that is on the device stays.
    """

    def expire_all() -> Answer:
        manager, runner = _manager(worker), worker.model_runner
        named = PerName(manager, names, manager.keys(), **only)

        def end(key: str) -> bool:
            session = manager.peek(key)
            if session is not None and session.parked:
                _end_one(manager, runner, "close", key)
                manager.mark_lost(key, Reason.EXPIRED)
            return key not in manager

        ended = named.each(end, what="a session did not expire")
        gone = [ended_now or key is None for ended_now, key in zip(ended, named.keys, strict=True)]
        return named.answer(gone=gone)

    return on_every_rank(expire_all, ("gone",))


_METHODS: dict[str, Callable[..., Answer]] = {
    "session_state_figures": publish_figures,
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
    "session_state_mark_stale": mark_stale,
}
METHODS = {name: publisher.after(method) for name, method in _METHODS.items()}
"""By the name under which the worker class has them."""


def _end(worker: Any, how: str, names: Iterable[str | None], *, only_idle: bool, **only: bool) -> Answer:
    def end_all() -> Answer:
        manager, runner, counts = _manager(worker), worker.model_runner, _counts(worker)
        named = PerName(manager, names, (*manager.keys(), *engine_view.kv_sessions(runner)), **only)

        def end(key: str) -> bool:
            if not (only_idle and manager.used(key)):
                counts[how] += 1
                _end_one(manager, runner, how, key)
            return True

        counts["absent"] += named.absent
        named.each(end, what=f"the {how} of a session failed")
        return named.answer()

    return on_every_rank(end_all, ("found", "used"))


def _move(
    worker: Any,
    names: Iterable[str | None],
    move: str,
    word: str,
    what: str,
    *,
    meets: bool = False,
    **only: bool,
) -> Answer:
    def move_all() -> Answer:
        manager = _manager(worker)
        named = PerName(manager, names, manager.keys(), **only)
        done = named.each(getattr(manager, move), what=what, meets=meets)
        return named.answer(**{word: done})

    return on_every_rank(move_all, ("found", "used", word))


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
        log_failure("a session state call failed on this rank", error)
        mine = {"ok": False, **about(error)}
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

"""What one rank of a replica says of its sessions: what stands in its file, else what it last answered."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_omni_session_state.base.log import LOGGER
from vllm_omni_session_state.manager.move_stats import MoveStats
from vllm_omni_session_state.manager.rows import Row
from vllm_omni_session_state.omni.stats_file.layout import UnreadableError
from vllm_omni_session_state.omni.stats_file.place import WorkerFile

STALE_S = 5.0
"""A file that could not be read for so long is none: its rank is asked."""

GONE = "WorkerGoneError: the worker process is gone"


@dataclass(frozen=True, slots=True)
class Reading:
    """What was seen of one rank.

    Attributes:
        rank: As a rank answers ``session_state_figures``; ``rows`` only where they were asked for. If it
            has a file, there is ``unchanged_s`` too: seconds since it last wrote.
        at: When that was so, by ``time.monotonic()``.
        steps: By the number of a step a digest of that in which all ranks must agree; ``None`` where no file
            has them.
    """

    rank: Mapping[str, Any]
    at: float
    steps: Mapping[int, int] | None = None


class StatsSource:
    """One rank, by its part of the answer to ``session_state_figures``.

    Attributes:
        gone: Whether its worker was found dead.
    """

    def __init__(self, answer: Mapping[str, Any]) -> None:
        rows = [Row(*row) for row in answer.get("rows", ())]
        self._answer = Reading({**answer, "rows": rows}, time.monotonic())
        self._last: dict[bool, Reading] = {}  # by whether the rows were read
        self._file: WorkerFile | None = None
        self.gone = False
        path = answer.get("file")
        try:
            self._file = None if path is None else WorkerFile(path)
        except OSError as error:  # its worker is on another machine
            LOGGER.debug("rank %s is asked for its figures: %s", answer.get("rank"), error)

    @property
    def filed(self) -> bool:
        """Whether there is a file to read, so that it need not be asked."""
        return self._file is not None

    def look(self, *, rows: bool) -> Reading:
        """What it says now, or said last. Never waits for a worker."""
        now, number = time.monotonic(), self._answer.rank["rank"]
        file = self._file
        if file is not None and not self.gone:
            try:
                found = file.read(rows=rows)
                _check(found.figures)
            except (UnreadableError, OSError) as error:
                last = self._last.get(rows, self._answer)
                if now - last.at > STALE_S:
                    LOGGER.debug("%s is not read any more: %s", file.path, error)
                    self._file = None
                return last
            self.gone = not file.alive
        if self.gone:
            return Reading({"rank": number, "ok": False, "error": GONE}, now)
        if file is None:
            return self._answer
        if found.stopped:
            self._file = None
        unchanged_s = max(0.0, time.time() - found.written)
        rank = {"rank": number, "ok": True, "unchanged_s": unchanged_s, **found.figures}
        if found.rows is not None:
            rank["rows"] = found.rows
        self._last[rows] = look = Reading(rank, now, found.steps)
        return look


_COUNTS = (
    *("sessions", "max_sessions", "used_sessions", "parked_sessions", "disk_sessions", "detached_sessions"),
    *("hits", "misses", "evictions", "parks", "restores", "restores_ahead", "pid"),
    *("total_nbytes", "shared_nbytes", "staged_nbytes", "detached_nbytes", "outside"),
    *("host_parked_nbytes", "disk_nbytes", "spilled_nbytes", "kept_nbytes", "ahead_nbytes", "unlisted"),
)
_OTHERS = ("bounds", "kv", "ends", "only_kv", "moves")
_MOVES = MoveStats().figures()
_MOST = 1 << 63


def _check(figures: Mapping[str, Any]) -> None:
    """Raise ``UnreadableError`` for figures that lack what is expected of them, or have what is no figure."""
    counts = {name: value for name, value in figures.items() if name not in _OTHERS}
    bounds, kv, ends, only_kv, moves = (figures.get(name) for name in _OTHERS)
    whole = (
        _are_counts(counts, _COUNTS)
        and _are_counts(bounds, ("max_parked",))
        and (kv is None or _are_counts(kv, ("blocks", "free")))
        and _are_counts(ends, ())
        and isinstance(only_kv, dict)
        and all(isinstance(name, str) for name in only_kv.values())
        and _is_like(_MOVES, moves)
    )
    if not whole:
        raise UnreadableError("its figures are of another kind")


def _are_counts(held: object, needed: Iterable[str]) -> bool:
    return (
        isinstance(held, dict)
        and all(type(each) is int and abs(each) < _MOST for each in held.values())
        and held.keys() >= set(needed)
    )


def _is_like(model: object, held: object) -> bool:
    """Whether plain data has the form of other plain data, and numbers where that has some."""
    if isinstance(model, dict):
        return (
            isinstance(held, dict)
            and held.keys() == model.keys()
            and all(_is_like(model[name], held[name]) for name in model)
        )
    if isinstance(model, list):
        return isinstance(held, list) and len(held) == len(model) and all(map(_is_like, model, held))
    return type(held) in (int, float) and 0 <= held < _MOST  # type: ignore[operator]

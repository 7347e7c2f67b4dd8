"""A worker's figures and the rows of its listing, written to a file after each step, remote call and move.

The API server reads them there, so that nobody who looks at sessions is one more call between two steps. It
learns of the file by the one call that begins this. What goes wrong ends the writing, and serving goes on.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.manager.manager import SessionStateManager
from vllm_omni_session_state.manager.rows import in_order
from vllm_omni_session_state.omni.stats_file.layout import StatsWriter
from vllm_omni_session_state.omni.stats_file.place import OwnFile
from vllm_omni_session_state.omni.worker import engine_view


class Publisher:
    """Keeps the file of one manager. It is the manager's watcher, and holds nothing that reaches it.

    Args:
        manager: Whose sessions.
        runner: vLLM-Omni's runner of its model.
        ends: How many ends arrived, live.

    Attributes:
        path: Of the file; ``None`` where it cannot be written, or not any more.
    """

    def __init__(self, manager: SessionStateManager, runner: Any, ends: dict[str, int]) -> None:
        self.path: str | None = None
        self._manager = weakref.ref(manager)
        self._runner = weakref.ref(runner)
        self._ends = ends
        self._lock = threading.Lock()
        self._file: OwnFile | None = None
        self._writer: StatsWriter | None = None
        try:
            self._file = OwnFile()
            self._writer = StatsWriter(self._file.grow)
        except Exception as error:  # noqa: BLE001 - serving goes on without
            self._give_up(error)
            self.close()
            return
        self.path = self._file.path
        weakref.finalize(manager, self._file.close)
        manager.watch.begin(self.write, self.close)
        self.write(True)

    def write(self, ended: bool) -> None:  # noqa: FBT001 - as the manager's watcher is called
        """Write what has changed. Never raises.

        Args:
            ended: Whether a step or a remote call has ended, which all ranks see alike.
        """
        with self._lock:
            if self._writer is None or self._file is None or not self._file.ours:
                return
            try:
                self._write(self._writer, ended=ended)
            except Exception as error:  # noqa: BLE001 - as above
                self._give_up(error)
            except BaseException:
                self._give_up(None)  # it is half done, and nobody will do the rest
                raise

    def close(self) -> None:
        """Write no more, and remove the file. Never raises."""
        with self._lock:
            self._writer = self.path = None
            if self._file is not None:
                self._file.close()

    def _write(self, writer: StatsWriter, *, ended: bool) -> None:
        manager, runner = self._manager(), self._runner()
        if manager is None or runner is None:
            return
        changed = manager.watch.changed_rows()
        found = engine_view.figures(manager, runner, self._ends)
        writer.write(
            found,
            changed,
            manager.moves.changed_figures(),
            agreed=[found[name] for name in engine_view.AGREED] if ended else None,
        )

    def _give_up(self, error: Exception | None) -> None:
        """Write no more, and say in the file that it is so."""
        writer, self._writer, self.path = self._writer, None, None
        manager = self._manager()
        if manager is not None:
            manager.watch.end()
        if error is not None:
            log_once(
                logging.WARNING,
                ("figures",),
                "figures are not written for the server any more: it asks for them, and that call waits for "
                "the step that runs: %s: %s",
                type(error).__name__,
                error,
            )
        if writer is not None:
            writer.stop()


_PUBLISHER = "_session_state_publisher"
"""Attribute of a worker."""


def publisher_of(worker: Any, manager: SessionStateManager, ends: dict[str, int]) -> Publisher:
    """The one that writes for this manager; it begins with the first call, and anew with another manager."""
    known: tuple[weakref.ref[SessionStateManager], Publisher] | None = vars(worker).get(_PUBLISHER)
    if known is not None and known[0]() is manager:
        return known[1]
    made = Publisher(manager, worker.model_runner, ends)
    vars(worker)[_PUBLISHER] = weakref.ref(manager), made
    return made


def answer(worker: Any, manager: SessionStateManager, ends: dict[str, int]) -> dict[str, Any]:
    """What one rank says when it is asked for its figures, and for its file."""
    publisher = publisher_of(worker, manager, ends)
    rows = in_order(manager.watch.rows().values())
    return {
        **engine_view.all_figures(manager, worker.model_runner, ends),
        "rows": rows,
        "order": [row.digest for row in rows],
        "file": publisher.path,
    }


def after(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Have what a remote call has changed on this rank written when it has ended, as on all others."""

    @functools.wraps(method)
    def call(worker: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return method(worker, *args, **kwargs)
        finally:
            known = vars(worker).get(_PUBLISHER)
            if known is not None:
                known[1].write(True)

    return call

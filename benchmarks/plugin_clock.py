"""What the plugin's own code takes of a model's step, as CPU time of the thread.

It wraps the plugin's doors for as long as it is open: whatever runs inside of one is the plugin's time, but
for the forward inside the lease and vLLM-Omni's own code that a door calls.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from typing_extensions import Self

from vllm_omni_session_state.adapters import dreamzero
from vllm_omni_session_state.manager.manager import SessionStateManager
from vllm_omni_session_state.state.session import SessionAttr

FIELDS = (SessionAttr, dreamzero.BufferField, dreamzero.EncoderWindowField)


class PluginClock:
    """A context manager; inside it, time spent in the plugin is counted once however deep its calls nest.

    Attributes:
        ns: Nanoseconds so far.
    """

    def __init__(self) -> None:
        self.ns = 0
        self._depth = 0
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Wrap the doors."""
        for owner, name in (
            *((field, name) for field in FIELDS for name in ("__get__", "__set__")),
            (dreamzero.DreamZeroFields, "__setattr__"),
            (dreamzero, "view_of"),
            (SessionStateManager, "get_or_create_session"),
            (SessionStateManager, "prepare"),
            (SessionStateManager, "settle"),
            (SessionStateManager, "charge_outside"),
            (SessionStateManager, "drop_session"),
        ):
            self._replace(owner, name, self._clocked(getattr(owner, name)))
        self._replace(SessionStateManager, "lease", self._around(SessionStateManager.lease))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Put everything back."""
        self._undo.close()

    def _replace(self, owner: Any, name: str, wrapped: object) -> None:
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, wrapped)

    def _clocked(self, door: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return door(*args, **kwargs)
            self._depth = 1
            began = time.thread_time_ns()
            try:
                return door(*args, **kwargs)
            finally:
                self.ns += time.thread_time_ns() - began
                self._depth = 0

        return clocked

    def _around(self, lease: Callable[..., Any]) -> Callable[..., Any]:
        """Clock how a lease begins and ends, not what runs under it."""

        @contextlib.contextmanager
        def clocked(*args: Any, **kwargs: Any) -> Iterator[Any]:
            inner = lease(*args, **kwargs)
            session = self._clocked(inner.__enter__)()
            try:
                yield session
            finally:
                self._clocked(inner.__exit__)(None, None, None)

        return clocked

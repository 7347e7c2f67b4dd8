"""What the plugin says, and how often.

One logger below vLLM-Omni's own root, so that lines reach the handlers and the level that the operator
chose for vLLM-Omni; without vLLM-Omni they go wherever the application sends them. What is said can hold a
stranger's words, vLLM-Omni's errors among them: each message is one line that no terminal acts on.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from vllm_omni_session_state.base.errors import SessionStateError, error_text
from vllm_omni_session_state.base.printable import printable

LOGGER = logging.getLogger("vllm_omni.session_state")

MINUTE_S = 60.0
"""What comes again and again is said once in so long."""


@dataclass(slots=True)
class _Rare:
    """What was said last: when, by ``time.monotonic()``, and how often it came since."""

    at: float
    held_back: int = 0


_said: set[tuple[str, ...]] = set()
_rare: dict[tuple[str, ...], _Rare] = {}


class _OneLine(logging.Filter):
    """Lets every record through, its message in one line and a traceback's messages too."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        line = printable(said)
        if line != said:
            record.msg, record.args = line, ()
        if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
            record.exc_text = _frames_of(record.exc_info[1])
        return True


LOGGER.addFilter(_OneLine("one line"))


def _frames_of(error: BaseException) -> str:
    """A traceback, with what it came from first, whose messages are one line each."""
    chain: list[BaseException] = []
    come_from: BaseException | None = error
    while come_from is not None and come_from not in chain:
        chain.insert(0, come_from)
        come_from = come_from.__cause__ or (None if come_from.__suppress_context__ else come_from.__context__)
    return "\n".join(
        f"{''.join(traceback.format_tb(each.__traceback__))}{printable(f'{type(each).__name__}: {each}')}"
        for each in chain
    )


def log_once(level: int, key: tuple[str, ...], message: str, *args: object) -> None:
    """Log ``message`` unless this process has already said something under ``key``.

    Args:
        level: A ``logging`` level.
        key: What the message is about; the message itself may carry figures that change.
        message: A ``%`` format for ``args``.
        *args: Its arguments.
    """
    if key in _said:
        return
    _said.add(key)
    LOGGER.log(level, message, *args)


def log_rarely(level: int, key: tuple[str, ...], message: str, *args: object) -> None:
    """Log ``message`` unless something was said under ``key`` within the last minute, and count what was not.

    The next one that is said tells how many were held back. See ``log_once()`` for what is given.
    """
    now, last = time.monotonic(), _rare.get(key)
    if last is not None and now - last.at < MINUTE_S:
        last.held_back += 1
        return
    _rare[key] = _Rare(now)
    if last is not None and last.held_back:
        message += " (%d more like it in the last %.0f s)"
        args = (*args, last.held_back, now - last.at)
    LOGGER.log(level, message, *args)


def tried(hook: Callable[[], object], otherwise: str) -> bool:
    """Whether a hook did its work. If it raised, what follows is said once, and serving goes on."""
    try:
        hook()
    except Exception as error:  # noqa: BLE001 - a hook never breaks serving
        log_once(logging.WARNING, ("tried", otherwise), "%s: %s", otherwise, error_text(error))
        return False
    return True


def log_failure(what: str, error: Exception) -> None:
    """Say that something went wrong and was caught: a refusal in a line, a surprise with its traceback.

    Either is said once a minute at most, by its kind, and the traceback once: a robot that steps on, or a
    clock, brings the same one again and again.

    Args:
        what: What it was that failed.
        error: A refusal of our own says in its message what can be done.
    """
    why = getattr(error, "why", None)
    kind: tuple[str, ...] = (what, type(error).__name__, type(why).__name__)
    if isinstance(error, SessionStateError):
        log_rarely(logging.WARNING, kind, "%s: %s", what, error)
        return
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    kind += tuple(f"{frame.filename}:{frame.lineno}" for frame in frames)
    if kind in _said:
        log_rarely(logging.ERROR, kind, "%s: %s: %s", what, type(error).__name__, error)
        return
    _said.add(kind)
    _rare[kind] = _Rare(time.monotonic())
    LOGGER.error("%s: %s: %s", what, type(error).__name__, error, exc_info=error)


MOST_HEARD = 100


class Heard(logging.Handler):
    """Keeps the first `MOST_HEARD` of what is said at WARNING or above while it is a handler."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        if len(self._said) < MOST_HEARD:
            self._said.append(record.getMessage())

    def taken(self) -> list[str]:
        """What there is, which is then forgotten."""
        said, self._said = self._said, []
        return said


def forget_said() -> None:
    """Let every message be said again (a test's fresh start; a process keeps what it said)."""
    _said.clear()
    _rare.clear()

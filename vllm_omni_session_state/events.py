"""What the plugin says, and how often.

One logger below the host's own root, so that lines reach the handlers and the level that the operator
chose for vLLM-Omni; without the host they go wherever the application sends them.
"""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("vllm_omni.session_state")

_said: set[tuple[str, ...]] = set()


def say_once(level: int, key: tuple[str, ...], message: str, *args: object) -> None:
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

"""Putting a function around one of vLLM-Omni's, once, and saying what could not be hooked.

With the flag off a wrapper hands everything through. Where hooking fails, vLLM-Omni's own function stays.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from vllm_omni_session_state.base.log import log_once

MARK = "__session_state_wrapper__"
"""Attribute of every function that this plugin puts around one of vLLM-Omni's."""


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put ``around`` in the place of a function, unless one of ours is there already.

    Args:
        owner: The class, module or object of vLLM-Omni that has the function.
        name: The function's name.
        around: Called with the original function, then its arguments; a coroutine function for one of these.
    """
    original = getattr(owner, name)
    if hasattr(original, MARK):
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await around(original, *args, **kwargs)

    wrapper: Any = call_async if inspect.iscoroutinefunction(original) else call
    setattr(functools.update_wrapper(wrapper, original), MARK, True)
    setattr(owner, name, wrapper)


def tried(consequence: str, hook: Callable[[], object]) -> bool:
    """Whether ``hook`` did its work; it never raises. What a failure means is said once at WARNING."""
    try:
        hook()
    except Exception as error:  # noqa: BLE001 - a hook never breaks serving
        warn_failed(consequence, error)
        return False
    return True


def warn_failed(consequence: str, error: Exception, *, then: str = "") -> None:
    """Say once at WARNING what follows from an error, and which it was.

    Args:
        consequence: What is otherwise than intended; it is said once in a process.
        error: Why.
        then: What to add.
    """
    what = "%s: %s: %s%s"
    log_once(logging.WARNING, ("hook", consequence), what, consequence, type(error).__name__, error, then)

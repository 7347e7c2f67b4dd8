"""Putting a function around one of vLLM-Omni's, once. Where that fails, vLLM-Omni's own stays."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

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

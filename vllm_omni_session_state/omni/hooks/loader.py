"""The one hook that is always there: ``DiffusersPipelineLoader.load_model``.

Its wrapper hands every argument through and returns what vLLM-Omni returned; with the flag off that is
all that it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.omni.hooks import patching
from vllm_omni_session_state.omni.hooks.seams import LOADER_CLASS, LOADER_METHOD, LOADER_MODULE
from vllm_omni_session_state.omni.worker.attach import attach


def wrap(module: ModuleType) -> None:
    """Wrap the loader's method, once; a loader that looks otherwise is left alone."""
    loader = getattr(module, LOADER_CLASS, None)
    if callable(getattr(loader, LOADER_METHOD, None)):
        patching.wrap(loader, LOADER_METHOD, _load_model)
        return
    log_once(
        logging.WARNING,
        ("loader",),
        "expected a method %s.%s.%s, found none: this vLLM-Omni is unknown to the plugin, and every "
        "model keeps its own session state",
        LOADER_MODULE,
        LOADER_CLASS,
        LOADER_METHOD,
    )


def _load_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    pipeline = original(self, *args, **kwargs)
    attach(pipeline, getattr(self, "od_config", None))
    return pipeline

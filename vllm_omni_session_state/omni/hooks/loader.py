"""The one hook that is always there: ``DiffusersPipelineLoader.load_model``.

Its wrapper hands every argument through and returns what vLLM-Omni returned; with the flag off that is
all that it does.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.omni.hooks.import_hook import when_imported
from vllm_omni_session_state.omni.hooks.seams import LOADER_CLASS, LOADER_METHOD, LOADER_MODULE, MARK
from vllm_omni_session_state.omni.worker.attach import attach

_MARK = MARK


def install() -> None:
    """Hook the loader now if its module is imported, else when it will be. Idempotent."""
    when_imported(LOADER_MODULE, wrap)


def wrap(module: ModuleType) -> None:
    """Wrap ``load_model`` of the loader's module, once; a loader that looks otherwise is left alone."""
    loader = getattr(module, LOADER_CLASS, None)
    original = vars(loader).get(LOADER_METHOD) if isinstance(loader, type) else None
    if not callable(original):
        log_once(
            logging.WARNING,
            ("loader",),
            "expected a method %s.%s.%s, found none: this vLLM-Omni is unknown to the plugin, and every "
            "model keeps its own session state",
            LOADER_MODULE,
            LOADER_CLASS,
            LOADER_METHOD,
        )
        return
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        pipeline = original(self, *args, **kwargs)
        attach(pipeline, getattr(self, "od_config", None))
        return pipeline

    setattr(load_model, _MARK, True)
    setattr(loader, LOADER_METHOD, load_model)

"""The one hook that is always there: ``DiffusersPipelineLoader.load_model``.

Its wrapper hands every argument through and returns what the host returned; with the flag off that is
all that it does. Where the loader's module is not imported yet, its import is waited for, so that
installing this plugin makes no process import anything.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from vllm_omni_session_state.events import say_once
from vllm_omni_session_state.omni.attach import attach
from vllm_omni_session_state.omni.seams import LOADER_CLASS, LOADER_METHOD, LOADER_MODULE

_MARK = "__session_state_wrapper__"


def install() -> None:
    """Hook the loader now if its module is imported, else when it will be. Idempotent."""
    module = sys.modules.get(LOADER_MODULE)
    if module is not None:
        wrap(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def wrap(module: ModuleType) -> None:
    """Wrap ``load_model`` of the loader's module, once; a loader that looks otherwise is left alone."""
    loader = getattr(module, LOADER_CLASS, None)
    host = vars(loader).get(LOADER_METHOD) if isinstance(loader, type) else None
    if not callable(host):
        say_once(
            logging.WARNING,
            ("loader",),
            "expected a method %s.%s.%s, found none: this vLLM-Omni is unknown to the plugin, and every "
            "model keeps its own session state",
            LOADER_MODULE,
            LOADER_CLASS,
            LOADER_METHOD,
        )
        return
    if hasattr(host, _MARK):
        return

    @functools.wraps(host)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        pipeline = host(self, *args, **kwargs)
        attach(pipeline, getattr(self, "od_config", None))
        return pipeline

    setattr(load_model, _MARK, True)
    setattr(loader, LOADER_METHOD, load_model)


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the loader's module, lets the ordinary finders find it, and wraps it once it has run."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the import system's signature
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != LOADER_MODULE:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _WrapAfter(spec.loader)
        return spec


class _WrapAfter(importlib.abc.Loader):
    """Runs the module as its own loader would, then wraps ``load_model``."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # the module looks as if nobody had waited for it
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            wrap(module)
        except Exception as error:  # noqa: BLE001 - a hook never breaks an import
            say_once(logging.WARNING, ("loader",), "%s is not hooked: %s", LOADER_MODULE, error)

"""Doing something with a module of vLLM-Omni once it is imported, without importing it.

Installing this plugin makes no process import anything: a module that is there is used at once, and for
one that is not its import is waited for.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from vllm_omni_session_state.base.log import tried


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with a module, now if it is imported, else right after it has run. Idempotent."""
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    elif not any(isinstance(finder, _Finder) and finder.awaited == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for one module, lets the ordinary finders find it, and has ``then`` called once it has run."""

    def __init__(self, awaited: str, then: Callable[[ModuleType], None]) -> None:
        self.awaited = awaited
        self._then = then

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the import system's signature
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.awaited:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenLoader(spec.loader, self._then)
        return spec


class _ThenLoader(importlib.abc.Loader):
    """Runs the module as its own loader would, then calls ``then``."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

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
        tried(lambda: self._then(module), f"{module.__name__} is not hooked")

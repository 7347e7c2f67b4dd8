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
    elif not any(isinstance(finder, _Awaited) and finder.awaited == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaited(name, then))


class _Awaited(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets one module be found and run as without it, then calls ``then``."""

    def __init__(self, awaited: str, then: Callable[[ModuleType], None]) -> None:
        self.awaited = awaited
        self._then = then
        self._loader: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

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
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # the module looks as if nobody had waited for it
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        tried(lambda: self._then(module), f"{module.__name__} is not hooked")

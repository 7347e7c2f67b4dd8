"""Import hooks that let vLLM-Omni's neighbours load beside a CPU build of torch.

A ``.pth`` file calls `install()` at interpreter start, so this file imports neither torch nor anything
else that costs time. Nothing in an installed package is edited or deleted: each hook acts on a module
object after its own code has run, and only where its native library did not load.

Not covered: making those native libraries work. What they offer is absent, as in a build without them.
"""

from __future__ import annotations

import gc
import importlib.util
import sys

TYPE_CHECKING = False  # as type checkers know it; typing and importlib.abc would cost 20 ms at every start
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_KEEP: list[object] = []
"""Operator schemas live as long as their library object."""


class _Loader:
    """Runs a module's own loader, then a function on the module."""

    def __init__(self, inner: Loader, then: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._then = then

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module shall look as if it had been imported without us.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._then(module)


class _Finder:
    """Finds one module through the other finders and has a function run after its import."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.wanted = (name, then)
        self._asking = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self.wanted[0] or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.wanted[1])
        return spec


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Have ``then(module)`` run once the module ``name`` is imported; at once if it already is."""
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    elif not any(getattr(finder, "wanted", None) == (name, then) for finder in sys.meta_path):
        # In a virtual environment Python 3.11 runs a .pth file twice.
        sys.meta_path.insert(0, _Finder(name, then))


def _torchvision_schemas(extension: ModuleType) -> None:
    # PyPI's x86-64 torchvision is a CUDA build. Its `_meta_registrations`, imported right after this
    # module, gives fakes to two operators that only the native library declares: declare them.
    if extension._has_ops():
        return
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEEP.append(library)


def _torchaudio_libraries(utils: ModuleType) -> None:
    # torchaudio goes without a native library that is not there, but not without one that cannot load.
    load = utils._load_lib

    def load_or_absent(lib: str) -> bool:
        try:
            return load(lib)
        except OSError:
            return False

    utils._load_lib = load_or_absent


def install() -> None:
    """Put the hooks in place; called by the ``.pth`` file at interpreter start."""
    gc.set_threshold(100_000, 20, 20)  # collections of garbage are a tenth of an import of vLLM-Omni
    after_import("torchvision.extension", _torchvision_schemas)
    after_import("torchaudio._extension.utils", _torchaudio_libraries)
    # Unlike the two above, torchcodec is nothing without its native library, and vLLM-Omni and
    # transformers ask for it with `find_spec`: to them it is then not installed.
    sys.modules.setdefault("torchcodec", None)  # type: ignore[arg-type]

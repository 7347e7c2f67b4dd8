"""Files of tensors as safetensors has them, read without torch. They may be a stranger's: none is run."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open


class DamagedFileError(ValueError):
    """The file is none, or is damaged; the message names it and what is wrong, in one line."""


class Kind(NamedTuple):
    """What a tensor is: the format's name of an element, and how many there are along each axis."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Of an element: 16 of ``BF16``, 8 of ``F8_E4M3``, and of ``BOOL``, which does not say it."""
        found = re.search(r"\d+", self.dtype)
        return int(found[0]) if found else 8

    @property
    def nbytes(self) -> int:
        """Of the content."""
        return math.prod(self.shape) * self.bits // 8

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join(map(str, self.shape))})"


class TensorFile:
    """A file that is read: the kinds of its tensors, and texts as metadata. Each reading checks it anew.

    Raises:
        DamagedFileError: It is none.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened("numpy") as file:
            self.metadata: dict[str, str] = file.metadata() or {}
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            self.kinds = {name: Kind(p.get_dtype(), tuple(p.get_shape())) for name, p in parts.items()}
        for name, kind in self.kinds.items():
            if kind.bits % 8:
                raise self.damaged(f"tensor {name!r} is of {kind.dtype}, whose elements share bytes")

    def tensors(self, names: Iterable[str], *, framework: str = "numpy") -> list[Any]:
        """Tensors of NumPy's, or with ``torch`` as framework those of torch's.

        Raises:
            DamagedFileError: The file has changed since, and is damaged.
        """
        with self._opened(framework) as file:
            return [file.get_tensor(name) for name in names]

    def damaged(self, why: str) -> DamagedFileError:
        """An error that names the file."""
        return DamagedFileError(f"{self.path}: {' '.join(why.split())}")

    @contextlib.contextmanager
    def _opened(self, framework: str) -> Iterator[Any]:
        try:
            with safe_open(self.path, framework=framework) as file:
                yield file
        except SafetensorError as error:
            raise self.damaged(f"it is no whole safetensors file: {error}") from error

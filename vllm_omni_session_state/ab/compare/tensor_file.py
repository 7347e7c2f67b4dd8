"""Files of tensors with a JSON document, as safetensors has them, written and read without torch and numpy.

A file may be a stranger's: whatever is wrong with it is one clear error, and nothing in it is ever run.
Only as much of a file is in memory as is asked for.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BITS = (8, 16, 32, 64)
NAMES = {
    "BOOL": "bool",
    **{f"{sign}{bits}": f"{word}{bits}" for sign, word in (("U", "uint"), ("I", "int")) for bits in _BITS},
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}
"""The format's name of an element -> torch's."""

BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""The same -> its bytes."""

MAX_HEADER = 100 << 20
DOCUMENT = "vllm_omni_session_state"
"""Key of the file's metadata under which the document stands."""


class DamagedFileError(ValueError):
    """The file is none, or is damaged; the message names it and what is wrong."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a tensor is.

    Attributes:
        dtype: One of `BYTES`.
        shape: Elements along each axis.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of the content."""
        return math.prod(self.shape) * BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join(map(str, self.shape))})"


def write_tensors(
    path: Path, document: Mapping[str, Any], kinds: Mapping[str, Kind], contents: Iterable[bytes]
) -> None:
    """Write a file.

    Args:
        path: The file; one that is there is replaced.
        document: What JSON can say.
        kinds: Of the tensors, by name.
        contents: Their bytes in the same order, each asked for when its turn comes.
    """
    header: dict[str, Any] = {"__metadata__": {DOCUMENT: json.dumps(document)}}
    end = 0
    for name, kind in kinds.items():
        begin, end = end, end + kind.nbytes
        header[name] = {"dtype": kind.dtype, "shape": list(kind.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", opener=_for_its_owner) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for kind, content in zip(kinds.values(), contents, strict=True):
            if len(content) != kind.nbytes:
                raise ValueError(f"{len(content)} bytes are not the content of {kind}")
            file.write(content)


def _for_its_owner(path: str, flags: int) -> int:
    """A recording has prompts and pictures in it."""
    return os.open(path, flags, 0o600)


class TensorFile:
    """A file that is read.

    Args:
        path: The file.

    Attributes:
        path: The file.
        kinds: Of the tensors, by name.

    Raises:
        DamagedFileError: It is none.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise self.damaged("it is no safetensors file, or is cut off in its header")
            try:
                header = json.loads(file.read(length))
            except (ValueError, RecursionError) as error:
                raise self.damaged("its header is no JSON") from error
        if not isinstance(header, dict):
            raise self.damaged("its header is no mapping")
        self._metadata = header.pop("__metadata__", {})
        self._data = 8 + length
        self._places: dict[str, tuple[int, int]] = {}
        self.kinds = {name: self._kind(name, entry, size - self._data) for name, entry in header.items()}
        places = sorted(self._places.values())
        if sum(end - begin for begin, end in places) != size - self._data or any(
            begin != end for (_, end), (begin, _) in itertools.pairwise(places)
        ):
            raise self.damaged(f"its tensors are not all of its {size} bytes: it is cut off, or has more")

    def document(self) -> Any:
        """The JSON document.

        Raises:
            DamagedFileError: There is none, or it is no JSON.
        """
        try:
            text = self._metadata[DOCUMENT]
        except (TypeError, KeyError) as error:
            raise self.damaged(f"there is no document {DOCUMENT!r} in its metadata") from error
        try:
            return json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise self.damaged(f"the document {DOCUMENT!r} in its metadata is no JSON") from error

    def content(self, name: str) -> bytes:
        """The bytes of a tensor.

        Raises:
            DamagedFileError: The file has become shorter.
        """
        begin, end = self._places[name]
        with self.path.open("rb") as file:
            file.seek(self._data + begin)
            content = file.read(end - begin)
        if len(content) != end - begin:
            raise self.damaged("it has become shorter")
        return content

    def damaged(self, why: str) -> DamagedFileError:
        """An error that names the file."""
        return DamagedFileError(f"{self.path}: {why}")

    def _kind(self, name: str, entry: Any, data: int) -> Kind:
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        if not isinstance(dtype, str) or dtype not in BYTES:
            raise self.damaged(f"tensor {name!r} is of no known dtype: {dtype!r}")
        shape, place = entry.get("shape"), entry.get("data_offsets")
        if not _whole(shape) or not _whole(place) or len(place) != 2:
            raise self.damaged(f"tensor {name!r} has no shape or no place in the file")
        kind, (begin, end) = Kind(dtype, tuple(shape)), place
        if not begin <= end <= data or end - begin != kind.nbytes:
            raise self.damaged(f"tensor {name!r} of {kind} does not fill bytes {begin} to {end} of {data}")
        self._places[name] = (begin, end)
        return kind


def _whole(numbers: object) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)

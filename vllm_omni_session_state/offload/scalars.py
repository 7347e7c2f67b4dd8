"""Single values to and from JSON: what has no parts and no identity. A closed list, read with suspicion.

``None``, booleans and clean strings are themselves; all others are a list of a kind and its words. Every
bit comes back: floats travel as their bits, integers of any size in base 16.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeGuard

import numpy as np
import torch

DTYPES: dict[str, torch.dtype] = {
    name: value
    for name in (  # noqa: SIM905 - a list of words
        "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 "
        "complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
    ).split()
    if isinstance(value := getattr(torch, name, None), torch.dtype)
}
"""Element types that a file may name; an older torch lacks some."""

DTYPE_NAMES = {value: name for name, value in DTYPES.items()}


class NotAScalar(Enum):
    """What ``write_atom()`` says of a value that is none."""

    NO_ATOM = "no atom"


NO_ATOM = NotAScalar.NO_ATOM

_ARRAY_TYPE = re.compile(r"[<>|][biufcSUVmM]\d+(\[[0-9A-Za-z]+\])?", re.ASCII)
_HEX = re.compile(r"-?[0-9a-f]+", re.ASCII)
_DEVICE = re.compile(r"[a-z_]+", re.ASCII)


def write_scalar(value: Any) -> Any:
    """A value as JSON, or ``NO_ATOM`` where it is not of a kind on the list."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return (
            value
            if value.isascii() or _clean(value)
            else ["str", _text(value.encode("utf-8", "surrogatepass"))]
        )
    if kind in _WRITERS:
        return _WRITERS[kind](value)
    if isinstance(value, np.generic):
        return _write_scalar(value)
    return NO_ATOM


def read_scalar(written: Any) -> Any:
    """The value back.

    Raises:
        ValueError: If it was not written by ``write_atom()``.
    """
    if written is None or isinstance(written, bool | str):
        return written
    if not isinstance(written, list) or not written or not isinstance(written[0], str):
        raise ValueError(f"a value reads {_short(written)}")
    kind, *words = written
    if kind not in _READERS:
        raise ValueError(f"kind {_short(kind)} is not known")
    try:
        return _READERS[kind](*words)
    except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError, struct.error) as error:
        raise ValueError(f"a value of kind {kind} cannot be read: {error}") from error


def is_scalar_type(kind: type) -> bool:
    """Whether values of this type are on the list."""
    return kind in (type(None), bool, str) or kind in _WRITERS or issubclass(kind, np.generic)


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value from JSON is a whole number of things that memory can hold."""
    return type(value) is int and 0 <= value < 2**63


def array_type_name(dtype: np.dtype[Any]) -> str | None:
    """The name by which a file says an array's element type; ``None`` for one with objects or fields."""
    try:
        return dtype.str if named_array_type(dtype.str) == dtype and dtype.metadata is None else None
    except ValueError:
        return None


def named_array_type(name: object) -> np.dtype[Any]:
    """The element type of that name.

    Raises:
        ValueError: If it is none that a file may name.
    """
    if not isinstance(name, str) or not _ARRAY_TYPE.fullmatch(name):
        raise ValueError(f"element type {_short(name)} is not known")
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise ValueError(f"element type {_short(name)} is not known") from error
    if dtype.str != name or dtype.hasobject:
        raise ValueError(f"element type {_short(name)} is not known")
    return dtype


def named_dtype(name: object) -> torch.dtype:
    """The torch element type of that name.

    Raises:
        ValueError: If it is none that a file may name.
    """
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"element type {_short(name)} is not known")
    return DTYPES[name]


def read_device(kind: object, index: object) -> torch.device:
    """The device of that kind and number, ``None``: of no number.

    Raises:
        ValueError: If it cannot be one.
    """
    if not isinstance(kind, str) or not _DEVICE.fullmatch(kind) or not (index is None or is_count(index)):
        raise ValueError(f"device {_short(kind)}, {_short(index)} is none")
    try:
        return torch.device(kind) if index is None else torch.device(kind, index)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(f"device {kind}, {index} is none") from error


def _clean(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _raw(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii"), validate=True)


def _write_dtype(value: torch.dtype) -> Any:
    return ["dtype", DTYPE_NAMES[value]] if value in DTYPE_NAMES else NO_ATOM


def _write_scalar(value: np.generic) -> Any:
    name = array_type_name(value.dtype)
    if name is None:
        return NO_ATOM
    return ["scalar", name, _text(value.tobytes())]


def _read_scalar(name: str, text: str) -> Any:
    raw = _raw(text)
    if name in ("str", "bytes"):
        return np.str_(raw.decode("utf-8", "surrogatepass")) if name == "str" else np.bytes_(raw)
    dtype = named_array_type(name)
    if len(raw) != dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes are no {name}")
    return np.ndarray((), dtype, buffer=bytearray(raw))[()]


def _read_int(text: str) -> int:
    if not _HEX.fullmatch(text):
        raise ValueError(f"{_short(text)} is no number")
    return int(text, 16)  # in this base the interpreter sets no bound to the digits


def _read_complex(text: str) -> complex:
    return complex(*struct.unpack("<2d", bytes.fromhex(text)))


def _read_float(text: str) -> float:
    number: float = struct.unpack("<d", bytes.fromhex(text))[0]
    return number


def _read_size(sizes: object) -> torch.Size:
    if not isinstance(sizes, list) or not all(type(size) is int and abs(size) < 2**63 for size in sizes):
        raise ValueError("sizes must be whole numbers")
    return torch.Size(sizes)


_WRITERS: dict[type, Callable[[Any], Any]] = {
    int: lambda value: ["int", f"{value:x}"],
    float: lambda value: ["float", struct.pack("<d", value).hex()],
    complex: lambda value: ["complex", struct.pack("<2d", value.real, value.imag).hex()],
    bytes: lambda value: ["bytes", _text(value)],
    np.str_: lambda value: ["scalar", "str", _text(value.encode("utf-8", "surrogatepass"))],
    np.bytes_: lambda value: ["scalar", "bytes", _text(bytes(value))],
    torch.dtype: _write_dtype,
    torch.device: lambda value: ["device", value.type, value.index],
    torch.Size: lambda value: ["size", list(value)],
}

_READERS: dict[str, Callable[..., Any]] = {
    "int": _read_int,
    "float": _read_float,
    "complex": _read_complex,
    "str": lambda text: _raw(text).decode("utf-8", "surrogatepass"),
    "bytes": _raw,
    "dtype": named_dtype,
    "device": read_device,
    "size": _read_size,
    "scalar": _read_scalar,
}

"""What a file says of a session's values: a closed list of kinds, each a ``msgspec`` struct. None runs code.

A tree is a flat table of nodes, so a nest of any depth is read without recursion, and shared and cyclic
containers keep their sharing. A part of a node is the number of another node or a scalar. ``None``, booleans
and clean strings are scalars as they are. The others are structs of which ``READERS`` bring back every bit.

In JSON a struct is a list: its kind, then its fields. A field of another type, a bound that is left, a field
too many or too few: ``msgspec`` refuses it before anything is made.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Step = Annotated[int, Meta(ge=1 - 2**63, le=2**63 - 1)]
Sizes = Annotated[tuple[Count, ...], Meta(max_length=64)]
ArrayType = Annotated[str, Meta(pattern=r"\A[<>|][biufcSUVmM][0-9]+(\[[0-9A-Za-z]+\])?\Z")]
TensorType = Literal[
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16",
    "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
"""Element types that a file may name; an older torch lacks some."""

TENSOR_TYPES = frozenset(get_args(TensorType))


class Kind(Struct, array_like=True, forbid_unknown_fields=True):
    """A struct that is a list in JSON."""


class Scalar(Kind):
    """A value without parts and without identity."""


class Int(Scalar, tag="int"):
    """An integer of any size, in base 16: there the interpreter bounds no digits."""

    digits: Annotated[str, Meta(pattern=r"\A-?[0-9a-f]+\Z")]


class Float(Scalar, tag="float"):
    """A float by its bits."""

    raw: Annotated[bytes, Meta(min_length=8, max_length=8)]


class Complex(Scalar, tag="complex"):
    """Two floats by their bits."""

    raw: Annotated[bytes, Meta(min_length=16, max_length=16)]


class Bytes(Scalar, tag="bytes"):
    """Bytes."""

    raw: bytes


class Text(Scalar, tag="str"):
    """A string with surrogates, which JSON cannot hold."""

    raw: bytes


class DType(Scalar, tag="dtype"):
    """A torch element type."""

    name: TensorType


class Device(Scalar, tag="device"):
    """A torch device."""

    kind: Annotated[str, Meta(pattern=r"\A[a-z_]+\Z")]
    index: Count | None


class Size(Scalar, tag="size"):
    """A ``torch.Size``."""

    sizes: tuple[Step, ...]


class NumPyScalar(Scalar, tag="scalar"):
    """A NumPy scalar of an element type with a fixed size."""

    dtype: ArrayType
    raw: bytes


class NumPyText(Scalar, tag="numpy.str"):
    """A NumPy string; its element type would drop zeros at its end."""

    raw: bytes


class NumPyBytes(Scalar, tag="numpy.bytes"):
    """NumPy bytes; likewise."""

    raw: bytes


Part = (
    Count | bool | str | None
    | Int | Float | Complex | Bytes | Text | DType | Device | Size | NumPyScalar | NumPyText | NumPyBytes
)  # fmt: skip
"""A whole number is that of a node."""


class Container(Kind):
    """A value with parts, which may be shared and may hold itself."""

    parts: list[Part]


class List(Container, tag="list"):
    """A list."""


class Tuple(Container, tag="tuple"):
    """A tuple."""


class Dict(Container, tag="dict"):
    """A dict: keys and values in turn."""


class ODict(Container, tag="odict"):
    """An ordered dict, likewise."""


class Deque(Container, tag="deque"):
    """A deque."""

    maxlen: Count | None


class Leaf(Kind, tag="leaf"):
    """A scalar that is named by number."""

    part: Part


class Tensor(Kind, tag="tensor"):
    """A tensor without its bytes.

    Attributes:
        storage: The number of its storage.
        dtype: Its element type.
        offset: First element, counted in elements from the start of the storage.
        size: Its shape.
        stride: Its strides in elements.
        requires_grad: As it was.
        inference: Whether it was an inference tensor; one that is not recompiles compiled code.
        resizable: Whether its storage can be resized, which ends with the first ``numpy()``.
    """

    storage: Count
    dtype: TensorType
    offset: Count
    size: Sizes
    stride: Sizes
    requires_grad: bool
    inference: bool
    resizable: bool


class Array(Kind, tag="array"):
    """A NumPy array without its bytes.

    Attributes:
        storage: The number of the storage that holds its memory.
        dtype: Its element type.
        first: Where its first element is, in bytes from the start of the memory.
        size: Its shape.
        strides: In bytes.
        writeable: Its flag.
        how: Whether it has that memory itself, shows NumPy's, or a tensor's.
    """

    storage: Count
    dtype: ArrayType
    first: Count
    size: Sizes
    strides: Annotated[tuple[Step, ...], Meta(max_length=64)]
    writeable: bool
    how: Literal["own", "view", "tensor"]


class Registered(Kind, tag="registered"):
    """A value of a type that an adapter registered, by a tree of its own."""

    name: str
    tree: Tree


class Stay(Kind, tag="stay"):
    """A value that was not taken apart: in memory only, never in a file."""

    kept: Any


class Tree(Struct, forbid_unknown_fields=True):
    """All of a session's values."""

    nodes: list[List | Tuple | Dict | ODict | Deque | Leaf | Tensor | Array | Registered]
    root: Part


Node = Container | Leaf | Tensor | Array | Registered | Stay


def torch_type(name: str) -> torch.dtype:
    """The torch element type of that name; raises where this torch lacks it."""
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{name} is no element type")
    return found


def array_type(name: str) -> np.dtype[Any]:
    """The NumPy element type of that name; raises ``ValueError`` where it is none that a file may name."""
    try:
        dtype = np.dtype(name)
    except TypeError as error:
        raise ValueError(f"element type {name} is not known") from error
    if dtype.str != name or dtype.hasobject or dtype.kind not in "biufcSUVmM":
        raise ValueError(f"element type {name} is not known")
    return dtype


def array_type_name(dtype: np.dtype[Any]) -> str | None:
    """The name by which a file says an array's element type; ``None`` for one with objects or fields."""
    try:
        return dtype.str if array_type(dtype.str) == dtype and dtype.metadata is None else None
    except ValueError:
        return None


SCALARS: dict[type, Callable[[Any], Part]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: lambda value: Int(f"{value:x}"),
    float: lambda value: Float(struct.pack("<d", value)),
    complex: lambda value: Complex(struct.pack("<2d", value.real, value.imag)),
    bytes: Bytes,
    str: lambda value: value if is_clean(value) else Text(value.encode("utf-8", "surrogatepass")),
    torch.dtype: lambda value: DType(str(value).removeprefix("torch.")),  # type: ignore[arg-type]
    torch.device: lambda value: Device(value.type, value.index),
    torch.Size: lambda value: Size(tuple(value)),
}
"""Types whose values are scalars wherever they stand: nobody can tell one from an equal one."""

NUMPY_SCALARS: dict[type, Callable[[Any], Part]] = {
    np.str_: lambda value: NumPyText(value.encode("utf-8", "surrogatepass")),
    np.bytes_: lambda value: NumPyBytes(bytes(value)),
}


READERS: dict[type, Callable[[Any], Any]] = {
    Int: lambda part: int(part.digits, 16),
    Float: lambda part: struct.unpack("<d", part.raw)[0],
    Complex: lambda part: complex(*struct.unpack("<2d", part.raw)),
    Bytes: lambda part: part.raw,
    Text: lambda part: part.raw.decode("utf-8", "surrogatepass"),
    DType: lambda part: torch_type(part.name),
    Device: lambda part: torch.device(part.kind, part.index),
    Size: lambda part: torch.Size(part.sizes),
    NumPyScalar: lambda part: _numpy_scalar(array_type(part.dtype), part.raw),
    NumPyText: lambda part: np.str_(part.raw.decode("utf-8", "surrogatepass")),
    NumPyBytes: lambda part: np.bytes_(part.raw),
}
"""A scalar's value; raises where its fields go with none."""


def is_clean(text: str) -> bool:
    """Whether JSON can hold a string as it is."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def scalar_of(value: Any) -> Part:
    """A value as a scalar.

    Raises:
        KeyError: If it is none that a file may hold.
    """
    make = SCALARS.get(type(value)) or NUMPY_SCALARS.get(type(value))
    if make is not None:
        part = make(value)
        if isinstance(part, DType) and part.name not in TENSOR_TYPES:
            raise KeyError(part.name)
        return part
    name = array_type_name(value.dtype) if isinstance(value, np.generic) else None
    if name is None:
        raise KeyError(type(value))
    return NumPyScalar(name, value.tobytes())


def value_of(part: Part) -> Any:
    """The value of a part that is no number of a node."""
    return READERS[type(part)](part) if isinstance(part, Scalar) else part


def _numpy_scalar(dtype: np.dtype[Any], raw: bytes) -> Any:
    if len(raw) != dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes are no {dtype}")
    return np.ndarray((), dtype, buffer=bytearray(raw))[()]

"""What a client gets, as named tensors in a file: every picture, every array and every plain number of it.

Texts, and what vLLM-Omni adds of itself (ids, times), are no outputs of a model and are left out.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PARTS = ("images", "multimodal_output", "latents", "trajectory_latents", "trajectory_log_probs")
"""Where vLLM-Omni's output has what the model made."""


def tensors_of(output: Any, *, pictures: str = "images") -> dict[str, Any]:
    """Torch's tensors, on the CPU and each with memory of its own, of an output or of a call's plain answer.

    The answer to a call is named ``answer``, and what vLLM-Omni hands out as pictures as ``pictures`` says.
    """
    parts = {name: getattr(output, name) for name in PARTS if hasattr(output, name)}
    named = {pictures: parts.pop("images", ()), **dict(parts.pop("multimodal_output", None) or {}), **parts}
    if not parts:
        named = {"answer": output}
    seen: dict[int, Any] = {}  # kept, or another one could get the place of one that is gone
    found: dict[str, Any] = {}
    for name, value in walked(named, ""):
        if id(value) not in seen:  # vLLM-Omni hands some out under two names
            seen[id(value)] = value
            found[name] = _tensor(value)
    return found


def save_outputs(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write tensors of torch's to a file."""
    from safetensors.torch import save_file  # noqa: PLC0415 - it imports torch

    with _whole(path) as part:
        save_file(dict(tensors), part)


def save_state(path: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Write what each rank's worker said of a session to a file."""
    with _whole(path) as part:
        part.write_text(json.dumps(ranks) + "\n")


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Where to write a file that shall be whole as soon as it is there."""
    part = path.with_suffix(".part")
    yield part
    part.rename(path)


def walked(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every number and every array in nested mappings and lists, by the name under which it stands."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from walked(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from walked(item, f"{name}.{number}" if len(value) > 1 else name)
    elif isinstance(value, bool | int | float) or hasattr(value, "__array__"):
        yield name, value
    elif hasattr(value, "__array_interface__"):  # a picture of Pillow's
        yield name, np.asarray(value)


def _tensor(value: Any) -> Any:
    import torch  # noqa: PLC0415 - seconds

    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous().clone()
    return torch.from_numpy(np.array(value, order="C"))

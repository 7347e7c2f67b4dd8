"""What of a session is still where it was after a park, or stayed there: taken back, named and said."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from vllm_omni_session_state.accounting.footprint import footprint
from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.offload.arrays import Memory, weakly
from vllm_omni_session_state.offload.pack import Stay
from vllm_omni_session_state.offload.slots import TensorSlot
from vllm_omni_session_state.offload.tree_spec import type_name


def still_there(watched: dict[int, Memory], names: dict[int, set[str]]) -> dict[int, Memory]:
    """Let go of memory, and take back what is still there; ``names`` are those of its values."""
    back = {index: weakly(memory) for index, memory in watched.items()}
    watched.clear()
    alive = {index: memory for index, again in back.items() if (memory := again()) is not None}
    for name in sorted({name for index in alive for name in names[index]}):
        log_once(
            logging.WARNING,
            ("outside", name),
            "parking a session does not free its %s: something outside the session holds it too",
            name,
        )
    return alive


def say_what_stays(stays: Iterable[Stay]) -> None:
    """Say of each value that a park leaves where it is, once by name and kind, if it has bytes."""
    groups: dict[tuple[str, str], list[Stay]] = {}
    for stay in stays:
        groups.setdefault((stay.name, type_name(stay.value)), []).append(stay)
    for (name, kind), group in groups.items():
        nbytes = footprint(*(stay.value for stay in group)).nbytes
        if nbytes:
            log_once(
                logging.WARNING,
                ("stays", name, kind),
                "parking a session leaves %d bytes of its %s where they are, in a %s: %s",
                *(nbytes, name, kind, group[0].why),
            )


def names_of(bones: Any) -> dict[int, set[str]]:
    """Names of the values of which a tensor lies in a storage, by its index."""
    found: dict[int, set[str]] = {}
    for values in bones.values():
        for name, value in values.items():
            stack, seen = [value], set[int]()
            while stack:
                item = stack.pop()
                if isinstance(item, TensorSlot):
                    found.setdefault(item.storage, set()).add(name)
                elif id(item) not in seen:
                    seen.add(id(item))
                    if isinstance(item, dict):
                        stack.extend(item.values())
                    elif isinstance(item, list | tuple) or hasattr(item, "maxlen"):
                        stack.extend(item)
    return found

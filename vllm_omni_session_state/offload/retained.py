"""What of a session is still where it was after a park, or stayed there: taken back, named and said."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from vllm_omni_session_state.accounting.footprint import footprint
from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.offload import schema
from vllm_omni_session_state.offload.memory import Memory, let_go
from vllm_omni_session_state.offload.pack import Kept, type_name


def names_of(tree: schema.Tree) -> dict[int, set[str]]:
    """Names of the values of which a tensor or an array lies in a storage, by its number."""
    found: dict[int, set[str]] = {}
    nodes: list[Any] = tree.nodes
    root: Any = tree.root
    for bucket in nodes[root].parts[1::2]:
        parts = nodes[bucket].parts
        for name, part in zip(parts[::2], parts[1::2], strict=True):
            stack, seen = [(nodes, part)], set[tuple[int, int]]()
            while stack:
                table, number = stack.pop()
                if type(number) is not int or (id(table), number) in seen:
                    continue
                seen.add((id(table), number))
                node = table[number]
                if isinstance(node, schema.Container):
                    stack += zip([table] * len(node.parts), node.parts, strict=True)
                elif isinstance(node, schema.Tensor | schema.Array):
                    found.setdefault(node.storage, set()).add(name)
                elif isinstance(node, schema.Registered):
                    stack.append((node.tree.nodes, node.tree.root))
    return found


def still_there(watched: dict[int, Memory], names: dict[int, set[str]]) -> dict[int, Memory]:
    """Let go of memory, and take back what is still there; ``names`` are those of its values."""
    alive = let_go(watched)
    for name in sorted({name for index in alive for name in names[index]}):
        log_once(
            logging.WARNING,
            ("outside", name),
            "parking a session does not free its %s: something outside the session holds it too",
            name,
        )
    return alive


def say_what_stays(kept: Iterable[Kept]) -> None:
    """Say of each value that a park leaves where it is, once by name and kind, if it has bytes."""
    groups: dict[tuple[str, str], list[Kept]] = {}
    for each in kept:
        groups.setdefault((each.name, type_name(each.value)), []).append(each)
    for (name, kind), group in groups.items():
        nbytes = footprint(*[each.value for each in group]).nbytes
        if nbytes:
            log_once(
                logging.WARNING,
                ("stays", name, kind),
                "parking a session leaves %d bytes of its %s where they are, in a %s: %s",
                *(nbytes, name, kind, group[0].why),
            )

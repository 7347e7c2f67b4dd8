"""How a taken-out tree travels: as it is, through the codec of tiers, through a file's document."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from vllm_omni_session_state.offload.pack import pack, pack_whole
from vllm_omni_session_state.offload.schema import Tree
from vllm_omni_session_state.offload.unpack import unpack
from vllm_omni_session_state.omni.worker import engine_kv


def take_out(state: Any) -> Any:
    """One session's KV, out of the engine, whose blocks of that session are all free afterwards."""
    tree = engine_kv.gather(state)
    state.close()
    return tree


def by_reference(tree: Any) -> Any:
    """As it is."""
    return tree


def _copied(storages: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    return [storage.clone() for storage in storages]


def packed(tree: Any) -> Any:
    """Apart, every storage to another place, and together, as by the host tier."""
    apart = pack(tree)
    return unpack(apart.tree, _copied(apart.storages))


def written(tree: Any) -> Any:
    """The same through JSON, as by the disk tier."""
    apart = pack_whole(tree)
    read = msgspec.json.decode(msgspec.json.encode(apart.tree), type=Tree)
    return unpack(read, _copied(apart.storages))


WAYS = (by_reference, packed, written)

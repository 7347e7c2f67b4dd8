"""How a taken-out tree travels: as it is, through the codec of tiers, through a file's document."""

from __future__ import annotations

import json
from typing import Any

import torch

from vllm_omni_session_state.offload import decode, tree_spec
from vllm_omni_session_state.offload.pack import pack, unpack
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
    return unpack(apart.skeleton, _copied(apart.storages))


def written(tree: Any) -> Any:
    """The same through JSON, as by the disk tier."""
    apart = pack(tree)
    document = tree_spec.write(apart.skeleton, apart.storages)
    storages = _copied([*apart.storages, *document.extra])
    read = decode.read(json.loads(json.dumps(document.document)), storages)
    return unpack(read, storages)


WAYS = (by_reference, packed, written)

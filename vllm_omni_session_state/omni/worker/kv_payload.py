"""The plain tree that one session's engine KV is, outside of the engine.

::

    branches: name -> {blocks, prefill, chunks, compacted, committed}     whole numbers, one set a branch
    keys:     one tensor a layer, (blocks, block_size, heads, head_size)  the branches' blocks, in their order
    values:   likewise
    cross:    cache name -> branch -> ([K a layer], [V a layer]), or None

``chunks`` is where the model stands, ``compacted`` the tokens that have left the block table, ``committed``
what the engine says of its commits. Not here: the engine's pool.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_omni_session_state.base.errors import BadPayloadError
from vllm_omni_session_state.state.paged_kv import PagedKV

_PARTS = frozenset({"branches", "keys", "values", "cross"})
_NUMBERS = frozenset({"blocks", "prefill", "chunks", "compacted", "committed"})


def branch_of(adapter: Any, *, blocks: int, committed: int) -> dict[str, int]:
    """Where a branch stands.

    Args:
        adapter: The engine's ``ARDiffusionRequestAdapter``.
        blocks: The length of its block table.
        committed: Tokens that the engine's state says it has committed.
    """
    return {
        "blocks": blocks,
        "prefill": adapter._prefill,
        "chunks": adapter._completed_chunks,
        "compacted": adapter.compacted_tokens,
        "committed": committed,
    }


def place(adapter: Any, branch: dict[str, int]) -> None:
    """Have a new adapter stand where the branch stood."""
    adapter._prefill = branch["prefill"]
    adapter._completed_chunks = branch["chunks"]
    adapter.compacted_tokens = branch["compacted"]


def copy_of(cross: Any) -> Any:
    """Cross-attention K/V in containers of its own, which nobody else fills; the tensors themselves.

    The engine never writes to a tensor that it has published: it replaces the lists.
    """
    if cross is None:
        return None
    return {
        cache: {branch: (list(keys), list(values)) for branch, (keys, values) in by_branch.items()}
        for cache, by_branch in cross.items()
    }


def check(tree: Any, state: Any) -> None:
    """Refuse what is no such tree, or is of an engine of another shape.

    Args:
        tree: Anything.
        state: The engine's ``ARDiffusionKVState`` that it should be put into.

    Raises:
        BadPayloadError: And says what is wrong.
    """
    kv = state.kv_cache
    _want(isinstance(tree, dict) and set(tree) == _PARTS, f"it wants a dict of {sorted(_PARTS)}")
    branches = tree["branches"]
    _want(
        isinstance(branches, dict) and set(branches) == set(state.adapters),
        f"the engine has the branches {sorted(state.adapters)}",
    )
    for name, branch in branches.items():
        _check_branch(name, branch, block_size=kv.block_size, chunk_size=state.adapters[name]._chunk_size)
    blocks = sum(branch["blocks"] for branch in branches.values())
    pool = kv.key_cache(0)
    layers, shape = kv.num_layers if blocks else 0, (blocks, *pool.shape[1:])
    for part in ("keys", "values"):
        _check_layers(part, tree[part], layers=layers, shape=shape, like=pool)
    if tree["cross"] is not None:
        _check_cross(tree["cross"], state)


def _check_branch(name: str, branch: Any, *, block_size: int, chunk_size: int) -> None:
    _want(
        isinstance(branch, dict)
        and set(branch) == _NUMBERS
        and all(type(number) is int and number >= 0 for number in branch.values()),
        f"branch {name!r} is not {sorted(_NUMBERS)}, each a whole number from 0 on",
    )
    stands = branch["prefill"] + branch["chunks"] * chunk_size - branch["compacted"]
    _want(
        stands == branch["blocks"] * block_size,
        f"branch {name!r} stands at {stands} tokens and has {branch['blocks']} blocks of {block_size}",
    )


def _check_layers(
    part: str, content: Any, *, layers: int, shape: tuple[int, ...], like: torch.Tensor
) -> None:
    _want(isinstance(content, list) and len(content) == layers, f"{part!r} wants a list of {layers} layers")
    for tensor in content:
        _want(
            isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == shape and tensor.dtype == like.dtype,
            f"{part!r} wants tensors of shape {shape} and type {like.dtype}",
        )


def _check_cross(cross: Any, state: Any) -> None:
    kv = state.kv_cache
    pool = kv.key_cache(0)
    _want(
        isinstance(cross, dict) and set(cross) <= set(kv.cross_attention_lengths),
        f"the engine has the cross-attention caches {sorted(kv.cross_attention_lengths)}",
    )
    for cache, by_branch in cross.items():
        _want(
            isinstance(by_branch, dict) and set(by_branch) <= set(state.adapters),
            f"cross-attention {cache!r} has branches that the engine has not",
        )
        heads, length = kv.cross_attention_kv_heads[cache], kv.cross_attention_lengths[cache]
        for pair in by_branch.values():
            _want(
                isinstance(pair, tuple) and len(pair) == 2, f"cross-attention {cache!r} wants pairs of lists"
            )
            for part in pair:
                shape = (length, heads, pool.shape[-1])
                _check_layers(cache, part, layers=kv.num_layers, shape=shape, like=pool)
                _want(
                    all(tensor.device == pool.device for tensor in part),
                    f"cross-attention {cache!r} must lie on {pool.device}",
                )


def _want(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise BadPayloadError(PagedKV.__name__, otherwise)

"""One session's KV in vLLM-Omni's AR-Diffusion engine: counted, taken out, put back.

Taking out gathers the session's blocks, one copy for K and one for V of each layer, whatever the number of
branches. Putting back writes them into fresh blocks, under new adapter objects: the engine keeps what it
staged of a session's history by the identity of its adapter, and what was staged is of other blocks.

The engine publishes last what others look at, and so does this: until every layer is written, the session's
state is the closed one that it was.

Not here: when any of this is done.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

from vllm_omni_session_state.accounting.allocations import HOST, Allocation, Blocks
from vllm_omni_session_state.accounting.footprint import footprint
from vllm_omni_session_state.base.errors import (
    KVOccupiedError,
    MidChunkError,
    PoolFullError,
    SeamMismatchError,
)
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.omni.hooks import seams
from vllm_omni_session_state.omni.worker import kv_payload
from vllm_omni_session_state.state.paged_kv import PagedKV
from vllm_omni_session_state.state.session import SessionState

NAME = "engine_kv"
"""The name under which a session holds its engine KV."""


def join(session: SessionState, state: Any, sessions: MutableMapping[str, Any] | None = None) -> PagedKV:
    """Have ``session`` hold the engine's ``state`` as a state object; of one that it holds already, that one.

    Args:
        session: On the device.
        state: The engine's ``ARDiffusionKVState`` of that session.
        sessions: The runner's table of states, if it has one; one that is parked is not in it.

    Raises:
        SeamMismatchError: If the engine does not look as expected; nothing has changed.
    """
    held = session.get(NAME)
    if isinstance(held, PagedKV) and held.resident and held.view() is state:
        return held
    return session.put(NAME, PagedKV(SessionKV(state, sessions)))


def gather(state: Any) -> dict[str, Any]:
    """A copy of one session's KV; the engine goes on with it until its state is closed.

    Args:
        state: The engine's ``ARDiffusionKVState``, open.

    Returns:
        A plain tree of new tensors, which ``pack()`` and the tiers move; see ``kv_payload``.

    Raises:
        MidChunkError: In the middle of a chunk; like any other error, it has changed nothing.
    """
    kv, branches, blocks = state.kv_cache, {}, []
    for name, adapter in state.adapters.items():
        table = kv.block_table(adapter)
        if uncommitted := _uncommitted(kv, adapter, table):
            raise MidChunkError(display_id(state.session_id), branch=name, tokens=uncommitted)
        stands = int(adapter.num_computed_tokens)
        if kv.null_block_id in table or stands != len(table) * kv.block_size:
            # At a commit the engine closes the gap of an evicted chunk. A table that is otherwise could be
            # taken out and not put back, or its gap would be attended to.
            where = f"{type(kv).__module__}.{type(kv).__qualname__}.block_table"
            expected = f"blocks for the {stands} tokens that are committed and no null block"
            raise SeamMismatchError(where, expected=expected, found=f"{table}")
        branches[name] = kv_payload.branch_of(adapter, blocks=len(table), committed=state._committed[name])
        blocks += table
    keys, values = _read_blocks(kv, blocks)
    cross = kv._cross_sessions.get(state.session_id)
    return {"branches": branches, "keys": keys, "values": values, "cross": kv_payload.copy_of(cross)}


def put_back(state: Any, tree: Any) -> None:
    """Give the engine back what ``gather()`` copied, bit for bit, in blocks that are this session's alone.

    Args:
        state: The engine's ``ARDiffusionKVState`` of that session: the closed one, or a new, empty one.
        tree: Unharmed, also where this fails. Its keys and values may lie on any device.

    Raises:
        BadPayloadError: If the tree is no such tree, or is of an engine of another shape.
        KVOccupiedError: If the engine holds some of the session.
        PoolFullError: If there are too few free blocks. After any error the pool is as it was.
    """
    kv = state.kv_cache
    kv_payload.check(tree, state)
    _refuse_occupied(state)
    _refuse_full(kv, tree)
    empty = {adapter.request_id: adapter for adapter in state.adapters.values() if not state._closed}
    adapters: dict[str, Any] = {}
    try:
        blocks: list[int] = []
        for name, branch in tree["branches"].items():
            adapters[name] = adapter = kv.begin_request(state.adapters[name].request_id)
            if branch["blocks"]:
                kv.allocate_token_slots(adapter, branch["blocks"] * kv.block_size)
                blocks += kv.block_table(adapter)
            kv_payload.place(adapter, branch)  # after the allocation, which reads where the adapter stands
        _write_blocks(kv, blocks, tree["keys"], tree["values"])
    except BaseException:
        for adapter in adapters.values():
            kv.end_request(adapter)
        kv._adapters.update(empty)
        raise
    _publish(state, adapters, tree)


def _publish(state: Any, adapters: dict[str, Any], tree: dict[str, Any]) -> None:
    """Have the engine's state stand where the tree says; nothing here can fail."""
    cross = kv_payload.copy_of(tree["cross"])
    if cross is not None:
        state.kv_cache._cross_sessions[state.session_id] = cross
    state.adapters = {name: adapters[name] for name in state.adapters}
    state._committed = {name: tree["branches"][name]["committed"] for name in state.adapters}
    state._paged_pending = dict.fromkeys(state.adapters)
    state._closed = False


def _uncommitted(kv: Any, adapter: Any, table: Sequence[int]) -> int:
    """Tokens of a branch that have a place in the pool and are not committed."""
    return max(0, len(table) * int(kv.block_size) - int(adapter.num_computed_tokens))


def _refuse_occupied(state: Any) -> None:
    kv, session = state.kv_cache, display_id(state.session_id)
    for name, adapter in state.adapters.items():
        registered = kv._adapters.get(adapter.request_id)
        if registered is not None and (state._closed or registered is not adapter):
            raise KVOccupiedError(session, f"another state of it has begun branch {name!r}")
        if kv.block_table(adapter):
            raise KVOccupiedError(session, f"branch {name!r} has blocks")
        if not state._closed and adapter._completed_chunks:
            raise KVOccupiedError(session, f"branch {name!r} has committed chunks")
    if state.session_id in kv._cross_sessions:
        raise KVOccupiedError(session, "it has cross-attention K/V")


def _refuse_full(kv: Any, tree: dict[str, Any]) -> None:
    wanted, free = blocks_of(tree), free_blocks(kv)
    if wanted > free:
        raise PoolFullError("blocks", wanted=wanted, room=free)
    places = kv.session_capacity - len(kv._cross_sessions)
    if tree["cross"] is not None and places < 1:
        raise PoolFullError("places for a session's cross-attention K/V", wanted=1, room=places)


def blocks_of(tree: dict[str, Any]) -> int:
    """How many free blocks ``put_back()`` needs for that tree."""
    return sum(branch["blocks"] for branch in tree["branches"].values())


def most_nbytes(kv_cache: Any) -> int:
    """Bytes that one session holds at most while nobody uses it.

    These are sink and window of each branch that this rank runs, and cross-attention K/V.

    Raises:
        SeamMismatchError: If the engine does not look as expected.
    """
    check_cache(kv_cache)
    blocks = kv_cache.num_local_kv_branches * (kv_cache.config.sink_chunks + kv_cache.config.window_chunks)
    page = kv_cache.spec.page_size_bytes * kv_cache.num_layers
    return int(blocks * page + kv_cache.cross_attention_bytes_per_session)


def free_blocks(kv_cache: Any) -> int:
    """How many blocks of the engine's pool are nobody's."""
    return int(kv_cache.manager.block_pool.get_num_free_blocks())


def _read_blocks(kv: Any, blocks: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Copies of some blocks of each layer, ``(blocks, block_size, heads, head_size)``: keys and values."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    if blocks:
        with torch.inference_mode(False), torch.no_grad():
            index = torch.tensor(blocks, device=kv.key_cache(0).device)
            for layer in range(kv.num_layers):
                keys.append(kv.key_cache(layer).index_select(0, index))
                values.append(kv.value_cache(layer).index_select(0, index))
    return keys, values


def _write_blocks(
    kv: Any, blocks: list[int], keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> None:
    """The reverse."""
    if blocks:
        with torch.inference_mode(False), torch.no_grad():
            index = torch.tensor(blocks, device=kv.key_cache(0).device)
            for layer in range(kv.num_layers):
                for pool, content in (
                    (kv.key_cache(layer), keys[layer]),
                    (kv.value_cache(layer), values[layer]),
                ):
                    pool.index_copy_(0, index, content.to(pool.device))


class SessionKV:
    """One session's KV as ``PagedKV`` asks for it: ``EngineKV`` over the engine's ``ARDiffusionKVState``.

    Args:
        state: The engine's.
        sessions: Where the runner finds it while it is open.

    Raises:
        SeamMismatchError: If the engine does not look as expected.
    """

    def __init__(self, state: Any, sessions: MutableMapping[str, Any] | None = None) -> None:
        check_engine(state)
        self.state: Any = state
        self._sessions: MutableMapping[str, Any] = {} if sessions is None else sessions
        self._pool: tuple[str, int, int, int] | None = None

    @property
    def closed(self) -> bool:
        """Whether the engine's state is closed."""
        return bool(self.state._closed)

    def blocks(self) -> Blocks:
        """The session's blocks, each with its bytes in all layers' K and V."""
        kv = self.state.kv_cache
        if self.closed:
            return Blocks()
        if self._pool is None:  # it never moves
            first = kv.key_cache(0)
            pools = [pool(layer) for layer in range(kv.num_layers) for pool in (kv.key_cache, kv.value_cache)]
            pages = [pool.stride(0) * pool.element_size() for pool in pools]
            self._pool = _device_of(first), first.data_ptr(), pages[0], sum(pages)
        device, start, page, nbytes = self._pool
        tables = [kv.block_table(adapter) for adapter in self.state.adapters.values()]
        numbers = {block for table in tables for block in table} - {kv.null_block_id}
        return Blocks(Allocation(device, start + number * page, nbytes) for number in numbers)

    def beside(self) -> Any:
        """The session's cross-attention K/V by cache name and branch, ``None`` where there is none."""
        return None if self.closed else self.state.kv_cache._cross_sessions.get(self.state.session_id)

    def in_flight(self) -> tuple[str, ...]:
        """The branches whose block table is ahead of what is committed."""
        kv = self.state.kv_cache
        adapters = {} if self.closed else self.state.adapters
        return tuple(
            name for name, adapter in adapters.items() if _uncommitted(kv, adapter, kv.block_table(adapter))
        )

    def gather(self) -> dict[str, Any]:
        """As the function of this name."""
        return gather(self.state)

    def put_back(self, tree: Any) -> None:
        """As the function of this name, if the runner has a place: with one too many, blocks run out."""
        session, places = self.state.session_id, self.state.kv_cache.session_capacity - len(self._sessions)
        if session not in self._sessions and places < 1:
            raise PoolFullError("places for a session", wanted=1, room=max(0, places))
        put_back(self.state, tree)
        self._sessions[session] = self.state

    def reopen(self) -> None:
        """The engine's ``reset()``, which begins new adapters."""
        self.state.reset()

    def close(self) -> None:
        """The engine's ``close()``; the runner has the state no longer."""
        state: Any = self.state
        if self._sessions.get(state.session_id) is state:
            self._sessions.pop(self.state.session_id)
        state.close()


def check_engine(state: Any) -> None:
    """Compare the engine's classes, and their objects, with what this file reads and sets of them.

    Args:
        state: The engine's ``ARDiffusionKVState`` of any session.

    Raises:
        SeamMismatchError: For the first difference.
    """
    seams.check(type(state), seams.KV_STATE_SEAMS)
    seams.check_fields(state, seams.KV_STATE_FIELDS)
    check_cache(getattr(state, "kv_cache", None))
    for adapter in state.adapters.values():
        seams.check_fields(adapter, seams.KV_ADAPTER_FIELDS)


def check_cache(kv_cache: Any) -> None:
    """The same for the engine's ``ARDiffusionKVCache`` alone."""
    seams.check(type(kv_cache), seams.KV_CACHE_SEAMS)
    seams.check_fields(kv_cache, seams.KV_CACHE_FIELDS)
    seams.check_fields(getattr(kv_cache, "config", None), seams.KV_CONFIG_FIELDS)
    seams.check_fields(getattr(kv_cache, "spec", None), seams.KV_SPEC_FIELDS)
    pool = getattr(getattr(kv_cache, "manager", None), "block_pool", None)
    seams.check(type(pool), seams.KV_POOL_SEAMS)


def _device_of(pool: torch.Tensor) -> str:
    return next((each.device for each in footprint(pool).allocations), HOST)

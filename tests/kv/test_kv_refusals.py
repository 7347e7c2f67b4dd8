"""What cannot be taken out or put back is refused, and a fault in between changes nothing."""

import pytest
from engine import (
    FRAMES_PER_BLOCK,
    LIKE_DREAMZERO,
    LIKE_LINGBOT,
    SHAPES,
    TOKENS,
    Shape,
    all_free,
    frame,
    free,
    make_pool,
    nbytes,
    new_state,
    write,
)
from rollout import Rollout
from travel_kv import packed, take_out

from vllm_omni_session_state.base.errors import (
    KVOccupiedError,
    MidChunkError,
    PoolFullError,
    SeamMismatchError,
)
from vllm_omni_session_state.omni.worker import engine_kv, kv_payload

pytestmark = pytest.mark.host

LONG_PAST_THE_WINDOW = 11


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_the_middle_of_a_chunk_nothing_is_taken_out(shape):
    pool = make_pool(shape)
    rollout = Rollout(pool, shape, frames=2)
    branch = shape.branches[-1]
    new = [frame(shape.layers, 1)]
    write(rollout.state, branch, new, commit=False)
    handle, before = rollout.handle, free(pool)
    assert handle.staged == ((branch,),)
    for attempt in (engine_kv.gather, lambda _: handle.export_payload()):
        with pytest.raises(MidChunkError, match=f"branch '{branch}' has {TOKENS} tokens") as raised:
            attempt(rollout.state)
        assert raised.value.tokens == TOKENS
    assert "'a'" not in str(raised.value), "an id in the clear"
    assert free(pool) == before
    assert handle.nbytes == nbytes(rollout.state), "the block in flight is counted"
    rollout.state.commit_paged_context(branch)
    rollout.frames[branch] += new
    assert handle.staged is None
    engine_kv.put_back(rollout.state, take_out(rollout.state))
    rollout.check()


def test_too_few_blocks_leave_the_pool_as_it_was():
    shape = Shape(window=4, sessions=1)
    pool = make_pool(shape)
    rollout = Rollout(pool, shape, frames=4)
    tree = take_out(rollout.state)
    other = Rollout(pool, shape, "other")
    other.run(3)
    before, adapters = free(pool), dict(pool._adapters)
    for anew in (False, True):
        state = new_state(pool, "a") if anew else rollout.state
        with pytest.raises(PoolFullError, match=r"8 are wanted; .*gpu_memory_fraction") as raised:
            engine_kv.put_back(state, tree)
        assert (raised.value.wanted, raised.value.room) == (8, before)
        assert free(pool) == before
    state.close()
    assert pool._adapters == adapters
    other.check()
    other.state.close()
    engine_kv.put_back(rollout.state, tree)
    rollout.check()


def test_no_place_for_cross_attention_takes_no_block():
    pool = make_pool(LIKE_LINGBOT)
    tree = take_out(Rollout(pool, LIKE_LINGBOT, frames=1).state)
    for name in ("b", "c", "d"):
        Rollout(pool, LIKE_LINGBOT, name).encode("text")
    before, state = free(pool), new_state(pool, "a")
    with pytest.raises(PoolFullError, match="cross-attention") as raised:
        engine_kv.put_back(state, tree)
    assert (raised.value.wanted, raised.value.room) == (1, 0)
    assert free(pool) == before
    pool.release_cross_attention("b")
    engine_kv.put_back(state, tree)


def test_no_place_among_the_runners_sessions_is_no_room_although_there_are_blocks():
    """They are for the windows of the sessions that have a place."""
    pool = make_pool(LIKE_LINGBOT)
    sessions = {name: Rollout(pool, LIKE_LINGBOT, name).state for name in "bcd"}
    handle = engine_kv.SessionKV(Rollout(pool, LIKE_LINGBOT).state, sessions)
    tree = take_out(handle.state)
    assert tree["cross"] is None
    with pytest.raises(PoolFullError, match="0 places for a session free and 1 are wanted"):
        handle.put_back(tree)
    assert set(sessions) == set("bcd")
    assert handle.closed
    del sessions["b"]
    handle.put_back(tree)
    assert sessions["a"] is handle.state


def test_a_session_that_the_engine_holds_is_not_written_over():
    pool = make_pool(LIKE_DREAMZERO)
    rollout = Rollout(pool, LIKE_DREAMZERO, frames=2)
    gone, tree = rollout.state, take_out(rollout.state)
    twin = Rollout(pool, LIKE_DREAMZERO)  # a step came, and the runner began the session anew

    def refused(state, why):
        before = free(pool)
        with pytest.raises(KVOccupiedError, match=why):
            engine_kv.put_back(state, tree)
        assert free(pool) == before
        twin.check()

    refused(gone, "another state of it has begun")
    twin.encode("text")
    refused(twin.state, "cross-attention")
    twin.state.clear_cross_attention()
    twin.cross = {}
    twin.run(1)
    refused(gone, "another state of it has begun")
    refused(twin.state, "has blocks")
    twin.state.close()
    engine_kv.put_back(gone, tree)
    rollout.check()


def test_chunks_that_left_no_block_are_a_beginning_all_the_same():
    """A pool that keeps nothing across a boundary: positions are all that a session has."""
    pool = make_pool(LIKE_DREAMZERO)
    state = new_state(pool, "a")
    for adapter in state.adapters.values():
        adapter._completed_chunks, adapter.compacted_tokens = 3, 3 * TOKENS
    tree = engine_kv.gather(state)
    assert (tree["keys"], tree["values"]) == ([], [])
    with pytest.raises(KVOccupiedError, match="committed chunks"):
        engine_kv.put_back(state, tree)
    state.close()
    engine_kv.put_back(state, packed(tree))
    assert [a.completed_chunks for a in state.adapters.values()] == [3, 3]
    kv_payload.check(tree, state)


@pytest.mark.parametrize("shape", [LIKE_DREAMZERO, LIKE_LINGBOT], ids=["DreamZero", "LingBot"])
@pytest.mark.parametrize("part", ["key_cache", "value_cache"])
def test_a_fault_at_any_layer_changes_nothing_on_the_way_out(shape, part, monkeypatch):
    pool = make_pool(shape)
    rollout = Rollout(pool, shape, frames=LONG_PAST_THE_WINDOW)
    before = free(pool)
    for layer in range(shape.layers):
        with monkeypatch.context() as patch:
            break_at(patch, pool, part, layer, after=part == "key_cache" and layer == 0)
            with pytest.raises(OSError, match="on purpose"):
                take_out(rollout.state)
        assert free(pool) == before
        rollout.check()
    rollout.run(1)
    rollout.check()


@pytest.mark.parametrize("anew", [False, True], ids=["the closed state", "a new state"])
@pytest.mark.parametrize("shape", [LIKE_DREAMZERO, LIKE_LINGBOT], ids=["DreamZero", "LingBot"])
@pytest.mark.parametrize("part", ["key_cache", "value_cache"])
def test_a_fault_at_any_layer_leaves_every_block_free_on_the_way_back(shape, part, anew, monkeypatch):
    pool = make_pool(shape)
    rollout = Rollout(pool, shape, frames=LONG_PAST_THE_WINDOW)
    tree = take_out(rollout.state)
    if anew:
        rollout.state = new_state(pool, "a")
    adapters, registered = dict(rollout.state.adapters), dict(pool._adapters)
    for layer in range(shape.layers):
        with monkeypatch.context() as patch:
            break_at(patch, pool, part, layer, after=2 if part == "key_cache" and layer == 0 else 0)
            with pytest.raises(OSError, match="on purpose"):
                engine_kv.put_back(rollout.state, tree)
        assert free(pool) == pool.managed_num_blocks - 1
        assert pool._cross_sessions == {}
        assert pool._adapters == registered
        assert rollout.state.adapters == adapters
        assert rollout.state._closed is not anew
    engine_kv.put_back(rollout.state, tree)
    rollout.run(1)
    rollout.check()


def break_at(patch, pool, part, layer, *, after):
    """Have that layer's K or V not be reached, ``after`` so many times that it is only looked at."""
    whole, looks = getattr(pool, part), [None] * after

    def reach(asked):
        if asked == layer and not looks:
            raise OSError("on purpose")
        if asked == layer:
            looks.pop()
        return whole(asked)

    patch.setattr(pool, part, reach)


def test_a_fault_between_two_branches_gives_the_first_ones_blocks_back(monkeypatch):
    pool = make_pool(LIKE_DREAMZERO)
    rollout = Rollout(pool, LIKE_DREAMZERO, frames=3)
    tree = take_out(rollout.state)
    allocate = pool.allocate_token_slots

    def fails_for_the_second(adapter, tokens):
        if adapter.request_id.endswith("negative"):
            raise RuntimeError("AR-Diffusion KV pool exhausted")
        return allocate(adapter, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(pool, "allocate_token_slots", fails_for_the_second)
        with pytest.raises(RuntimeError, match="exhausted"):
            engine_kv.put_back(rollout.state, tree)
    all_free(pool)
    engine_kv.put_back(rollout.state, tree)
    rollout.check()


def test_a_table_with_a_gap_is_refused(monkeypatch):
    """An engine that does not close the gap of an evicted chunk keeps another kind of table."""
    pool = make_pool(LIKE_DREAMZERO)
    rollout = Rollout(pool, LIKE_DREAMZERO, frames=3)
    manager = pool.manager.coordinator.single_type_managers[0]
    monkeypatch.setattr(manager, "compact_block_table", lambda _: 0)
    rollout.run(FRAMES_PER_BLOCK)
    assert pool.null_block_id in pool.block_table(rollout.state.adapters["positive"])
    with pytest.raises(SeamMismatchError, match="no null block"):
        take_out(rollout.state)
    assert not rollout.state._closed


def test_a_table_that_is_short_is_refused_before_it_leaves():
    """It could not come back: an engine that counts tokens otherwise keeps its sessions in the pool."""
    pool = make_pool(LIKE_LINGBOT)
    rollout = Rollout(pool, LIKE_LINGBOT, frames=3)
    before = free(pool)
    rollout.state.adapters["main"]._completed_chunks += 1
    with pytest.raises(SeamMismatchError, match=f"blocks for the {4 * TOKENS} tokens"):
        take_out(rollout.state)
    assert free(pool) == before
    rollout.state.adapters["main"]._completed_chunks -= 1
    rollout.check()

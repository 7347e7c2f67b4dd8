"""The handle in its session: counted by block, moved with the rest, replaced with the runner's state."""

import pytest
import torch
from engine import LIKE_DREAMZERO, LIKE_LINGBOT, SHAPES, all_free, make_pool, nbytes, new_state
from rollout import Rollout

from vllm_omni_session_state import LatentBuffer, SessionState
from vllm_omni_session_state.base.errors import NotAllocatedError, PoolFullError
from vllm_omni_session_state.omni.worker import engine_kv
from vllm_omni_session_state.state.paged_kv import PagedKV

pytestmark = pytest.mark.host


def test_a_session_counts_its_blocks_and_no_others():
    pool = make_pool(LIKE_LINGBOT)
    one, two = (Rollout(pool, LIKE_LINGBOT, name, frames=n) for name, n in (("one", 9), ("two", 3)))
    handles = [rollout.handle for rollout in (one, two)]
    assert [handle.nbytes for handle in handles] == [nbytes(one.state), nbytes(two.state)]
    found = [handle.footprint().allocations for handle in handles]
    assert not set(found[0]) & set(found[1])
    layers = range(LIKE_LINGBOT.layers)
    caches = [cache(layer) for layer in layers for cache in (pool.key_cache, pool.value_cache)]
    for rollout, held in zip((one, two), found, strict=True):
        for block in pool.window_block_ids(rollout.state.adapters["main"]):
            (unit,) = [each for each in held if each.start == pool.key_cache(0)[block].data_ptr()]
            assert unit.nbytes == sum(cache[block].nbytes for cache in caches)
    session = SessionState("both")
    for name, handle in zip("ab", handles, strict=True):
        session.put(name, handle)
    assert session.nbytes == nbytes(one.state) + nbytes(two.state), "they overlap, or the pool was counted"
    cross = sum(
        t.numel() * 2
        for by in pool._cross_sessions["one"].values()
        for p in by.values()
        for part in p
        for t in part
    )
    assert handles[0].nbytes == 5 * LIKE_LINGBOT.page + cross
    held = pool._cross_sessions["two"]["text"]["main"][0][0]  # by somebody else, who outlives the session
    assert handles[1].evict() == nbytes_two(two, held)
    assert not handles[1].resident
    assert handles[1].nbytes == 0


def nbytes_two(rollout, held):
    cross = sum((k.numel() + v.numel()) * 2 for content in rollout.cross.values() for k, v in content)
    return 3 * LIKE_LINGBOT.page + cross - held.numel() * 2


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_session_holds_more_between_its_forwards_than_is_said_of_all(shape):
    pool = make_pool(shape)
    rollout = Rollout(pool, shape, frames=1)
    held = []
    for _ in range(shape.sink + shape.window + 3):
        rollout.run(1)
        held.append(rollout.handle.nbytes)
    assert max(held) == held[-1] == engine_kv.most_nbytes(pool)


def test_a_whole_session_leaves_and_comes_back_with_its_kv():
    """The session's own pair carries it: KV and model state, or neither."""
    pool = make_pool(LIKE_DREAMZERO)
    rollout = Rollout(pool, LIKE_DREAMZERO, frames=4)
    session = SessionState("a")
    latents = session.put("latents", LatentBuffer())
    latents.replace([torch.arange(5)])
    handle = engine_kv.join(session, rollout.state)
    assert engine_kv.join(session, rollout.state) is handle
    part = session.part(lambda _: True)
    session.let_go(part)
    all_free(pool)
    blocker = Rollout(pool, LIKE_DREAMZERO, "blocker")
    blocker.run(3)
    others = [Rollout(pool, LIKE_DREAMZERO, name) for name in ("b", "c")]
    for other in others:
        other.run(3)
    with pytest.raises(PoolFullError):
        session.put_back(part)
    assert session.parked
    assert not latents.resident, "half of it came back"
    blocker.state.close()
    session.put_back(part)
    assert session.get(engine_kv.NAME) is handle
    assert handle.view() is rollout.state
    rollout.check()
    assert latents.view()[0].tolist() == [0, 1, 2, 3, 4]
    session.reset()
    assert rollout.state._closed
    with pytest.raises(NotAllocatedError):
        handle.view()


def test_a_session_joins_with_the_state_that_the_runner_made_last():
    pool = make_pool(LIKE_DREAMZERO)
    session, first = SessionState("a"), new_state(pool, "a")
    handle = engine_kv.join(session, first)
    first.close()
    second = new_state(pool, "a")
    assert engine_kv.join(session, second) is not handle
    assert engine_kv.join(session, second).view() is second
    second.reset()
    assert engine_kv.join(session, second).view() is second
    assert isinstance(session.get(engine_kv.NAME), PagedKV)

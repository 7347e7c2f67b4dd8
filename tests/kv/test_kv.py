"""Out of the engine and back: bit for bit, in new adapters, in few copies."""

import pytest
import torch
from engine import (
    LIKE_DREAMZERO,
    LIKE_LINGBOT,
    SHAPES,
    Shape,
    all_free,
    frame,
    look,
    make_pool,
    new_state,
    write,
)
from rollout import Rollout
from torch.utils._python_dispatch import TorchDispatchMode
from travel_kv import WAYS, packed, take_out

from vllm_omni_session_state.offload.pack import pack
from vllm_omni_session_state.omni.worker import engine_kv

pytestmark = pytest.mark.host

LONG_PAST_THE_WINDOW = 11


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("frames", [0, 1, 3, LONG_PAST_THE_WINDOW])
def test_a_session_that_was_out_is_as_if_it_had_never_been(shape, way, frames):
    pool = make_pool(shape)
    rollout = Rollout(pool, shape, frames=frames)
    for _ in range(3):
        tree = way(take_out(rollout.state))
        all_free(pool)
        disturb(pool)
        engine_kv.put_back(rollout.state, tree)
        rollout.check()
        rollout.run(2)
        rollout.check()
    rollout.state.close()
    all_free(pool)


def disturb(pool):
    """What was in the blocks is gone: nothing can be right because it was never away."""
    for layer in range(pool.num_layers):
        pool.key_cache(layer).fill_(3)
        pool.value_cache(layer).fill_(3)


def test_a_state_made_anew_takes_it_too():
    pool = make_pool(LIKE_LINGBOT)
    rollout = Rollout(pool, LIKE_LINGBOT, frames=LONG_PAST_THE_WINDOW)
    tree = take_out(rollout.state)
    rollout.state = new_state(pool, "a")
    engine_kv.put_back(rollout.state, tree)
    rollout.run(3)
    rollout.check()


def test_sessions_that_take_turns_in_a_pool_for_one_are_each_as_if_alone():
    shape = Shape(sink=2, window=2, sessions=1)
    pool = make_pool(shape)
    trees, rollouts = {}, {}
    for round_ in range(6):
        for name in ("a", "b", "c", "d", "e"):
            if name in trees:
                engine_kv.put_back(rollouts[name].state, trees.pop(name))
                rollouts[name].run(1 + round_ % 3)
            else:
                rollouts[name] = Rollout(pool, shape, name, frames=1)
            rollouts[name].check()
            trees[name] = packed(take_out(rollouts[name].state))
            all_free(pool)


def test_the_branches_need_not_be_at_one_place():
    """A rank that runs one branch of two allocates for that one only."""
    pool = make_pool(LIKE_DREAMZERO)
    rollout = Rollout(pool, LIKE_DREAMZERO)
    for seed in range(4):
        rollout.frames["negative"].append(frame(2, seed))
        write(rollout.state, "negative", rollout.frames["negative"][-1:])
    engine_kv.put_back(rollout.state, take_out(rollout.state))
    rollout.check()


def test_many_blocks_leave_in_as_few_copies_as_the_layers_have_keys_and_values():
    shape = Shape(layers=5, window=9)
    pool = make_pool(shape)
    few, many = Rollout(pool, shape, "few", frames=1), Rollout(pool, shape, "many", frames=9)

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            calls[name] = calls.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    for rollout in (few, many):
        calls = {}
        with Counting():
            tree = take_out(rollout.state)
        assert calls["index_select"] == 2 * shape.layers
        assert not calls.keys() & {"index", "copy_", "clone", "cat"}
        assert len(pack([tree["keys"], tree["values"]]).storages) == 2 * shape.layers
        calls = {}
        with Counting():
            engine_kv.put_back(rollout.state, tree)
        assert calls["index_copy_"] == 2 * shape.layers
        assert not calls.keys() & {"index_put_", "copy_", "clone", "cat"}
        rollout.check()


def test_cross_attention_tensors_are_handed_over_and_aliases_stay_aliases():
    pool = make_pool(LIKE_DREAMZERO)
    rollout = Rollout(pool, LIKE_DREAMZERO, frames=1)
    by_branch = pool._cross_sessions["a"]["text"]
    by_branch["negative"] = by_branch["positive"]  # as a model may: both branches attend to one text
    rollout.cross["text", "negative"] = rollout.cross["text", "positive"]
    with torch.inference_mode():
        keys = by_branch["positive"][0]
        keys[0] = keys[0].clone()
    held = list(keys)
    tree = take_out(rollout.state)
    assert all(a is b for a, b in zip(tree["cross"]["text"]["positive"][0], held, strict=True)), "a copy"
    engine_kv.put_back(rollout.state, packed(tree))
    rollout.check()
    by_branch = pool._cross_sessions["a"]["text"]
    assert [t.data_ptr() for t in by_branch["positive"][0]] == [
        t.data_ptr() for t in by_branch["negative"][0]
    ]
    assert by_branch["positive"][0][0].is_inference()
    assert not by_branch["positive"][0][1].is_inference()


def test_two_sessions_of_one_tree_share_no_cross_attention_cache():
    pool = make_pool(LIKE_DREAMZERO)
    one = Rollout(pool, LIKE_DREAMZERO, "one", frames=5)
    two = Rollout(pool, LIKE_DREAMZERO, "two")
    two.frames = {branch: list(frames) for branch, frames in one.frames.items()}
    two.cross = dict(one.cross)
    tree = engine_kv.gather(one.state)
    one.check()
    engine_kv.put_back(two.state, tree)
    one.state.close()
    one.state = new_state(pool, "one")
    engine_kv.put_back(one.state, tree)
    two.encode("text")
    two.run(2)
    two.check()
    one.check()
    one.encode("image")
    one.run(3)
    one.check()
    two.check()


def test_staged_history_is_never_taken_for_a_restored_sessions(monkeypatch):
    """The engine keeps what it staged of a window by the identity of the adapter: a new one stages anew."""
    monkeypatch.setenv("VLLM_OMNI_AR_DIFFUSION_KV_GATHER", "1")
    shape = Shape(staging=True)
    pool = make_pool(shape)
    assert pool.history_staging
    rollout = Rollout(pool, shape, frames=3)
    assert not look(rollout.state, "positive").reuse_history
    assert look(rollout.state, "positive").reuse_history, "the engine reuses what it staged"
    blocks = pool.block_table(rollout.state.adapters["positive"])
    tree = take_out(rollout.state)
    while True:  # into the very blocks: all that the engine compares is equal but for the adapter
        engine_kv.put_back(rollout.state, tree)
        if pool.block_table(rollout.state.adapters["positive"]) == blocks:
            break
        rollout.state.close()
    assert not look(rollout.state, "positive").reuse_history
    rollout.check()


def test_a_context_that_commits_nothing_keeps_no_session_from_being_taken_out():
    """After each step of DreamZero that of the last denoising step stands there; its slots are scratch."""
    pool = make_pool(LIKE_DREAMZERO)
    rollout = Rollout(pool, LIKE_DREAMZERO, frames=2)
    look(rollout.state, "positive")
    assert rollout.state._paged_pending["positive"] is not None
    engine_kv.put_back(rollout.state, take_out(rollout.state))
    assert rollout.state._paged_pending == {"positive": None, "negative": None}
    rollout.run(2)
    rollout.check()

"""A tree that is none, or is another engine's, is refused before anything happens."""

import pytest
from engine import LIKE_LINGBOT, TOKENS, Shape, all_free, make_pool, new_state
from rollout import Rollout
from travel_kv import packed, take_out

from vllm_omni_session_state.base.errors import BadPayloadError
from vllm_omni_session_state.omni.worker import engine_kv

pytestmark = pytest.mark.host

LONG_PAST_THE_WINDOW = 11


def _damages():
    def at(*path, to):
        def damage(tree):
            for step in path[:-1]:
                tree = tree[step]
            tree[path[-1]] = to(tree[path[-1]]) if callable(to) else to

        return damage

    def without(*path):
        def damage(tree):
            for step in path[:-1]:
                tree = tree[step]
            del tree[path[-1]]

        return damage

    pair = ("cross", "text", "main")
    return {
        "a part is missing": without("keys"),
        "branches are no dict": at("branches", to=[]),
        "a branch is missing": without("branches", "main"),
        "a number is missing": without("branches", "main", "compacted"),
        "a number is negative": at("branches", "main", "prefill", to=-1),
        "a number is true": at("branches", "main", "committed", to=True),
        "more blocks than tokens": at("branches", "main", "chunks", to=lambda n: n - 1),
        "another compaction": at("branches", "main", "compacted", to=lambda n: n + TOKENS),
        "keys are no list": at("keys", to=tuple),
        "a layer is missing": at("values", to=lambda v: v[:-1]),
        "a block is missing": at("keys", 0, to=lambda k: k[:-1]),
        "another type": at("values", 1, to=lambda v: v.float()),
        "no tensor": at("keys", 2, to=None),
        "a cache that the engine has not": at("cross", to=lambda c: {"smell": c["text"]}),
        "a branch that the engine has not": at("cross", "text", to=lambda b: {"left": b["main"]}),
        "no branches": at("cross", "text", to=[]),
        "no pair": at(*pair, to=lambda p: p[0]),
        "another length": at(*pair, to=lambda p: ([k[:-1] for k in p[0]], p[1])),
        "on another device": at(*pair, to=lambda p: ([k.to("meta") for k in p[0]], p[1])),
    }


@pytest.mark.parametrize("damage", _damages().items(), ids=lambda item: item[0])
def test_what_is_no_such_tree_is_refused_before_anything_happens(damage):
    pool = make_pool(LIKE_LINGBOT)
    rollout = Rollout(pool, LIKE_LINGBOT, frames=LONG_PAST_THE_WINDOW)
    tree = packed(take_out(rollout.state))
    damage[1](tree)
    with pytest.raises(BadPayloadError):
        rollout.handle.import_payload(tree)
    all_free(pool)
    assert rollout.state._closed


def test_a_tree_of_another_engine_is_refused():
    pool, other = make_pool(LIKE_LINGBOT), make_pool(Shape(branches=("main",), layers=2, window=3, sink=2))
    tree = take_out(Rollout(other, Shape(branches=("main",), window=3, sink=2), frames=5).state)
    with pytest.raises(BadPayloadError, match="3 layers"):
        engine_kv.put_back(new_state(pool, "a"), tree)

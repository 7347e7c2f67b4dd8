"""Random scripts over several sessions on the host's own cache classes, checked after every step."""

import pytest
import torch
from engine import (
    CROSS,
    FRAMES_PER_BLOCK,
    SHAPES,
    TOKENS,
    all_free,
    cross_content,
    frame,
    make_pool,
    nbytes,
    new_state,
    resident,
    same,
    same_frames,
    write,
)
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from profiles import sized
from travel_kv import WAYS, take_out

from vllm_omni_session_state.base.errors import MidChunkError, PoolFullError
from vllm_omni_session_state.omni.worker import engine_kv
from vllm_omni_session_state.state.paged_kv import PagedKV

pytestmark = pytest.mark.host

NAMES = ("a", "b", "c", "d")
ORDINALS = st.integers(0, 3)
FRAMES = st.integers(1, FRAMES_PER_BLOCK)
BREAKS = st.none() | st.tuples(st.booleans(), ORDINALS)
STEPS = st.one_of(
    st.tuples(st.just("begin"), ORDINALS, st.booleans()),
    st.tuples(st.just("forwards"), ORDINALS, st.lists(FRAMES, min_size=1, max_size=4)),
    st.tuples(st.just("forwards"), ORDINALS, st.lists(FRAMES, min_size=1, max_size=4)),
    st.tuples(st.just("half_a_forward"), ORDINALS, ORDINALS, FRAMES),
    st.tuples(st.just("encode"), ORDINALS, ORDINALS, st.sampled_from(sorted(CROSS))),
    st.tuples(st.just("park"), ORDINALS, st.sampled_from(WAYS), BREAKS),
    st.tuples(st.just("park"), ORDINALS, st.sampled_from(WAYS), BREAKS),
    st.tuples(st.just("restore"), ORDINALS, st.booleans(), BREAKS),
    st.tuples(st.just("restore"), ORDINALS, st.booleans(), BREAKS),
    st.tuples(st.just("end"), ORDINALS, st.sampled_from(["reset", "window", "prompt", "close", "evict"])),
)
"""One rule, not many: of many, some are left out of a script, and little is left to do in it."""


class Model:
    """What one session must be, as plain lists: no pool, no blocks, no tables."""

    def __init__(self, shape):
        self.shape = shape
        self.frames = {branch: [] for branch in shape.branches}  # committed since the last reset
        self.writing = dict.fromkeys(shape.branches, 0)  # frames that are written, not committed
        self.cross = {}  # (cache, branch) -> layers of K and V
        self.tree = None  # of a parked one

    def resident(self, branch):
        """Sink and window are kept, what lies between has left."""
        frames, sink = self.frames[branch], self.shape.sink
        return frames[:sink] + frames[sink:][-self.shape.window :]

    def blocks(self):
        return sum(len(self.resident(branch)) + self.writing[branch] for branch in self.shape.branches)


class KVMachine(RuleBasedStateMachine):
    """Sessions are written, parked, restored, reset and closed in any order, faults among them."""

    @initialize(shape=st.sampled_from(SHAPES))
    def start(self, shape):
        self.shape, self.kv = shape, make_pool(shape)
        self.models, self.states, self.handles = {}, {}, {}
        self.draws = 0

    def live(self, name):
        return name in self.states

    def branch(self, ordinal):
        return self.shape.branches[ordinal % len(self.shape.branches)]

    def draw(self):
        self.draws += 1
        return frame(self.shape.layers, self.draws)

    def hold(self, name, state):
        self.states[name] = state
        handle = self.handles.get(name)
        if handle is None or not handle.resident or handle.view() is not state:
            self.handles[name] = PagedKV(engine_kv.SessionKV(state))

    def drop(self, name):
        self.states.pop(name).close()
        del self.models[name], self.handles[name]

    @rule(what=STEPS)
    def step(self, what):
        kind, *how = what
        whom = {
            "begin": [n for n in NAMES if n not in self.models],
            "restore": self.models.keys() - self.states,
        }
        among = sorted(whom.get(kind, self.states))
        if among:
            ordinal = how.pop(0)
            getattr(self, kind)(among[ordinal % len(among)], *how)

    def begin(self, name, cross):
        """A session's first chunk, and what it is asked to do."""
        self.models[name] = Model(self.shape)
        self.hold(name, new_state(self.kv, name))
        for branch in self.shape.branches:
            if cross and self.live(name):
                self.encode_for(name, branch, "text")
            if self.live(name):
                self.chunk(name, branch, frames=1)

    def chunk(self, name, branch, *, frames, commit=True):
        """A forward; one that was left before its commit is finished instead."""
        model, state = self.models[name], self.states[name]
        if not model.writing[branch]:
            new = [self.draw() for _ in range(frames)]
            try:
                write(state, branch, new, commit=False)
            except RuntimeError as error:
                assert "exhausted" in str(error)  # noqa: PT017 - the engine's own; its runner fails closed
                self.drop(name)
                return
            model.frames[branch] += new
            model.writing[branch] = frames
            if not commit:
                return
        state.commit_paged_context(branch)
        model.writing[branch] = 0

    def forwards(self, name, frames):
        for count in frames:
            for branch in self.shape.branches:
                if self.live(name):
                    self.chunk(name, branch, frames=count)

    def half_a_forward(self, name, branch, frames):
        self.chunk(name, self.branch(branch), frames=frames, commit=False)

    def encode(self, name, branch, cache):
        self.encode_for(name, self.branch(branch), cache)

    def encode_for(self, name, branch, cache):
        self.draws += 1
        content = cross_content(self.shape.layers, cache, self.draws)
        if name in self.kv._cross_sessions or len(self.kv._cross_sessions) < self.shape.sessions:
            self.states[name].populate_cross_attention(branch, cache, iter(content))
            self.models[name].cross[cache, branch] = content

    def end(self, name, how):
        state, before = self.states[name], self.models[name]
        if how == "prompt":
            state.clear_cross_attention()
            before.cross = {}
        elif how == "evict":
            counted = nbytes(state)
            assert self.handles[name].evict() == counted
            self.drop(name)
        elif how == "close":
            self.drop(name)
        else:
            keep = ("text",) if how == "window" else ()
            state.reset(keep_cross_attention=keep)
            model = self.models[name] = Model(self.shape)
            model.cross = {key: value for key, value in before.cross.items() if key[0] in keep}

    def park(self, name, way, break_at):
        model, state = self.models[name], self.states[name]
        if any(model.writing.values()):
            assert self.handles[name].staged == (tuple(b for b, n in model.writing.items() if n),)
            with pytest.raises(MidChunkError):
                take_out(state)
            return
        assert self.handles[name].staged is None
        if break_at is not None and model.blocks():
            with broken(self.kv, *break_at), pytest.raises(OSError, match="on purpose"):
                take_out(state)
            return
        model.tree = way(take_out(state))
        del self.states[name]

    def restore(self, name, anew, break_at):
        model = self.models[name]
        state = new_state(self.kv, name) if anew else self.handles[name]._engine.state
        old = dict(state.adapters)
        free = self.kv.manager.block_pool.get_num_free_blocks()
        no_place = model.cross and len(self.kv._cross_sessions) == self.shape.sessions
        if model.blocks() > free or no_place:
            with pytest.raises(PoolFullError) as raised:
                engine_kv.put_back(state, model.tree)
            assert raised.value.wanted > raised.value.room
            del raised  # it is in a circle with this frame, and holds the tree until that is collected
        elif break_at is not None and model.blocks():
            with broken(self.kv, *break_at), pytest.raises(OSError, match="on purpose"):
                engine_kv.put_back(state, model.tree)
        else:
            engine_kv.put_back(state, model.tree)
            assert all(state.adapters[branch] is not old[branch] for branch in old), "an old adapter is used"
            model.tree = None
            self.hold(name, state)
            return
        assert state.adapters == old, "a restore that failed changed the state"
        assert self.kv.manager.block_pool.get_num_free_blocks() == free
        if anew:
            state.close()

    @invariant()
    def everything_is_what_was_written(self):
        if not hasattr(self, "kv"):
            return
        used = []
        for name, state in self.states.items():
            model = self.models[name]
            for branch, adapter in state.adapters.items():
                frames, writing = model.frames[branch], model.writing[branch]
                committed = len(frames) - writing
                if not writing:
                    assert same_frames(resident(state, branch), model.resident(branch))
                assert adapter.completed_chunks == committed
                assert adapter.absolute_num_computed_tokens == committed * TOKENS
                assert state._committed[branch] == committed * TOKENS
                used += self.kv.window_block_ids(adapter)
            self.same_cross(model, self.kv._cross_sessions.get(name))
            assert self.handles[name].nbytes_by_device() == ({"cpu": n} if (n := nbytes(state)) else {})
        assert len(used) == len(set(used)), "two sessions share a block"
        assert self.kv.manager.block_pool.get_num_free_blocks() == self.kv.managed_num_blocks - 1 - len(used)
        assert set(self.kv._adapters) == {
            adapter.request_id for state in self.states.values() for adapter in state.adapters.values()
        }
        assert set(self.kv._cross_sessions) == {name for name in self.states if self.models[name].cross}
        for name, model in self.models.items():
            if model.tree is not None:
                self.same_tree(model)
                assert not self.handles[name].resident

    def same_cross(self, model, held):
        found = {(cache, branch): pair for cache, by in (held or {}).items() for branch, pair in by.items()}
        assert set(found) == set(model.cross)
        for key, (keys, values) in found.items():
            for layer, (k, v) in enumerate(model.cross[key]):
                assert same(keys[layer], k[0])
                assert same(values[layer], v[0])

    def same_tree(self, model):
        """A parked tree stays what it was, also after a restore of it failed."""
        everything = [f for branch in model.tree["branches"] for f in model.resident(branch)]
        for part, index in (("keys", 0), ("values", 1)):
            for layer, content in enumerate(model.tree[part]):
                assert same(content, torch.stack([f[layer][index] for f in everything]))
        self.same_cross(model, model.tree["cross"])

    def teardown(self):
        if hasattr(self, "kv"):
            for name in list(self.states):
                self.drop(name)
            all_free(self.kv)


class broken:  # noqa: N801 - reads as a statement
    """A layer's K or V cannot be reached: whoever comes to it, to read or to write, fails.

    Args:
        pool: vLLM-Omni's cache.
        value: V of that layer, else K.
        layer: Which, counted round.
    """

    def __init__(self, pool, value, layer):
        self.pool, self.name = pool, "value_cache" if value else "key_cache"
        self.layer, self.whole = layer % pool.num_layers, getattr(pool, self.name)

    def reach(self, layer):
        self.calls += 1
        if layer == self.layer and (self.calls > 1 or self.name == "value_cache"):
            raise OSError("on purpose")  # not at the first look at K, which asks for the shape
        return self.whole(layer)

    def __enter__(self):
        self.calls = 0
        setattr(self.pool, self.name, self.reach)

    def __exit__(self, *_):
        delattr(self.pool, self.name)


KVMachine.TestCase.settings = sized(1200, stateful_step_count=50)
TestKVMachine = KVMachine.TestCase

"""A random life of some sessions on the real worker, checked after every step against the engine itself.

Parked, restored by their next step or by a decode, closed, reset, and broken in the middle of a forward: what
was not ended goes on as if alone, and in the end nothing is left.
"""

import numpy as np
import pytest
from broken import broken_between_layers
from engine import all_free, free, nbytes
from profiles import count

from vllm_omni_session_state.omni.worker import engine_kv

pytestmark = pytest.mark.host

SESSIONS = 6
ODDS = {"step": 0.45, "park": 0.25, "fail": 0.12, "close": 0.06, "reset": 0.06, "decode": 0.06}


class Life:
    """A model, and where each of its sessions stands."""

    def __init__(self, model, crowd, alone):
        self.model, self.crowd, self.alone = model, crowd, alone
        self.manager, self.runner = model.pipeline._memory_manager, model.runner
        self.done = {}  # steps of each session since it began
        self.counts = dict.fromkeys([*ODDS, "restored", "lost"], 0)

    def step(self, number):
        done = self.done.get(number, 0)
        self.counts["restored"] += self.parked(number)
        output = self.crowd.run(self.model, (number, done))
        assert self.alone[number, done].equals(output), f"step {done} of session {number} is another's"
        self.done[number] = done + 1
        if self.done[number] == self.crowd.steps:
            self.close(number)

    def fail(self, number, rng):
        """Between two layers of the transformer, at any of its calls; a rollout begins anew then."""
        lost = self.lost
        with broken_between_layers(self.model.pipeline, call=int(rng.integers(1, 6))) as broken:
            try:
                self.step(number)
            except ValueError:
                assert broken()
                self.done.pop(number, None)
                assert self.crowd.name(number) not in self.manager
                assert self.lost == lost + 1
        self.counts["lost"] += broken()

    def park(self, number):
        assert self.manager.park(self.crowd.name(number)) is (number in self.done)

    def close(self, number):
        self.model.close(self.crowd.name(number))
        self.done.pop(number, None)

    def reset(self, number):
        self.model.reset(self.crowd.name(number))
        self.done.pop(number, None)

    def decode(self, number):
        if number in self.done:
            self.counts["restored"] += self.parked(number)
            self.model.pipeline.decode_accumulated_video_latents(self.crowd.name(number))

    @property
    def lost(self):
        return self.manager.stats().get("lost:forward_exception", 0)

    def parked(self, number):
        session = self.manager.peek(self.crowd.name(number))
        return session is not None and session.parked

    def live(self, rng, turns):
        for _ in range(turns):
            what = rng.choice(list(ODDS), p=list(ODDS.values()))
            number = int(rng.integers(SESSIONS))
            self.counts[what] += 1
            getattr(self, what)(number, *([rng] if what == "fail" else []))
            self.check()

    def check(self):
        """The books against the engine's own structures, branch by branch, block by block."""
        self.manager.check()
        pool, used = self.runner.kv_cache, 0
        names = self.manager.keys()
        here = [name for name in names if not self.manager.peek(name).parked]
        assert set(names) == {self.crowd.name(number) for number in self.done}
        assert set(self.runner._sessions) == set(pool._cross_sessions) == set(here)
        assert set(pool._adapters) == {
            adapter.request_id for name in here for adapter in self.runner._sessions[name].adapters.values()
        }
        (manager,) = pool.manager.coordinator.single_type_managers
        shown = dict(zip(names, self.manager.listing(), strict=True))
        for name in here:
            state, handle = self.runner._sessions[name], self.manager.peek(name).get(engine_kv.NAME)
            assert handle.view() is state
            held = handle.footprint().allocations
            for adapter in state.adapters.values():
                blocks = [b for b in manager.req_to_blocks[adapter.request_id] if not b.is_null]
                used += len(blocks)
                assert has_blocks(pool, held, [block.block_id for block in blocks])
            (value,) = [value for value in shown[name].values if value.name == engine_kv.NAME]
            assert sum(value.nbytes.values()) == handle.nbytes == nbytes(state)
        for name in set(shown) - set(here):
            assert shown[name].place in {"host", "disk"}
        assert free(pool) == pool.managed_num_blocks - 1 - used
        assert self.manager.stats()["parked_sessions"] == len(self.done) - len(here)


def has_blocks(pool, held, blocks):
    """Whether each of these blocks is counted once, with its K and V of every layer."""
    caches = [
        cache(layer) for layer in range(pool.num_layers) for cache in (pool.key_cache, pool.value_cache)
    ]
    return all(
        [each.nbytes for each in held if each.start == pool.key_cache(0)[block].data_ptr()]
        == [sum(cache[block].nbytes for cache in caches)]
        for block in blocks
    )


@pytest.mark.parametrize("disk", [False, True], ids=["host memory", "host memory and disk"])
def test_after_any_life_nothing_is_left_and_no_output_was_wrong(crowd, alone, load, tmp_path, disk):
    options = {"host_budget": "64GiB"}
    if disk:
        options = {"host_budget": "3MiB", "disk": {"path": str(tmp_path), "budget": "4GiB"}}
    model = load(**options)
    life = Life(model, crowd, alone)
    life.live(np.random.default_rng([count(1000), disk]), count(1000))
    assert min(life.counts.values()) >= 1, life.counts
    assert (life.manager.offloader.figures()["disk_nbytes"] > 0) is disk
    for number in range(SESSIONS):
        life.close(number)
    life.check()
    all_free(model.runner.kv_cache)
    assert model.runner._sessions == {}
    stats = life.manager.stats()
    assert (stats["sessions"], stats["total_nbytes"], stats["staged_nbytes"], stats["disk_nbytes"]) == (
        0,
    ) * 4
    assert life.manager.offloader.host.nbytes == 0
    assert not [name for name in stats if name.startswith("lost:") and name != "lost:forward_exception"]

"""Any order of steps, ends, leavings and expiries, against a model: one end for each life of a session."""

import asyncio

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from profiles import sized

from vllm_omni_session_state.omni.server.live_sessions import LiveSessions

KEYS = st.sampled_from(["x", "y", "default"])
OWNERS = st.sampled_from(["a", "b", "c"])


class EndsMachine(RuleBasedStateMachine):
    """The worker makes a session at a step and frees it at its end; both take effect when they are let."""

    @initialize(resume=st.booleans())
    def start(self, resume):
        self.loop = asyncio.new_event_loop()
        self.resume_s = 10_000.0 if resume else 0.0
        self.ends = LiveSessions(self, resume_s=self.resume_s)
        self.worker = set()
        self.lives = {}  # key -> owners, of the sessions that are live
        self.named = set()
        self.ended = self.arrived = 0
        self.steps = {}  # task -> (key, gate)
        self.gate = asyncio.Event()

    async def close(self, key):
        await self.gate.wait()
        assert not [1 for other, _, begun in self.steps.values() if other == key and begun], "a step ran"
        self.arrived += 1
        self.worker.discard(key)

    async def holds(self, key):
        return key in self.worker

    def turn(self, gate):
        async def turns():
            if gate:
                self.gate.set()
            for _ in range(30):
                await asyncio.sleep(0)
            self.gate.clear()

        self.loop.run_until_complete(turns())

    def waits(self, key):
        """Whether an end of it waits for a step, and so would whoever names it now."""
        self.turn(gate=True)
        return key not in self.lives and any(record[0] == key for record in self.steps.values())

    def drop(self, key):
        if self.lives.pop(key, None) is not None:
            self.ended += 1
            self.named.discard(key)

    @rule(key=KEYS, owner=OWNERS)
    def step(self, key, owner):
        async def stepping():
            async with self.ends.step(key, owner, named=key != "default"):
                self.worker.add(key)

        if self.waits(key):
            return
        self.loop.run_until_complete(stepping())
        self.lives.setdefault(key, set()).add(owner)
        if key != "default":
            self.named.add(key)

    @rule(key=KEYS, owner=OWNERS)
    def begin_a_step(self, key, owner):
        if self.waits(key):
            return
        gate, record = asyncio.Event(), [key, None, True]
        record[1] = gate

        async def stepping():
            async with self.ends.step(key, owner, named=key != "default"):
                await gate.wait()
                self.worker.add(key)
                record[2] = False

        self.steps[self.loop.create_task(stepping())] = record
        self.turn(gate=False)
        self.lives.setdefault(key, set()).add(owner)
        if key != "default":
            self.named.add(key)

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def finish_a_step(self, data):
        task = data.draw(st.sampled_from(list(self.steps)))
        self.steps[task][1].set()
        self.turn(gate=False)
        assert task.done()
        del self.steps[task]

    @rule(key=KEYS)
    def end(self, key):
        self.call(self.ends.end, key)
        self.drop(key)

    @rule(owner=OWNERS, keep=st.booleans())
    def leave(self, owner, keep):
        self.call(self.ends.leave, owner, keep=keep)
        for key, owners in list(self.lives.items()):
            if owner in owners:
                owners.discard(owner)
                if not owners and not (keep and key in self.named and self.resume_s):
                    self.drop(key)

    @rule(key=KEYS, owner=OWNERS)
    def resume(self, key, owner):
        if self.waits(key):
            return
        known = key in self.lives and key in self.named and self.resume_s > 0
        there = self.loop.run_until_complete(self.ends.resume(key, owner))
        assert there == (known and key in self.worker)
        if known:
            self.lives[key] = {owner}

    def call(self, function, *args, **kwargs):
        async def calling():
            function(*args, **kwargs)

        self.loop.run_until_complete(calling())

    @invariant()
    def what_is_live_is_what_the_model_says(self):
        if hasattr(self, "lives"):
            assert {key for key in ("x", "y", "default") if key in self.ends} == set(self.lives)
            assert self.arrived <= self.ended

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        for task, record in self.steps.items():
            record[1].set()
            self.loop.run_until_complete(task)
        self.steps.clear()
        for owner in ("a", "b", "c"):
            self.call(self.ends.leave, owner)
        for key in list(self.lives):
            self.call(self.ends.end, key)
            self.drop(key)
        for _ in range(5):
            self.turn(gate=True)
        assert self.arrived == self.ended
        assert self.worker == set()
        assert len(self.ends) == 0
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()


TestEndsMachine = EndsMachine.TestCase
TestEndsMachine.settings = sized(2000, stateful_step_count=30)

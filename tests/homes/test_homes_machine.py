"""Any order of steps, ends, losses, deaths, joins and questions, against a plain model of who has whom."""

import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from profiles import sized

from vllm_omni_session_state.base.errors import NoRoomError, SessionStateLostError
from vllm_omni_session_state.omni.replicas.homes import Homes

KEYS = ["a", "b", "c"]
KEY = st.sampled_from(KEYS)
SLOTS = range(3)


class Replica:
    """A client, and what the worker behind it has: sessions, and those that it lost and not yet told."""

    def __init__(self):
        self.sessions = set()
        self.lost = set()


class HomesMachine(RuleBasedStateMachine):
    @initialize(strict=st.booleans(), most=st.integers(1, 3))
    def start(self, strict, most):
        self.strict = strict
        self.most = most
        self.running = {}  # request -> slot
        self.homes = Homes(strict=strict, under_way=self.running.__contains__, most=most)
        self.clients = dict.fromkeys(SLOTS)
        for slot in (0, 1):
            self.clients[slot] = Replica()
        self.numbers = itertools.count()
        self.model = {}  # key -> [client, slot, held, number of its last step]
        self.requests = {}  # key -> requests of it, each until it is over
        self.doubted = set()
        self.lost = dict.fromkeys(SLOTS, 0)
        self.untold = set()  # lost with a replica, where that makes a step fail
        self.pending = []  # questions on their way: asked, by whom it was said, what was said

    def live(self):
        return {slot: client for slot, client in self.clients.items() if client is not None}

    def is_live(self, key):
        client, slot, *_ = self.model[key]
        return self.clients[slot] is client

    def load(self, client):
        return sum(held and other is client for other, _, held, _ in self.model.values())

    def busy(self, key):
        return any(request in self.running for request in self.requests.get(key, ()))

    def remove(self, key):
        self.model.pop(key, None)
        self.requests.pop(key, None)
        self.doubted.discard(key)

    def lose(self, key):
        self.lost[self.model[key][1]] += 1
        self.remove(key)
        if self.strict:
            self.untold.add(key)

    def refused(self, key, *, reset):
        if reset:
            self.untold.discard(key)
        if key in self.model:
            return None
        if key in self.untold:
            return SessionStateLostError
        return NoRoomError if len(self.model) == self.most else None

    def choice(self, live):
        running = list(self.running.values())
        slot = min(live, key=lambda slot: (self.load(live[slot]), running.count(slot), slot))
        return [live[slot], slot, True, 0]

    @rule(key=KEY, reset=st.booleans(), close=st.booleans())
    def step(self, key, reset, close):
        live = self.live()
        if not live:
            return
        request = f"request-{next(self.numbers)}"

        def place():
            return self.homes.place(
                key, request, live, lambda slot: list(self.running.values()).count(slot), reset=reset
            )

        if key in self.model and not self.is_live(key):
            self.lose(key)
        refused = self.refused(key, reset=reset)
        if refused is not None:
            with pytest.raises(refused):
                place()
            return
        home = self.model.setdefault(key, self.choice(live))
        home[2] = home[2] or reset
        home[3] = next(self.numbers)
        assert place() == home[1]
        self.running[request] = home[1]
        self.requests.setdefault(key, set()).add(request)
        worker = home[0]
        if reset:
            worker.lost.discard(key)
        if not (self.strict and key in worker.lost):
            worker.sessions.add(key)
        if close:
            worker.sessions.discard(key)
            self.homes.doubt(key)
            self.doubted.add(key)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        del self.running[data.draw(st.sampled_from(sorted(self.running)))]

    @rule(key=KEY)
    def end(self, key):
        """As a client ends it: the worker frees it, and a step that was sent before may come after."""
        quiet = self.homes.quiet([key])
        assert (key in quiet) == (key in self.model and not self.busy(key))
        if key in self.model and self.is_live(key):
            self.model[key][0].sessions.discard(key)
            self.model[key][0].lost.discard(key)
            if key in quiet:
                self.homes.heard(quiet, [False], [False])
                self.remove(key)
            else:
                self.homes.doubt(key)
                self.doubted.add(key)
        else:
            self.homes.forget(key)
            self.remove(key)
            self.untold.discard(key)

    @rule(key=KEY)
    def worker_loses(self, key):
        if key in self.model and key in self.model[key][0].sessions:
            self.model[key][0].sessions.discard(key)
            self.model[key][0].lost.add(key)

    @rule(oldest=st.booleans(), early=st.booleans())
    def ask(self, oldest, early):
        live = self.live()
        self.doubted = {key for key in self.doubted if self.is_live(key)}
        keys = self.doubted | {key for key in self.model if oldest and self.model[key][2]}
        expected = {key for key in keys if self.is_live(key) and not self.busy(key)}
        asked = self.homes.to_ask(live, oldest=oldest)
        assert {key for asking in asked.values() for key in asking} == expected
        for slot, asking in asked.items():
            assert all(self.model[key][1] == slot for key in asking)
            numbers = {key: self.model[key][3] for key in asking}
            said = self.say(live[slot], asking) if early else None
            self.pending.append((live[slot], asking, numbers, said))

    @staticmethod
    def say(worker, asking):
        return [key in worker.sessions for key in asking], [key in worker.lost for key in asking]

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def answer(self, data):
        at = data.draw(st.integers(0, len(self.pending) - 1))
        worker, asking, numbers, said = self.pending.pop(at)
        if said is None and worker not in self.clients.values():
            return  # nobody answers for it any more
        found, lost = said or self.say(worker, asking)
        self.homes.heard(asking, found, lost)
        for key, there, gone in zip(asking, found, lost, strict=True):
            if key not in self.model or self.model[key][3] != numbers[key]:
                continue
            self.doubted.discard(key)
            if there:
                self.model[key][2] = True
            elif gone and self.strict:
                self.model[key][2] = False
            else:
                self.remove(key)

    @rule(slot=st.sampled_from(SLOTS))
    def death(self, slot):
        self.clients[slot] = None
        for request in [request for request, at in self.running.items() if at == slot]:
            del self.running[request]  # vLLM-Omni fails them

    @rule(slot=st.sampled_from(SLOTS))
    def join(self, slot):
        if self.clients[slot] is None:
            self.clients[slot] = Replica()

    @rule()
    def shed(self):
        self.homes.shed(self.live())
        for key in list(self.model):
            if not self.is_live(key):
                self.lose(key)
            elif not self.model[key][2]:
                self.remove(key)

    @rule(key=KEY, slot=st.sampled_from(SLOTS))
    def host_chooses(self, key, slot):
        """A step that vLLM-Omni sent by itself: there was nobody to choose from when it was looked at."""
        client = self.clients[slot]
        if client is None or (key in self.model and self.is_live(key)):
            return
        request = f"request-{next(self.numbers)}"
        self.homes.went(key, request, slot, client)
        if key in self.model:
            self.lose(key)
            self.untold.discard(key)
        if len(self.model) < self.most:
            self.model[key] = [client, slot, True, next(self.numbers)]
            self.requests[key] = {request}
            self.running[request] = slot
            client.sessions.add(key)

    @invariant()
    def agrees_with_the_model(self):
        if not hasattr(self, "homes"):
            return
        self.homes.check()
        assert len(self.homes) == len(self.model)
        for key in KEYS:
            assert self.homes.of(key) is (self.model[key][0] if key in self.model else None)
            assert self.homes.is_lost(key) == (key in self.untold)
        for client in self.live().values():
            assert self.homes.loads()[id(client)] == self.load(client)
            for key in client.sessions:
                assert self.homes.of(key) is client, "a session that is there is known to be there"
        assert {slot: self.homes.lost[slot] for slot in SLOTS} == self.lost
        assert self.homes.doubts == bool(self.doubted)
        assert self.homes.full == (len(self.model) == self.most)


TestHomesMachine = HomesMachine.TestCase
TestHomesMachine.settings = sized(2000, stateful_step_count=40)

"""The manager's figures against sets of byte addresses, after every assign, append, reset, evict and drop.

The oracle knows each storage by the address range that the test made it with; it never asks the product
what a value holds.
"""

import gc
import logging

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from profiles import sized

from vllm_omni_session_state import LatentBuffer, SessionStateManager
from vllm_omni_session_state.state.session import Declaration

KEYS = st.sampled_from(["a", "b", "c", "d"])
NAMES = st.sampled_from(["x", "y"])
PLACES = st.integers(0, 5)


def storage(index):
    """The ``index``-th storage, a tensor's or an array's, and its byte addresses."""
    size = 3 + 5 * index
    if index % 2:
        array = np.zeros(size, np.uint8)
        return array, frozenset(range(array.ctypes.data, array.ctypes.data + size))
    tensor = torch.zeros(size, dtype=torch.uint8)
    return tensor, frozenset(range(tensor.data_ptr(), tensor.data_ptr() + size))


class Model:
    """One session: what each value reaches, now and when it was last settled."""

    def __init__(self):
        self.attrs = {}
        self.buffer = None  # a list of storage indices, or None while not allocated
        self.staged = None
        self.settled = (frozenset(), frozenset())
        self.holder = None  # the session itself, where the test holds it

    def held(self):
        return [i for i in (*self.attrs.values(), *(self.buffer or ())) if i is not None]


class AccountsMachine(RuleBasedStateMachine):
    """Sessions over six shared storages under a cap of three; some are held after they left the table."""

    @initialize()
    def start(self):
        self.manager = SessionStateManager(max_sessions=3)
        pairs = [storage(i) for i in range(6)]
        self.values = [value for value, _ in pairs]
        self.addresses = [addresses for _, addresses in pairs]
        self.table = {}  # key -> Model, oldest first
        self.detached = []  # (session, Model) of sessions that are held though they left the table

    def reached(self, indices):
        return frozenset().union(*(self.addresses[i] for i in indices))

    def settle(self, model):
        model.settled = (
            self.reached(model.held()),
            self.reached(() if model.staged is None else [model.staged]),
        )

    def use(self, key, change, *, hold=False):
        """Change a session, and its model, inside one use."""
        with self.manager.lease(key) as session:
            model = self.table.pop(key, None)
            if model is None:
                model = Model()
                while len(self.table) >= 3:
                    oldest = next(iter(self.table))
                    gone = self.table.pop(oldest)
                    if gone.holder is not None:
                        self.detached.append((gone.holder, gone))
            self.table[key] = model
            change(session, model)
        self.settle(model)
        if hold:
            model.holder = session

    @rule(key=KEYS, name=NAMES, place=PLACES, part=st.booleans(), hold=st.booleans())
    def assign(self, key, name, place, part, hold):
        def change(session, model):
            session.attrs[name] = [self.values[place][:1]] if part else self.values[place]
            model.attrs[name] = place

        self.use(key, change, hold=hold)

    @rule(key=KEYS, place=PLACES)
    def append(self, key, place):
        def change(session, model):
            buffer = session.get_or_create("buffer", new_buffer, LatentBuffer)
            buffer.append(self.values[place][1:])
            if model.buffer is None:  # a released buffer was replaced, and what it had staged went with it
                model.staged = None
            model.buffer = [*(model.buffer or ()), place]

        self.use(key, change)

    @rule(key=KEYS, place=PLACES)
    def stage(self, key, place):
        def change(session, model):
            buffer = session.get("buffer")
            if buffer is not None:
                buffer.stage(self.values[place])
                model.staged = place

        self.use(key, change)

    @rule(key=KEYS, clear=st.booleans())
    def release(self, key, clear):
        """Evict or reset the buffer."""

        def change(session, model):
            buffer = session.get("buffer")
            if buffer is not None:
                if clear:
                    buffer.reset()
                    model.staged = None
                else:
                    assert buffer.evict() == 0, "the test holds every storage"
                model.buffer = None

        self.use(key, change)

    @rule(key=KEYS)
    def drop(self, key):
        model = self.table.pop(key, None)
        assert self.manager.drop_session(key) is (model is not None)

    @rule()
    def write_to_a_detached_one(self):
        for session, model in self.detached:
            session.attrs["late"] = self.values[5]
            model.attrs["late"] = 5
            self.manager.settle(session)
            self.settle(model)

    @rule()
    def let_go_of_every_holder(self):
        self.detached.clear()
        for model in self.table.values():
            model.holder = None

    @invariant()
    def figures_are_the_addresses(self):
        self.manager.check()
        held = [model.settled[0] for model in self.table.values()]
        union = frozenset().union(*held)
        shared = {address for address in union if sum(address in one for one in held) > 1}
        detached = [model for _, model in self.detached]
        staged = frozenset().union(*(model.settled[1] for model in (*self.table.values(), *detached)))
        stats = self.manager.stats()
        assert stats["total_nbytes"] == stats.get("nbytes:cpu", 0) == len(union)
        assert self.manager.nbytes_by_device() == ({"cpu": len(union)} if union else {})
        assert stats["shared_nbytes"] == len(shared)
        assert stats["staged_nbytes"] == len(staged)
        assert stats["detached_sessions"] == len(detached)
        assert stats["detached_nbytes"] == len(frozenset().union(*(model.settled[0] for model in detached)))

    def teardown(self):
        """Drop everything and let go: the ledger is 0."""
        if hasattr(self, "manager"):
            self.manager.drop_all()
            self.detached.clear()
            stats = self.manager.stats()
            bytes_left = {name: count for name, count in stats.items() if "nbytes" in name and count}
            assert bytes_left == {}
            assert stats["detached_sessions"] == 0


def new_buffer():
    buffer = LatentBuffer()
    buffer.allocate()
    return buffer


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Evictions are said at WARNING; here there are thousands."""
    caplog.set_level(logging.ERROR, logger="vllm_omni.session_state")


TestAccountsMachine = AccountsMachine.TestCase
TestAccountsMachine.settings = sized(2000, stateful_step_count=40)


def test_a_detached_session_is_charged_for_all_that_it_comes_to_hold_on_the_device_and_in_host_memory():
    manager = SessionStateManager(
        max_sessions=1, declaration=Declaration(device_nbytes=1000, host_fields=frozenset({"kept"}))
    )
    with manager.lease("a") as held:
        held.attrs["x"] = torch.zeros(10, dtype=torch.uint8)
    with manager.lease("b"):
        pass
    held.attrs.update(kept=np.zeros(5, np.uint8), more=torch.zeros(3, dtype=torch.uint8))
    manager.settle(held)
    assert manager.stats()["detached_nbytes"] == 18
    manager.check()


def test_a_detached_session_is_counted_until_nobody_holds_it_without_the_garbage_collector():
    manager = SessionStateManager(max_sessions=1)
    with manager.lease("a") as session:
        session.attrs["x"] = torch.zeros(10, dtype=torch.uint8)
    held = session
    with manager.lease("a"):
        pass
    with manager.lease("b"):
        del session
    gc.disable()
    try:
        assert manager.stats()["detached_nbytes"] == 10
        with manager.lease("a") as twin:
            assert twin is not held, "the id used again is another session"
        assert manager.stats()["detached_sessions"] == 1
        del held
        assert manager.stats()["detached_sessions"] == manager.stats()["detached_nbytes"] == 0
    finally:
        gc.enable()
    manager.check()

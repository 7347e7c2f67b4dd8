"""Sessions whose chunks are spilled, against plain lists, with faults of the disk at any time."""

import contextlib
import errno
import os

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from profiles import sized
from spilled import chunk, described
from test_disk_faults import CALLS

from vllm_omni_session_state import LatentBuffer, SessionStateManager
from vllm_omni_session_state.adapters.video_latents import FIELD, Policy, whole
from vllm_omni_session_state.base.errors import LatentsUnreadableError
from vllm_omni_session_state.manager.losses import Reason
from vllm_omni_session_state.offload import spill
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.file_system import System
from vllm_omni_session_state.offload.host_tier import HostTier

KEYS = st.sampled_from(["a", "b"])
LARGE = 1 << 24
ENDS = ["clear", "assign other chunks", "change the front", "a forward that fails", "drop", "lose"]


def sabotaged(machine, real):
    def call(*args, **kwargs):
        if machine.fault is not None:
            machine.fault -= 1
            if machine.fault < 0:
                machine.fault = None
                machine.hit = True
                raise OSError(machine.error, os.strerror(machine.error))
        return real(*args, **kwargs)

    return staticmethod(call)


class SpillMachine(RuleBasedStateMachine):
    """Two sessions; a list each says what a decode must read. A segment has three chunks.

    The lists hold descriptions: a tensor that they held would not leave the memory with its session.
    """

    folder = None

    def __init__(self):
        super().__init__()
        self.fault, self.hit, self.error = None, False, 0
        self.number = 0
        self.held = []
        self.undo = contextlib.ExitStack()

    @initialize()
    def start(self):
        patched = self.undo.enter_context(pytest.MonkeyPatch.context())
        patched.setattr(spill, "SEGMENT", 3)
        for name in CALLS:
            patched.setattr(System, name, sabotaged(self, getattr(System, name)))
        self.disk = DiskTier(self.folder, budget=LARGE)
        self.manager = SessionStateManager(tier=HostTier(budget=LARGE), disk=self.disk)
        self.policy = Policy(spiller=self.manager.offloader.spiller)
        self.model = {}

    def teardown(self):
        with self.undo:
            if hasattr(self, "manager"):
                self.fault = None
                self.held.clear()
                self.manager.drop_all()
                self.manager.offloader.spiller.sweep()
                self.disk._remove_strays()
                assert self.disk.nbytes == self.manager.offloader.spiller.nbytes == 0
                self.disk.check()
                self.disk.close()

    @contextlib.contextmanager
    def forward(self, key):
        """One use that ends well; the session's buffer."""
        with self.manager.lease(key) as session:
            if session.get(FIELD) is None:
                buffer = session.put(FIELD, LatentBuffer())
                buffer.allocate()
                self.model[key] = []
            yield session.get(FIELD)
            self.policy.after_forward(session)

    def new(self):
        self.number += 1
        return chunk(self.number, inference=bool(self.number % 3))

    @rule(key=KEYS, count=st.integers(1, 9))
    def steps(self, key, count):
        for _ in range(count):
            with self.forward(key) as buffer:
                item = self.new()
                buffer.container.append(item)
                self.model[key].append(described(item))

    @rule(key=KEYS)
    def decode(self, key):
        if key not in self.manager:
            return
        self.hit = False
        with self.manager.lease(key) as session:
            before = list(session.get(FIELD).container)
            try:
                items = whole(session).get(FIELD).view()
            except LatentsUnreadableError:
                assert self.hit, "a read failed by itself"
                items = whole(session).get(FIELD).view()
            assert list(map(described, items)) == self.model[key]
            after = session.get(FIELD).container
            assert list(map(id, before)) == list(map(id, after))

    @rule(key=KEYS)
    def park(self, key):
        before = self.disk.nbytes
        self.manager.park(key)
        assert self.disk.nbytes <= before, "what is on the disk is not parked; what is stale goes"

    @rule(key=KEYS, how=st.sampled_from(["as it is", "without the last"]))
    def assign_what_was_read(self, key, how):
        with self.forward(key) as buffer:
            if how == "without the last" and len(buffer) > 1:
                buffer.container.pop()
                self.model[key].pop()
            buffer.replace(list(buffer.container))

    @rule(key=KEYS, how=st.sampled_from(ENDS), hold=st.booleans())
    def end(self, key, how, hold):
        getattr(self, how.replace(" ", "_"))(key, hold)

    def clear(self, key, _):
        with self.forward(key) as buffer:
            buffer.replace([])
            self.model[key] = []

    def assign_other_chunks(self, key, _):
        with self.forward(key) as buffer:
            items = [self.new(), self.new()]
            self.model[key] = list(map(described, items))
            buffer.replace(items)

    def change_the_front(self, key, all_of_it):
        with self.forward(key) as buffer:
            if len(buffer):
                buffer.container.clear() if all_of_it else buffer.container.pop(0)
                self.model[key] = list(map(described, buffer.container))

    def a_forward_that_fails(self, key, _):
        """Its host drops the session."""
        with contextlib.suppress(ZeroDivisionError), self.forward(key) as buffer:
            buffer.container.append(self.new())
            self.manager.drop_session(key)
            raise ZeroDivisionError
        del self.model[key]

    def drop(self, key, _):
        if self.manager.drop_session(key):
            del self.model[key]

    def lose(self, _, hold):
        """The least recently used one leaves the table; its holder, if there is one, can still read."""
        oldest = next(iter(self.manager._table.order), None)
        if oldest is not None:
            self.held = [self.manager.peek(oldest)] * hold
            table = self.manager._table
            with table.lock:
                table.lose(table.entries[oldest], Reason.COUNT)
            del table
            wanted = self.model.pop(oldest)
            if hold and self.fault is None:
                assert list(map(described, whole(self.held[-1]).get(FIELD).view())) == wanted

    @rule(
        how=st.sampled_from(["full", "free", "a fault"]),
        calls=st.integers(0, 9),
        error=st.sampled_from([errno.EIO, errno.ENOSPC]),
    )
    def the_disk_is(self, how, calls, error):
        if how == "a fault":
            self.fault, self.error = calls, error
        else:
            self.disk.budget = self.disk.nbytes if how == "full" else LARGE

    @invariant()
    def parts_agree(self):
        if not hasattr(self, "manager"):
            return
        fault, self.fault = self.fault, None  # a look meets none
        spiller = self.manager.offloader.spiller
        self.manager.check()
        self.disk.check()
        sessions = [*map(self.manager.peek, self.manager.keys()), *self.held]
        tickets = [*spiller.orphans]
        for session in {id(session): session for session in sessions}.values():
            objects = session._away[1] if session.parked else session.objects
            if FIELD in objects:
                tickets += [segment._ticket for segment in objects[FIELD]._segments._segments]
        assert len(tickets) == len(set(tickets)), "a file of two"
        assert set(tickets) == set(self.disk._tickets.values()), "a file of nobody, or none of somebody"
        assert spiller.nbytes == sum(ticket.nbytes for ticket in tickets)
        assert self.disk.nbytes == spiller.nbytes + sum(self.disk._strays.values())
        for key, wanted in self.model.items():
            session = self.manager.peek(key)
            if not session.parked:
                buffer = session.get(FIELD)
                kept = sum(segment.count for segment in buffer.segments)
                assert kept + len(buffer) == len(wanted)
        self.fault = fault


def run(folder, settings):
    machine = type("InFolder", (SpillMachine,), {"folder": folder})
    run_state_machine_as_test(machine, settings=settings)


def test_any_life_of_spilled_sessions_is_as_plain_lists(tmp_path):
    run(tmp_path, sized(2000, stateful_step_count=40))

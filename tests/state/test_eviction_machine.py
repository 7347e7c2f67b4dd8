"""Sessions over manager, tiers and pool against plain lists, abandoned ones, faults and stops among them.

The rule: no session is ever lost while one that was used earlier stays anywhere; with ``on_lost: error`` or a
disk none is lost at all but those that are marked stale. And never one more than makes the room.
"""

import contextlib
import logging
import os
import tempfile
from pathlib import Path

import pytest
import torch
from eviction_model import Model, RefusedError
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from profiles import sized
from test_pool import Places

from vllm_omni_session_state import SessionStateManager
from vllm_omni_session_state.base.errors import (
    CannotParkError,
    NoRoomError,
    SessionRestoreFailedError,
    SessionStateLostError,
)
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.state.session import Declaration

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
KEYS = st.sampled_from("abcdefg")
SIZE = 100
SLAB = 512  # what one storage of that size takes in host memory
HOW = {NoRoomError: "no room", SessionRestoreFailedError: "stays parked", SessionStateLostError: "lost"}


class Stop(SystemExit):
    """As vLLM-Omni's worker turns a signal into one, wherever it is at that moment."""


class Faulty:
    """A tier of which one of the next calls fails, before it has done anything or after all of it."""

    fault, left, late = None, 0, False

    def put(self, *args, **kwargs):
        return self._maybe(super().put, *args, **kwargs)

    def get(self, held):
        return self._maybe(super().get, held)

    def drop(self, held):
        # What is let go of has no way to fail but a stop.
        return self._maybe(super().drop, held) if self.fault is Stop else super().drop(held)

    def _maybe(self, call, *args, **kwargs):
        self.left -= 1
        if self.fault is None or self.left >= 0:
            return call(*args, **kwargs)
        fault, self.fault = self.fault, None
        if self.late:
            done = call(*args, **kwargs)
            if call.__name__ == "put":
                # Else nobody would know of it: after a stop it counts until the process has ended.
                super().drop(done)
        raise fault("as asked")


class FaultyHost(Faulty, HostTier):
    """Host memory that fails."""


class FaultyDisk(Faulty, DiskTier):
    """A disk that fails."""


def fill(session, number):
    session.attrs["number"] = number
    session.attrs["x"] = torch.full((SIZE,), number % 251, dtype=torch.uint8)


def file_nbytes():
    """What one session takes on the disk, give or take the digits of its number."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        disk = DiskTier(folder, budget=1 << 20)
        manager = SessionStateManager(device_budget=0, disk=disk)
        with manager.lease("a") as session:
            fill(session, 10)
        nbytes = disk.nbytes
        disk.close()
    return nbytes


FILE = file_nbytes()


class EvictionMachine(RuleBasedStateMachine):
    """Whatever the settings are, the manager has each session where the lists have it."""

    def __init__(self):
        super().__init__()
        self.manager = self.disk = None

    @initialize(
        cap=st.integers(1, 4),
        budget=st.none() | st.integers(0, 3),
        host=st.none() | st.integers(0, 3),
        disk=st.sampled_from([None, None, 0, 1, 2]),
        strict=st.booleans(),
        most=st.sampled_from([1, 2, 3, 9, 9]),
        places=st.sampled_from([None, 1, 2, 3]),
        hard=st.booleans(),
    )
    def start(self, cap, budget, host, disk, strict, most, places, hard):
        hard = hard and budget is not None and (host is not None or disk is not None)
        self.folder = None if disk is None else tempfile.mkdtemp(dir=MEMORY)
        self.disk = None if disk is None else FaultyDisk(self.folder, budget=disk * FILE + FILE // 2)
        self.host = None if host is None else FaultyHost(budget=host * SLAB)
        self.tiers = [tier for tier in (self.host, self.disk) if tier is not None]
        self.manager = SessionStateManager(
            max_sessions=cap,
            device_budget=None if budget is None else budget * SIZE,
            tier=self.host,
            disk=self.disk,
            max_parked=most,
            on_lost="error" if strict else "warn",
            declaration=Declaration(device_nbytes=SIZE, host_fields=frozenset()),
        )
        if places is not None:
            self.manager.capacity.pool = Places(self.manager, places)
        if hard:
            self.manager.capacity.fix_device_budget()
        self.model = Model(
            cap=cap,
            budget=budget,
            hard=hard,
            host=host,
            disk=disk,
            strict=strict,
            most=most,
            places=places,
        )
        self.numbers = {}  # key -> number of the session that its client believes in
        self.count = 9
        self.held = {}  # key -> leases under way

    def enter(self, key):
        """The session, verified or filled, in a lease."""
        lease = self.manager.lease(key)
        session = lease.__enter__()
        try:
            if session.empty:
                self.count += 1
                self.numbers[key] = self.count
                fill(session, self.count)
            number = self.numbers[key]
            assert session.attrs["number"] == number
            assert session.attrs["x"].tolist() == [number % 251] * SIZE
        except BaseException as error:
            lease.__exit__(type(error), error, None)
            raise
        return lease

    def step(self, key):
        if self.manager.capacity.pool is not None:
            self.manager.prepare(key)
        self.enter(key).__exit__(None, None, None)

    def both(self, real, wanted):
        """Do the same to the manager and to the lists, and compare how it went."""
        if any(tier.fault for tier in self.tiers):
            self.alone(real)
            return
        said, told = None, None
        try:
            real()
        except tuple(HOW) as error:
            said = HOW[type(error)]
        try:
            wanted()
        except RefusedError as error:
            told = error.args[0]
        assert said == told

    def alone(self, real):
        """Do it to the manager alone, where something fails or stops the process: the rule still holds."""
        table = self.manager._table
        resting = [entry for entry in table.resting(but=self.stepped) if entry.session.key != self.dropped]
        may_go = [entry for entry in resting if entry.stale or not self.model.loses_nobody]
        before = self.losses()
        with contextlib.suppress(*HOW, CannotParkError, Stop):
            real()
        for tier in self.tiers:
            tier.fault = None
        gone = [entry for entry in resting if table.entries.get(entry.session.key) is not entry]
        assert gone == may_go[: len(gone)], "one that was used earlier stays"
        assert self.losses() - before == len(gone), "lost in silence"
        self.follow()

    stepped = dropped = None

    def losses(self):
        return sum(count for name, count in self.manager.stats().items() if name.startswith("lost:"))

    def follow(self):
        """Bring the lists to where the manager is."""
        table, model = self.manager._table, self.model
        model.used = [
            entry.session.key for entry in sorted(table.entries.values(), key=lambda entry: entry.turn)
        ]
        model.place = {key: entry.tier for key, entry in table.entries.items()}
        model.leases = {key: len(entry.leases) for key, entry in table.entries.items()}
        model.stale = {key for key, entry in table.entries.items() if entry.stale}
        model.mourned = {key for key in "abcdefg" if table.losses.reason(key) is not None}
        model.lost = [None] * self.losses()

    @rule(key=KEYS)
    def use(self, key):
        if not self.held.get(key):
            self.stepped = key
            self.both(lambda: self.step(key), lambda: self.model.step(key))
            self.stepped = None

    @rule(key=KEYS)
    def hold(self, key):
        if self.held.get(key) or self.model.places is not None:
            return

        def enter():
            self.held[key] = [self.enter(key)]

        self.stepped = key
        self.both(enter, lambda: self.model.begin(key))
        self.stepped = None

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), fails=st.booleans())
    def let_go(self, data, fails):
        key = data.draw(st.sampled_from(sorted(key for key, leases in self.held.items() if leases)))
        lease = self.held[key].pop()

        def leave():
            if fails:
                assert lease.__exit__(ValueError, ValueError("the forward"), None) is False
            else:
                lease.__exit__(None, None, None)

        def wanted():
            self.model.end(key)
            if not fails:
                self.model.enforce()

        self.both(leave, wanted)

    @rule(key=KEYS)
    def mark_stale(self, key):
        resting = key in self.model.place and not self.model.leases.get(key)
        assert self.manager.mark_stale(key) is resting
        if resting:
            self.model.stale.add(key)

    @rule(key=KEYS)
    def drop(self, key):
        if self.held.get(key):
            return

        def wanted():
            self.model.mourned.discard(key)
            if key in self.model.place:
                self.model.forget(key)

        self.dropped = key
        self.both(lambda: self.manager.drop_session(key), wanted)
        self.dropped = None

    @rule(key=KEYS)
    def park(self, key):
        parked = []

        def real():
            try:
                parked.append(self.manager.park(key))
            except CannotParkError:
                parked.append(False)

        def wanted():
            idle = self.model.place.get(key) == "device" and not self.model.leases.get(key)
            if idle and self.model.tiered:
                self.model.down(key)
            assert parked == [self.model.place.get(key, "device") != "device"]

        self.both(real, wanted)

    @rule(budget=st.none() | st.integers(0, 3))
    def change_the_budget(self, budget):
        if self.model.hard and (budget is None or budget * SIZE > self.manager.capacity._most):
            return
        self.model.budget = budget
        self.manager.capacity.device_budget = None if budget is None else budget * SIZE

    @precondition(lambda self: self.tiers)
    @rule(
        data=st.data(),
        fault=st.sampled_from([MemoryError, RuntimeError, Stop, Stop]),
        left=st.integers(0, 3),
        late=st.booleans(),
    )
    def something_will_fail(self, data, fault, left, late):
        tier = data.draw(st.sampled_from(self.tiers))
        tier.fault, tier.left, tier.late = fault, left, late

    def on_its_way(self):
        return [key for key, entry in self.manager._table.entries.items() if entry.moving]

    @invariant()
    def is_where_the_lists_have_it(self):
        if self.manager is None:
            return
        self.manager.check()
        table, model = self.manager._table, self.model
        by_use = sorted(table.entries.values(), key=lambda entry: entry.turn)
        assert [entry.session.key for entry in by_use if not entry.leases] == [
            key for key in model.used if not model.leases.get(key)
        ]
        assert {key: entry.tier for key, entry in table.entries.items()} == model.place
        assert {key for key, entry in table.entries.items() if entry.stale} == model.stale
        assert not self.on_its_way(), "whoever wants it waits for ever"
        assert self.losses() == len(model.lost)
        stale = self.manager.stats().get("lost:stale", 0)
        assert None in model.lost or stale == len([key for key, stale in model.lost if stale])

    def teardown(self):
        if self.manager is None or self.on_its_way():
            return
        for tier in self.tiers:
            tier.fault = None
        for leases in self.held.values():
            while leases:
                leases.pop().__exit__(None, None, None)
        self.manager.drop_all()
        self.manager.check()
        assert self.manager.stats()["total_nbytes"] == 0
        if self.disk is not None:
            self.disk.close()
            Path(self.folder).rmdir()


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Losses are said at WARNING; here there are thousands."""
    caplog.set_level(logging.CRITICAL, logger="vllm_omni.session_state")


TestEvictionMachine = EvictionMachine.TestCase
TestEvictionMachine.settings = sized(4000, stateful_step_count=30)

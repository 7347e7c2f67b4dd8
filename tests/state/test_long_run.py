"""A long life of one manager: hundreds of thousands of random operations, and at its end nothing is left.

Twice in a life, at its half and at its end, everything is dropped and let go of. Both times every ledger is
at 0, every storage that was ever made is collected, and the manager reaches as many objects as the other
time; between the two the process has not grown.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import random
import sys
import types
from pathlib import Path

import pytest
import torch
from profiles import count
from torch.multiprocessing.reductions import StorageWeakRef

from vllm_omni_session_state import LatentBuffer, SessionStateManager
from vllm_omni_session_state.accounting.allocations import Allocation
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.state.session import Declaration

OPERATIONS = 1_000_000
NAMES = ("x", "y", "z")
KEYS = [f"client {number}" for number in range(24)]
PAGES = 4 << 20
"""Growth that is none, in bytes. The allocator keeps pages that one small object pins, up to about 1 MiB in
this test; half of the long run leaks 8 MiB if an operation leaks 16 bytes."""


class Life:
    """One manager and its clients."""

    def __init__(self, manager, *, seed):
        self.manager = manager
        self.draws = random.Random(seed)
        self.storages = []  # a weak reference to each storage that may still be there
        self.common = self.fresh()  # one that sessions share
        self.holders = []  # sessions that a client holds on to
        self.operations = (
            [self.assign] * 8
            + [self.append] * 4
            + [self.stage, self.commit, self.discard, self.evict, self.reset] * 2
            + [self.look] * 4
            + [self.drop, self.hold, self.hold, self.let_go, self.late, self.outside, self.fail]
        )

    def run(self, operations):
        for number in range(operations):
            self.draws.choice(self.operations)()
            if number % 1000 == 999:
                self.storages = [storage for storage in self.storages if not storage.expired()]
                assert len(self.storages) < 2000, "storages pile up"
            if number % (operations // 10) == 0:
                self.manager.check()

    def end(self):
        """Drop everything and let go; returns how many objects the manager still reaches."""
        self.holders.clear()
        self.manager.drop_all()
        for key in KEYS:
            self.manager.drop_session(key)  # forgives a loss
        self.manager.charge_outside("copy")
        self.common = None
        gc.collect()
        self.manager.check()
        stats = self.manager.stats()
        left = {name: stats[name] for name in stats if "nbytes" in name or name.endswith("sessions")}
        assert not any(left.pop(name) for name in left.copy() if name != "max_sessions"), left
        assert stats["outside"] == 0
        assert [storage for storage in self.storages if not storage.expired()] == []
        self.storages.clear()
        reached = reachable(self.manager)
        self.common = self.fresh()
        return reached

    def fresh(self):
        value = torch.zeros(self.draws.randrange(1, 2000), dtype=torch.uint8)
        self.storages.append(StorageWeakRef(value.untyped_storage()))
        return value

    def value(self):
        if self.draws.random() < 0.3:
            return self.common[: self.draws.randrange(1, 9)]
        value = self.fresh()
        return self.draws.choice((value, [value[1:], value], value.numpy(), {"k": (value,)}))

    def lease(self):
        return self.manager.lease(self.draws.choice(KEYS))

    def assign(self):
        with self.lease() as session:
            session.attrs[self.draws.choice(NAMES)] = self.value()

    def buffer(self, session):
        maxlen = self.draws.choice((None, 3))

        def make():
            buffer = LatentBuffer()
            buffer.allocate(maxlen=maxlen)
            return buffer

        return session.get_or_create(self.draws.choice(("ring", "frames")), make, LatentBuffer)

    def append(self):
        with self.lease() as session:
            buffer = self.buffer(session)
            buffer.append(self.value())
            if len(buffer) > 6:
                buffer.replace(list(buffer.container)[-2:])

    def stage(self):
        with self.lease() as session:
            self.buffer(session).stage(self.value())

    def commit(self):
        with self.lease() as session:
            buffer = self.buffer(session)
            if buffer.staged is not None:
                buffer.commit()

    def discard(self):
        with self.lease() as session:
            self.buffer(session).discard()

    def evict(self):
        with self.lease() as session:
            self.buffer(session).evict()

    def reset(self):
        with self.lease() as session:
            if self.draws.random() < 0.5:
                session.reset()
            else:
                self.buffer(session).reset()

    def look(self):
        key = self.draws.choice(KEYS)
        self.manager.peek(key)
        self.manager.stats()
        assert (key in self.manager) in (True, False)
        if self.draws.random() < 0.02:
            self.manager.listing()

    def drop(self):
        self.manager.drop_session(self.draws.choice(KEYS))

    def hold(self):
        with self.lease() as session:
            self.holders.append(session)

    def let_go(self):
        self.holders.clear()

    def late(self):
        """A holder writes to what may have left the table or ended."""
        if self.holders and not self.holders[0].parked:
            session = self.holders[0]
            session.attrs["late"] = self.value()
            self.manager.settle(session)

    def outside(self):
        self.manager.charge_outside("copy", self.value())

    def fail(self):
        with contextlib.suppress(ZeroDivisionError), self.lease() as session:
            session.attrs["x"] = self.value()
            raise ZeroDivisionError


def reachable(manager):
    """How many objects a manager leads to; code and types are the program's, not its.

    Numbers are not counted: which of them are one object is Python's affair, as of those up to 256.
    """
    stack, seen = [manager], {}
    while stack:
        value = stack.pop()
        if id(value) not in seen and not isinstance(value, type | types.ModuleType | types.FunctionType):
            seen[id(value)] = value
            stack += gc.get_referents(value)
    return sum(not isinstance(value, int | float) for value in seen.values())


def resident():
    """Bytes of this process in memory, after what is free went back to the system; ``None``: unknown."""
    gc.collect()
    if not sys.platform.startswith("linux"):
        return None
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Losses are said at WARNING; here there are thousands."""
    caplog.set_level(logging.CRITICAL, logger="vllm_omni.session_state")


def grown_in_the_second_half(life, operations):
    life.run(operations // 2)
    reached, before = life.end(), resident()
    life.run(operations // 2)
    again, after = life.end(), resident()
    assert again == reached, f"the manager reached {reached} objects at its half and reaches {again}"
    return 0 if before is None or after is None else after - before


def test_after_a_million_operations_nothing_is_left_and_the_process_has_not_grown():
    """A twentieth in the short run."""
    life = Life(SessionStateManager(max_sessions=16), seed=1)
    assert grown_in_the_second_half(life, count(OPERATIONS)) < PAGES


def test_after_a_life_with_parking_nothing_is_left():
    """25,000 operations under a budget, with a tier too small for all: some are parked, some are lost."""
    manager = SessionStateManager(
        max_sessions=16,
        device_budget=20_000,
        tier=HostTier(budget=60_000),
        declaration=Declaration(device_nbytes=1 << 20, host_fields=frozenset({"frames"})),
    )
    life = Life(manager, seed=2)
    assert grown_in_the_second_half(life, count(OPERATIONS // 40)) < PAGES
    stats = manager.stats()
    assert min(stats["parks"], stats["restores"], stats["evictions"]) > 0


def test_an_object_that_stays_behind_would_be_seen():
    manager = SessionStateManager()
    before = reachable(manager)
    manager._table.accounts._outside.charge("forgotten", (Allocation("cpu", 1, 1),))
    assert reachable(manager) > before

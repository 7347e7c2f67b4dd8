"""Workers that start, write, stop and are killed on one path, against a plain model of every file."""

import itertools
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from files import SESSION, die, document, nbytes_below, same, storages
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from profiles import sized
from saboteur import broken_call

from vllm_omni_session_state.base.errors import TierFaultError, TierFullError
from vllm_omni_session_state.offload import file_format
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.file_format import PART, read_file
from vllm_omni_session_state.offload.memory import views_of

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
UNIT = 1000
SIZES = st.integers(0, 3).map(lambda units: units * UNIT)


@dataclass
class Left:
    """A folder that a dead worker kept: by its files' names what number each session has."""

    name: str
    number: int
    written: int
    nbytes: int
    sessions: dict[str, tuple[int, int]]


@dataclass(eq=False)
class Worker:
    tier: DiskTier
    number: int
    keep: bool
    held: dict = field(default_factory=dict)  # number of a session -> its ticket and size
    written: dict = field(default_factory=dict)  # the same -> when

    @property
    def nbytes(self):
        return sum(ticket.nbytes for ticket, _ in self.held.values())


class KeptMachine(RuleBasedStateMachine):
    """The model has no file: what must be on the disk follows from what was done, and in which order."""

    @initialize()
    def begin(self):
        self.top = Path(tempfile.mkdtemp(dir=MEMORY))
        self.workers, self.left = [], []
        self.clock = itertools.count(1)
        self.sessions = itertools.count()

    def teardown(self):
        if hasattr(self, "top"):
            for worker in list(self.workers):
                self.gone(worker)
                worker.tier.close()
            self.is_as_the_model_says()
            shutil.rmtree(self.top)

    def counted(self, number):
        return sorted((each for each in self.left if each.number == number), key=lambda each: each.written)

    def shrink(self, number, most):
        """What the oldest do when their room is wanted."""
        for each in self.counted(number):
            if sum(other.nbytes for other in self.counted(number)) <= most:
                return
            self.left.remove(each)

    @precondition(lambda self: len(self.workers) < 3)
    @rule(keep=st.booleans(), budget=st.integers(0, 8).map(lambda units: units * UNIT))
    def start(self, keep, budget):
        tier = DiskTier(self.top, budget=budget, keep=keep)
        taken = {worker.number for worker in self.workers}
        number = next(each for each in itertools.count() if each not in taken)
        assert Path(tier.folder).name.startswith(f"{'kept' if keep else 'worker'}-{number}-")
        self.workers.append(Worker(tier, number, keep))
        self.shrink(number, budget)

    def some(self, data, *, holding=False):
        return data.draw(st.sampled_from([each for each in self.workers if each.held or not holding]))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), size=SIZES, full=st.integers(0, 3))
    def put(self, data, size, full):
        """Write a session, while the file system says so many times that it is full."""
        worker, session = self.some(data), next(self.sessions)
        wanted = worker.nbytes + file_nbytes(session, size)
        fits = wanted <= worker.tier.budget
        if fits:
            self.shrink(worker.number, worker.tier.budget - wanted)
        fits_there = full <= len(self.left)
        if fits:
            self.left = sorted(self.left, key=lambda each: each.written)[full:]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(DiskTier, "_write", failing(DiskTier._write, full))
            try:
                ticket = worker.tier.put(document(session), storages(size, seed=session), session=SESSION)
            except TierFullError:
                assert not fits, "what was kept refused a session"
                return
            except TierFaultError:
                assert fits, "what has no room in the budget is not tried"
                assert not fits_there, "something kept was still there"
                return
        assert fits
        assert fits_there
        worker.held[session] = (ticket, size)
        worker.written[session] = now = next(self.clock)
        os.utime(f"{worker.tier.folder}/{ticket.name}", ns=(now, now))

    @precondition(lambda self: any(worker.held for worker in self.workers))
    @rule(data=st.data())
    def drop(self, data):
        worker = self.some(data, holding=True)
        session = data.draw(st.sampled_from(sorted(worker.held)))
        worker.tier.drop(worker.held.pop(session)[0])
        del worker.written[session]

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), how=st.sampled_from(["stop", "kill", "kill while it writes"]))
    def end(self, data, how):
        worker = self.some(data)
        self.gone(worker)
        if how == "stop":
            worker.tier.close()
            return
        if how == "kill while it writes":
            (Path(worker.tier.folder) / f"0.safetensors{PART}").write_bytes(b"half of one")
        die(worker.tier)
        DiskTier(self.top, budget=1 << 30).close()  # another one starts, and has room for what is kept

    def gone(self, worker):
        self.workers.remove(worker)
        if worker.keep and worker.held:
            sessions = {ticket.name: (session, size) for session, (ticket, size) in worker.held.items()}
            name, written = Path(worker.tier.folder).name, max(worker.written.values())
            self.left.append(Left(name, worker.number, written, worker.nbytes, sessions))

    @invariant()
    def is_as_the_model_says(self):
        if not hasattr(self, "top"):
            return
        for worker in self.workers:
            worker.tier.check()
            assert worker.tier.nbytes == worker.nbytes
            kept = sum(each.nbytes for each in self.counted(worker.number))
            assert worker.nbytes + kept <= worker.tier.budget, "more than one budget"
            assert worker.tier.figures()["kept_nbytes"] >= kept
            for session, (ticket, size) in worker.held.items():
                assert same(worker.tier.get(ticket), storages(size, seed=session), session)
        living = {Path(worker.tier.folder).name for worker in self.workers}
        there = {path.name for path in self.top.iterdir()}
        assert there - living == {each.name for each in self.left}
        held = sum(worker.nbytes for worker in self.workers) + sum(each.nbytes for each in self.left)
        assert nbytes_below(self.top) == held
        for each in self.left:
            for name, (session, size) in each.sessions.items():
                assert same(read_file(self.top / each.name / name), storages(size, seed=session), session)


def file_nbytes(session, size):
    views = views_of(storages(size, seed=session))
    return len(file_format.compose(document(session), views, session=SESSION)[0]) + size


def failing(real, times):
    left = [times]

    def write(self, pieces):
        if left[0]:
            left[0] -= 1
            with broken_call("write", "ENOSPC"):
                return real(self, pieces)
        return real(self, pieces)

    return write


TestKeptMachine = KeptMachine.TestCase
TestKeptMachine.settings = sized(2000, stateful_step_count=40)

"""Every system call of the disk tier fails once, in each of several ways; afterwards all is as it was."""

import errno
import itertools
import os

import pytest
import torch
from files import SESSION, document, names, same, storages
from saboteur import CALLS, Saboteur

from vllm_omni_session_state.base.errors import BadFileError, TierFaultError
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.file_system import System


class Course:
    """A tier's life in which one call fails: a step that met a fault is tried again, and must then go."""

    def __init__(self, path):
        self.path = path
        self.tier = None
        self.held = {}  # number -> ticket
        self.faults = []

    def step(self, ask):
        try:
            return ask()
        except TierFaultError as fault:
            self.faults.append(fault)
            self.verify()
        return ask()

    def verify(self):
        if self.tier is not None:
            self.tier.check()
            for number, ticket in self.held.items():
                assert same(self.tier.get(ticket), self.content(number), number)

    @staticmethod
    def content(number):
        return storages(50 * number, 7, seed=number)

    def put(self, number):
        ticket = self.step(lambda: self.tier.put(document(number), self.content(number), session=SESSION))
        self.held[number] = ticket

    def get(self, number):
        contents = self.step(lambda: self.tier.get(self.held[number]))
        assert same(contents, self.content(number), number)

    def drop(self, number):
        self.tier.drop(self.held.pop(number))  # a fault leaves a file that is tried again
        self.tier.check()

    def run(self):
        self.tier = self.step(lambda: DiskTier(self.path, budget=1 << 20))
        self.put(1)
        self.put(2)
        self.get(1)
        self.drop(1)
        self.put(3)
        self.get(3)
        self.get(2)
        self.drop(2)
        self.held.clear()
        tier, self.tier = self.tier, None
        self.step(tier.close)


def descriptors():
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - no folder of files


def leave_a_dead_workers_folder(path):
    dead = path / f"worker-{'0' * 32}"
    dead.mkdir()
    (dead / "x.safetensors").write_bytes(b"x")
    (dead / "y.safetensors.part").write_bytes(b"y")


@pytest.mark.parametrize("how", ["ENOSPC", "EIO", "late EIO", "short", "stuck"])
def test_any_one_call_may_fail_and_nothing_changes(tmp_path, how):
    seen, before = set(), descriptors()
    for at in itertools.count():
        path = tmp_path / str(at)
        path.mkdir(0o700)
        leave_a_dead_workers_folder(path)
        with pytest.MonkeyPatch.context() as monkeypatch:
            saboteur, course = Saboteur(monkeypatch, at, how), Course(path)
            course.run()
        assert len(course.faults) <= 1
        for fault in course.faults:
            assert str(path) in fault.file
            assert fault.purpose
            assert fault.remedy
            if how in ("ENOSPC", "EIO"):
                assert how in fault.why
        if how == "short":
            assert not course.faults, "a short read or write is continued"
        DiskTier(path, budget=0).close()
        assert names(path) == [], f"call {at} ({saboteur.hit}) left something for good"
        assert descriptors() == before, f"call {at} ({saboteur.hit}) left a file open"
        if saboteur.hit:
            seen.add(saboteur.hit)
        if saboteur.calls <= at:
            break
    expected = {
        "short": {"write", "readv"},
        "stuck": {"write", "readv"},
        "late EIO": {"makedirs", "mkdir", "flock", "fsync", "rename", "write"},
    }
    assert seen == expected.get(how, set(CALLS) - {"stat"}), "every call was hit; kept folders have that one"


def test_a_file_gets_its_name_after_its_bytes_are_on_the_disk(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, budget=1 << 20)
    trace = []

    def traced(name, real):
        def call(*args, **kwargs):
            done = real(*args, **kwargs)
            trace.append((name, done if name == "open" else args[0]))
            return done

        return staticmethod(call)

    with monkeypatch.context() as patched:
        for name in CALLS:
            patched.setattr(System, name, traced(name, getattr(System, name)))
        ticket = tier.put(document(), storages(10), session=SESSION)
    (_, fd), *rest = trace
    assert [(name, what) for name, what in rest if name != "write"] == [
        ("fsync", fd),
        ("close", fd),
        ("rename", f"{ticket.name}.part"),
        ("fsync", tier._folder.fd),
    ]
    assert all(what == fd for name, what in rest if name == "write")
    tier.close()


def test_what_cannot_be_removed_after_a_failed_write_is_removed_at_the_next(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, budget=1 << 20)

    def broken(*args, **kwargs):
        raise OSError(errno.EIO, "as asked")

    with monkeypatch.context() as patched:
        patched.setattr(System, "fsync", staticmethod(broken))
        patched.setattr(System, "unlink", staticmethod(broken))
        with pytest.raises(TierFaultError, match="look after the disk"):
            tier.put(document(), storages(10), session=SESSION)
    assert tier.nbytes == 0
    assert len(names(tier.folder)) == 1
    tier.check()
    ticket = tier.put(document(), storages(10), session=SESSION)
    assert names(tier.folder) == [ticket.name]
    tier.close()


def test_a_worker_that_hangs_while_starting_is_waited_for_and_then_named(tmp_path, monkeypatch):
    import fcntl

    monkeypatch.setattr("vllm_omni_session_state.offload.worker_dir.LOCK_WAIT_S", 0.05)
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(TierFaultError, match="another worker that starts holds its lock"):
        DiskTier(tmp_path, budget=1)
    os.close(fd)
    DiskTier(tmp_path, budget=1).close()


@pytest.mark.parametrize("size", [10, 3 << 20], ids=["small", "large"])
def test_a_machine_without_memory_leaves_the_file_where_it_is(tmp_path, monkeypatch, size):
    tier = DiskTier(tmp_path, budget=1 << 23)
    ticket = tier.put(document(), storages(size), session=SESSION)

    def full(*args, **kwargs):
        raise RuntimeError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", full)
        with pytest.raises(MemoryError, match="no host memory"):
            tier.get(ticket)
    assert same(tier.get(ticket), storages(size))
    tier.close()


def test_a_fault_says_purpose_file_and_remedy():
    error = BadFileError("it ends early", file="/x/y")
    assert str(error).startswith("cannot read a parked session: /x/y: it ends early; its bytes are not")

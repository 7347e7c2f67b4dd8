"""A file system that fails: one chosen system call of the disk tier goes wrong, in one of several ways."""

import contextlib
import errno
import os

import pytest

from vllm_omni_session_state.offload.file_system import System

CALLS = [name for name in vars(System) if not name.startswith("_")]


class Saboteur:
    """Lets one system call of those that follow go wrong.

    Args:
        at: Which, counted from 0.
        how: ``"ENOSPC"`` or ``"EIO"``: it fails and does nothing; ``"late EIO"``: it fails and has
            done what was asked; ``"short"``: a read or write moves one byte; ``"stuck"``: it moves none.
    """

    def __init__(self, monkeypatch, at, how):
        self.at, self.how = at, how
        self.calls, self.hit = 0, None
        for name in CALLS:
            monkeypatch.setattr(System, name, staticmethod(self.wrapped(name, getattr(System, name))))

    def wrapped(self, name, real):
        def call(*args, **kwargs):
            self.calls += 1
            if self.calls - 1 != self.at:
                return real(*args, **kwargs)
            return self.spoil(name, real, *args, **kwargs)

        return call

    def spoil(self, name, real, *args, **kwargs):
        moves = name in ("write", "readv")
        if self.how in ("short", "stuck"):
            if not moves:
                return real(*args, **kwargs)
            self.hit = name
            if self.how == "stuck":
                return 0
            fd, data = args
            return real(fd, data[:1]) if name == "write" else real(fd, [data[0][:1]])
        late = self.how == "late EIO"
        if late and name not in ("makedirs", "mkdir", "flock", "fsync", "rename", "write"):
            return real(*args, **kwargs)
        self.hit = name
        if late or name == "close":  # a descriptor is closed even where close() fails
            real(*args, **kwargs)
        number = errno.ENOSPC if self.how == "ENOSPC" else errno.EIO
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def broken_call(name, error, *, times=1):
    """The next calls of that name fail, and do nothing; all of them must come."""
    left, real = [times], getattr(System, name)

    def call(*args, **kwargs):
        if left[0]:
            left[0] -= 1
            number = getattr(errno, error)
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(System, name, staticmethod(call))
        yield
    assert left == [0], f"{name} was not called {times} times"

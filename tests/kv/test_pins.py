"""A fault between the look for a session and its forward's lease: nobody uses the session afterwards."""

import contextlib
import sys
from pathlib import Path

import pytest

import vllm_omni_session_state
from vllm_omni_session_state.manager.manager import SessionStateManager

pytestmark = pytest.mark.host

OURS = str(Path(vllm_omni_session_state.__file__).parent)


class FaultAt:
    """Raises an error at one line between the end of `prepare()` and a forward's own body, counted from 0.

    Not under the lock: where a `with` ends, a tracer's error comes before the lock is let go of.
    """

    def __init__(self, line, error, files, lock):
        self.line, self.error, self.files, self.lock = line, error, files, lock
        self.armed, self.where = False, None

    def __enter__(self):
        sys.settrace(self.call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def call(self, frame, _event, _arg):
        return self.trace if frame.f_code.co_filename.startswith(self.files) else None

    def trace(self, frame, event, _arg):
        if event == "return" and frame.f_code is SessionStateManager.prepare.__code__:
            self.armed = True
        elif event == "line" and self.armed and self.where is None and not self.lock.locked():
            self.line -= 1
            if self.line < 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise self.error(self.where)
        return self.trace


@contextlib.contextmanager
def forward(runner, session, how, fault):
    """What vLLM-Omni does around a forward; the body is where the fault is over."""
    with runner._bound_ar_session(session, description="test", **how):
        fault.armed = False
        yield


def faults_at_every_line(model, how, error):
    """Faults, and after each of them nobody uses the session; how many were lost."""
    runner, manager = model.runner, model.pipeline._memory_manager
    files = OURS, sys.modules[type(runner).__module__].__file__
    faults, lost, line = 0, 0, 0
    while True:
        for session in ("new", "idle"):
            if session == "idle":
                with runner._bound_ar_session(session, description="test"):
                    manager.peek(session).attrs["x"] = 1
            fault = FaultAt(line, error, files, manager._table.lock)
            with contextlib.suppress(error), fault, forward(runner, session, how, fault):
                assert manager.used(session)
            entries = manager._table.entries.values()
            assert not [entry.key for entry in entries if entry.leases], fault.where
            assert not manager._uses.pins, fault.where
            manager.check()
            assert not (manager.has_lost(session) and session in manager), fault.where
            lost += manager.has_lost(session)
            faults += fault.where is not None
            runner.close_session(session)
            assert session not in manager
        if fault.where is None:
            break
        line += 1
    assert faults > 50
    return lost


@pytest.mark.parametrize("how", [{}, {"synchronize": False}], ids=["request", "stepwise"])
@pytest.mark.parametrize("options", [{}, {"host_budget": "1GiB"}], ids=["no tier", "host memory"])
def test_after_a_fault_at_any_line_before_the_lease_nobody_uses_the_session(load, how, options):
    model = load(**options)
    assert faults_at_every_line(model, how, RuntimeError), "what vLLM-Omni drops after an error is lost"
    assert not faults_at_every_line(model, how, SystemExit), "a stop loses nobody"


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_pin_that_nobody_gives_back_is_noticed(load, error, monkeypatch):
    monkeypatch.setattr(SessionStateManager, "give_back", lambda *_: None)
    with pytest.raises(AssertionError):
        faults_at_every_line(load(), {}, error)

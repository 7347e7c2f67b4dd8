"""What the plugin says: a line each, not more often than it is news, and nothing that steers a terminal."""

import logging

import hostile
import pytest
from hypothesis import given
from profiles import sized

from vllm_omni_session_state.base import log as log_module
from vllm_omni_session_state.base.errors import CannotParkError, NoRoomError, TierFullError
from vllm_omni_session_state.base.ids import show_in_the_clear
from vllm_omni_session_state.base.log import LOGGER, log_failure, log_rarely
from vllm_omni_session_state.manager.manager import SessionStateManager


class Lines(logging.Handler):
    """What a log holds in the end."""

    def __init__(self):
        super().__init__()
        self.records, self.text = [], ""

    def emit(self, record):
        self.records.append(record)
        self.text += logging.Formatter("%(levelname)s %(message)s").format(record) + "\n"

    @property
    def lines(self):
        return self.text.splitlines()


@pytest.fixture
def log():
    log_module.forget_said()
    lines = Lines()
    LOGGER.addHandler(lines)
    yield lines
    LOGGER.removeHandler(lines)
    log_module.forget_said()


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [1000.0]
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now[0])
    return now


def full(session="s-1", wanted=5):
    return CannotParkError(session, TierFullError("host", wanted=wanted, room=1, setting="host_budget"))


def test_a_refusal_is_one_line_with_its_remedy_and_once_a_minute(log, clock):
    for second in range(200):
        clock[0] = 1000.0 + second
        for session in ("s-1", "s-2"):
            log_failure("a session was not parked", full(session, wanted=second))
    assert len(log.lines) == 4
    assert [record.exc_info for record in log.records] == [None] * 4
    assert log.lines[0] == (
        "WARNING a session was not parked: session s-1 stays on the device: the host tier has 1 bytes left "
        "and 0 are wanted; raise host_budget"
    )
    assert log.lines[1].endswith("raise host_budget (119 more like it in the last 60 s)")


def test_refusals_of_two_kinds_do_not_hold_each_other_back(log, clock):
    for error in (full(), CannotParkError("s-1", "it has a window in progress"), NoRoomError("2 are kept")):
        for _ in range(3):
            log_failure("a session was not parked", error)
    log_failure("a session was not restored", full())
    assert len(log.lines) == 4


def broken(depth=0):
    if depth:
        raise ValueError("what vLLM-Omni says\nINFO all is well\x1b[2K")
    try:
        broken(1)
    except ValueError as error:
        raise KeyError("x") from error


def test_a_surprise_keeps_its_traceback_once_and_is_a_line_a_minute_then(log, clock):
    for second in range(0, 130, 10):
        clock[0] = 1000.0 + second
        try:
            broken()
        except KeyError as error:
            log_failure("a call failed", error)
    first, *later = [at for at, record in enumerate(log.records) if record.levelno == logging.ERROR]
    assert log.records[first].exc_info
    assert [log.records[at].exc_info for at in later] == [None, None]
    assert log.text.count('in broken\n    raise ValueError("what vLLM-Omni says') == 1
    assert "ValueError: what vLLM-Omni says\\nINFO all is well\\x1b[2K\n" in log.text
    assert log.lines[-1] == "ERROR a call failed: KeyError: 'x' (5 more like it in the last 60 s)"
    assert "\x1b" not in log.text
    assert not [line for line in log.lines if line.startswith("INFO")]


def test_what_is_said_after_a_quiet_time_counts_nothing(log, clock):
    for _ in range(2):
        log_rarely(logging.WARNING, ("x",), "so it is")
        clock[0] += 60
    assert log.lines == ["WARNING so it is"] * 2


@sized(1000)
@given(hostile.ids)
def test_an_error_of_the_host_that_repeats_an_id_is_one_line(key):
    lines = Lines()
    LOGGER.addHandler(lines)
    try:
        LOGGER.warning("the call failed: %s", ValueError(f"no session {key}"))
    finally:
        LOGGER.removeHandler(lines)
    assert len(lines.lines) == 1
    assert lines.text[:-1].isprintable()


@sized(400)
@given(hostile.sessions())
def test_a_lost_session_is_one_line_that_tells_it_from_all_others(keys):
    lines = Lines()
    show_in_the_clear(True)
    LOGGER.addHandler(lines)
    try:
        manager = SessionStateManager(max_sessions=1)
        for key in (*keys, "the last one"):
            manager.get_or_create_session(key)
    finally:
        LOGGER.removeHandler(lines)
        show_in_the_clear(False)
    lost = [line.split()[2] for line in lines.lines]
    assert len(set(lost)) == len(lost) == len(keys)
    assert lines.text.replace("\n", "").isascii()

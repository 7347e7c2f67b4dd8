"""Real servers, each started once for all tests of a file: half a minute and more for each."""

import logging

import pytest

SILENCE_S = 10.0
"""A robot that says nothing for so long is hung up on; slow steps on a busy machine must fit in it."""


@pytest.fixture(scope="session")
def serve(dreamzero_checkpoint, tmp_path_factory):
    """Return a context manager that serves the tiny DreamZero; the worker begins with no session."""
    from contextlib import contextmanager

    from omni_tiny.serve import Server
    from omni_tiny.ways_to_end import clear
    from profiles import EXECUTOR

    @contextmanager
    def serving(**settings):
        settings = {"executor": EXECUTOR, **settings}
        with Server(dreamzero_checkpoint, tmp_path_factory.mktemp("served"), **settings) as server:
            clear(server)
            yield server

    return serving


@pytest.fixture(scope="module")  # no longer: the worker of an idle server keeps half a core busy
def server(serve):
    """With the flag on and nothing else set; a silent robot is hung up on soon."""
    with serve(idle_timeout_s=SILENCE_S) as server:
        yield server


@pytest.fixture
def untouched_host(monkeypatch, caplog):
    """vLLM-Omni's connection class as it was, before and after."""
    from vllm_omni.entrypoints.openpi.connection import RobotRealtimeConnection

    from vllm_omni_session_state.base.log import forget_said

    forget_said()
    host = RobotRealtimeConnection.handle_connection
    monkeypatch.setattr(RobotRealtimeConnection, "handle_connection", host)
    caplog.set_level(logging.INFO, logger="vllm_omni.session_state")

"""Real servers, each started once for all of this folder: half a minute and more for each."""

import pytest

SILENCE_S = 3.0
"""A robot that says nothing for so long is hung up on; slow steps on a busy machine must fit in it."""


@pytest.fixture(scope="session")
def serve(dreamzero_checkpoint, tmp_path_factory):
    """Return a context manager that serves the tiny DreamZero; the worker begins with no session."""
    from contextlib import contextmanager

    from omni_tiny.serve import Server
    from omni_tiny.ways_to_end import clear

    @contextmanager
    def serving(**settings):
        with Server(dreamzero_checkpoint, tmp_path_factory.mktemp("served"), **settings) as server:
            clear(server)
            yield server

    return serving


@pytest.fixture(scope="session")
def server(serve):
    """With the flag on and nothing else set; a silent robot is hung up on soon."""
    with serve(idle_timeout_s=SILENCE_S) as server:
        yield server

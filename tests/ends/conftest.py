"""Real servers, each started once for all of this folder: half a minute and more for each."""

import pytest


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
    """With the flag on and nothing else set; a silent robot is hung up on after a second."""
    with serve(idle_timeout_s=1.0) as server:
        yield server

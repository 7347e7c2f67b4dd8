"""Applications with the routes on, over workers that are fakes, served on a port of this machine."""

import pytest
from desk_fakes import Live


@pytest.fixture
def live(monkeypatch):
    """Return a function that serves: see `Live`; all are stopped in the end."""
    from vllm_omni_session_state.base.ids import show_in_the_clear
    from vllm_omni_session_state.omni.worker import rpc

    monkeypatch.setattr(rpc, "_gather", lambda mine: [mine])  # each replica is one rank
    started = []

    def serve(*keys, **settings):
        started.append(Live(**settings))
        started[-1].engine.begin(*keys)
        return started[-1]

    yield serve
    for each in started:
        each.stop()
    show_in_the_clear(False)

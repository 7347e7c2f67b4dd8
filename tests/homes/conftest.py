"""What the tests of homes begin with: a host that nobody has hooked, and a background in haste."""

import logging

import pytest
from pool_fakes import fresh_runtime

from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.omni.replicas import affinity


@pytest.fixture
def runtime(monkeypatch, caplog):
    """vLLM-Omni's ``StageRuntime``, hooked by the plugin as if for the first time."""
    monkeypatch.setattr(affinity, "ASK_EVERY_S", 0.01)
    forget_said()
    caplog.set_level(logging.INFO, logger="vllm_omni.session_state")
    return fresh_runtime(monkeypatch)


@pytest.fixture
def warnings(caplog):
    """Return a function that gives every WARNING of the plugin so far."""
    ours = "vllm_omni.session_state"
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name == ours
    ]

"""One bespoke and one managed tiny DreamZero, loaded once for all of this folder."""

import pytest


@pytest.fixture(scope="session")
def bespoke(dreamzero_checkpoint):
    from omni_tiny.inproc import TinyDreamZero

    with TinyDreamZero(dreamzero_checkpoint, flag=False, capacity=4) as model:
        yield model


@pytest.fixture(scope="session")
def load_managed(dreamzero_checkpoint):
    """Load a model with the flag on; the mutants of this plugin need one loaded under them."""
    from omni_tiny.inproc import TinyDreamZero

    return lambda: TinyDreamZero(dreamzero_checkpoint, flag=True, capacity=4)


@pytest.fixture(scope="session")
def managed(load_managed):
    with load_managed() as model:
        yield model


@pytest.fixture
def pair(bespoke, managed):
    """Both, with no session but the default one."""
    from lockstep import Lockstep

    return Lockstep(bespoke, managed).fresh()


@pytest.fixture
def host_state():
    """vLLM-Omni's own state class."""
    from vllm_omni.diffusion.models.dreamzero.state_dreamzero import DreamZeroState

    return DreamZeroState


@pytest.fixture
def session():
    """A new session."""
    from vllm_omni_session_state import SessionStateManager

    return SessionStateManager().get_or_create_session("a")


@pytest.fixture
def view(session, host_state):
    """DreamZero's state over that session."""
    from vllm_omni_session_state.adapters.dreamzero import view_of

    return view_of(session, host_state, window=2)

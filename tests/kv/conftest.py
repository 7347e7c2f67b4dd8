"""Six sessions, or more in the long run, each run alone once for all of this folder."""

import pytest
from profiles import LONG


@pytest.fixture(scope="session")
def crowd():
    """Past the end of an attention window, with a change of the prompt."""
    from omni_tiny.crowd import Crowd

    return Crowd(sessions=24, steps=10) if LONG else Crowd(sessions=6, steps=6)


@pytest.fixture(scope="session")
def alone(crowd, dreamzero_checkpoint):
    """Each session's outputs when it is the only one, on the model's own path."""
    return crowd.alone(dreamzero_checkpoint)


@pytest.fixture
def load(dreamzero_checkpoint):
    """Load models with room for three sessions and the options of a test; each is shut down in the end."""
    from contextlib import ExitStack

    from omni_tiny.inproc import TinyDreamZero

    with ExitStack() as stack:

        def loaded(**options):
            settings = {"session_state": options}
            model = TinyDreamZero(dreamzero_checkpoint, flag=True, capacity=3, model_config=settings)
            return stack.enter_context(model)

        yield loaded

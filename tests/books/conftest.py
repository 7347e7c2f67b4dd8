"""The books are tested as in a fresh process: a host that ran here before has switched gradients off."""

import pytest
import torch


@pytest.fixture(autouse=True)
def gradients():
    """Gradients are on."""
    with torch.enable_grad():
        yield

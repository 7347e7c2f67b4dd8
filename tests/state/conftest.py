"""What these tests find as a script would, whatever ran before them in this process."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _gradients_are_on():
    """A worker of vLLM-Omni that ran in this process has turned them off for all of it."""
    with torch.enable_grad():
        yield

"""What comes back is what left, also to ``torch.compile``: a park and a restore cause no compilation.

Compiled code guards on what it was compiled for: shapes, strides, which inputs are one tensor, and whether
a tensor is an inference tensor, as vLLM-Omni's are. The backend counts and runs the graph as it is.
"""

import pytest
import torch
from recompilation import MUTANTS, CountingBackend, bring_back_changed

from vllm_omni_session_state import LatentBuffer, SessionStateManager
from vllm_omni_session_state.offload.host_tier import HostTier

ROUNDS = 4


def fill(session, number):
    """Every kind of tensor that a session holds: vLLM-Omni's inference tensors and some ordinary ones."""
    with torch.inference_mode():
        base = torch.arange(48.0).reshape(6, 8) + number
        session.attrs["map"] = [base.clone(), base[:3].clone(), base]
        session.attrs["strided"] = (base + 1).t()
        session.attrs["offset"] = base[2:, 3:]
        ring = session.put("ring", LatentBuffer())
        ring.replace([base * 2, base * 3], maxlen=2)
    session.attrs["ordinary"] = torch.ones(6, 8)
    session.attrs["column"] = torch.ones(6, 8)[:, 2]
    session.attrs["leaf"] = torch.ones(8, requires_grad=True)


def read(values, chunks):
    """What a model does: it reads all of it, each in a way of its own."""
    first, short, base = values["map"]
    total = first.sum() + short.mean() + (base * values["strided"].t()).sum()
    total = total + values["offset"].sum() + values["ordinary"].sum() + values["column"].prod()
    return total + (values["leaf"] * 2).sum() + sum(chunk.sum() for chunk in chunks)


class Rollouts:
    """Sessions ``a`` and ``b`` of which only one has room, and the compiled code that reads them."""

    def __init__(self):
        self.backend = CountingBackend()
        self.read = torch.compile(read, backend=self.backend, dynamic=False, fullgraph=True)
        self.manager = SessionStateManager(max_sessions=1, tier=HostTier(budget=1 << 20))

    def step(self, key):
        with self.manager.lease(key) as session, torch.inference_mode():
            return self.read(dict(session.attrs), list(session.get("ring").container)).item()

    def start(self):
        """Fill both and read one; the other is parked unread."""
        for number, key in enumerate("ba"):
            with self.manager.lease(key) as session:
                fill(session, number)
        return self.step("a")


def test_sessions_that_were_parked_and_restored_are_read_without_another_compilation():
    rollouts = Rollouts()
    first = rollouts.start()
    assert rollouts.backend.compilations == 1
    for _ in range(ROUNDS):
        other = rollouts.step("b")
        assert rollouts.step("a") == first != other
    assert rollouts.backend.compilations == 1
    assert rollouts.manager.stats()["restores"] == 2 * ROUNDS


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_restore_that_changes_what_code_is_compiled_for_is_caught(monkeypatch, mutant):
    rollouts = Rollouts()
    rollouts.start()
    bring_back_changed(monkeypatch, mutant)
    rollouts.step("b")
    assert rollouts.backend.compilations == 2

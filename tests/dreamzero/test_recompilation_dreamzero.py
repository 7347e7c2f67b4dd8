"""The compiled transformer of the real host does not notice that sessions were parked in between.

vLLM-Omni compiles on platforms that have a code generator, and the CPU of these tests has none. So what the
host compiles is compiled here in vLLM-Omni's way, by a backend that counts and runs the graph as it is: each
block. Beside it the two layers before them, which are handed the session's own tensors.
"""

import numpy as np
import pytest
import torch
from omni_tiny.inproc import TinyDreamZero
from recompilation import CountingBackend, bring_back_changed

from vllm_omni_session_state.offload.host_tier import HostTier

pytestmark = pytest.mark.host

SESSIONS = ("robot-0", "robot-1", "robot-2")
ROUNDS = 3


class Run:
    """Three interleaved sessions on one compiled model.

    Attributes:
        compilations: How many there had been after each round.
        outputs: Of every step.
        restores: How often a session was brought back.
    """

    def __init__(self, checkpoint, *, parking, before_round=lambda _: None):
        self.compilations, self.outputs = [], []
        with TinyDreamZero(checkpoint, flag=True, capacity=len(SESSIONS)) as model:
            manager = model.pipeline._memory_manager
            if parking:
                manager.capacity.max_sessions, manager.offloader.host = 1, HostTier(budget=1 << 30)
            backend = CountingBackend()
            transformer = model.pipeline.transformer
            for layer in (*transformer.blocks, transformer.img_emb, transformer.text_embedding):
                layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True, dynamic=False)
            for round_ in range(ROUNDS):
                before_round(round_)
                for number, session in enumerate(SESSIONS):
                    rng = np.random.default_rng([number, round_])
                    self.outputs.append(model.step(session, rng=rng, frames=4 if round_ else 1))
                self.compilations.append(backend.compilations)
            self.restores = manager.stats()["restores"]
        torch._dynamo.reset()


@pytest.fixture(scope="module")
def undisturbed(dreamzero_checkpoint):
    return Run(dreamzero_checkpoint, parking=False)


def test_parking_between_all_steps_causes_no_compilation(undisturbed, dreamzero_checkpoint):
    parked = Run(dreamzero_checkpoint, parking=True)
    assert (parked.restores, undisturbed.restores) == (len(SESSIONS) * (ROUNDS - 1), 0)
    assert parked.compilations == undisturbed.compilations
    assert parked.compilations[0] > 0
    assert all(a.equals(b) for a, b in zip(parked.outputs, undisturbed.outputs, strict=True))


def test_ordinary_tensors_in_place_of_inference_ones_are_noticed(
    undisturbed, dreamzero_checkpoint, monkeypatch
):
    def change(round_):
        if round_ == 1:
            bring_back_changed(monkeypatch, "an inference tensor comes back as an ordinary one")

    changed = Run(dreamzero_checkpoint, parking=True, before_round=change)
    assert changed.compilations[0] == undisturbed.compilations[0]
    assert changed.compilations[-1] > undisturbed.compilations[-1]

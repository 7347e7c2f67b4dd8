"""A tiny DreamZero with a disk tier, and what its sessions must hold of their video."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from lockstep import same_bits
from omni_tiny.inproc import TinyDreamZero

from vllm_omni_session_state.adapters.video_latents import FIELD
from vllm_omni_session_state.base.log import forget_said


class Rollouts:
    """A tiny DreamZero with video latents as a setting says, and the chunks that it has handed out.

    What a forward returns as its video is the chunk that the model keeps, so the chunks of a session since
    its latents were last cleared are what `keep` would hold.
    """

    def __init__(self, model):
        self.model = model
        self.pipeline = model.pipeline
        self.manager = model.pipeline._memory_manager
        self.kept = {}

    def step(self, session="a", **how):
        chunks = self.kept.setdefault(session, [])
        how.setdefault("frames", 4 if chunks else 1)
        rng = np.random.default_rng([sum(session.encode()), len(chunks)])
        chunks.append(self.model.step(session, rng=rng, **how).video)

    def steps(self, number, session="a"):
        for _ in range(number):
            self.step(session)
            self.manager.check()

    @property
    def disk_nbytes(self):
        nbytes = self.manager.stats()["spilled_nbytes"]
        assert nbytes == self.manager.offloader.spiller._tier.nbytes
        self.manager.offloader.spiller._tier.check()
        return nbytes

    def buffer(self, session="a"):
        return self.manager.peek(session).get(FIELD)

    def decode(self, session="a"):
        with torch.inference_mode():
            return self.pipeline.decode_accumulated_video_latents(session)

    def expected(self, session="a", last=0):
        with torch.inference_mode():
            return self.pipeline.decode_video_latents(torch.cat(self.kept[session][-last:], dim=2))

    def is_exact(self, session="a"):
        assert same_bits(self.decode(session), self.expected(session)), f"the video of {session} differs"

    def is_whole(self, session="a"):
        """All that a decode reads; it takes a tenth of the time of a decode."""
        read = self.pipeline._get_or_create_state(session).get_concatenated_video_latents()
        assert torch.equal(read, torch.cat(self.kept[session], dim=2)), f"the latents of {session} differ"

    def use(self, monkeypatch, policy):
        """Have the adapter follow another policy."""
        monkeypatch.setattr(self.pipeline.bind_ar_diffusion_state.__self__, "_latents", policy)


@contextlib.contextmanager
def loaded(checkpoint, folder, *, steps=2, **settings):
    """A model with those settings and a disk tier."""
    forget_said()
    options = {"disk": {"path": str(folder / "disk"), "budget": "1GiB"}, **settings}
    with TinyDreamZero(
        checkpoint,
        flag=True,
        capacity=4,
        exact=False,
        num_inference_steps=steps,
        model_config={"session_state": options},
    ) as model:
        disk = model.pipeline._memory_manager.offloader.spiller._tier
        try:
            yield model
        finally:
            model.pipeline._memory_manager.drop_all()
            disk.close()

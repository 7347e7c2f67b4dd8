"""What people send to Cosmos3, drawn from a seed: clips and pictures, each with guidance and without."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_omni_session_state.ab.workload.requests import COSMOS3, Request, numbered

KINDS = ("t2v", "t2i", "i2v")
"""Text to video, text to image, image to video."""

PIXELS = 256
"""Height and width of everything."""

FRAMES, DENOISING = 5, 4
_PROMPTS = {
    "t2v": "a red cube on a table",
    "t2i": "a lighthouse in the fog",
    "i2v": "it turns around slowly",
}


class Clips:
    """Clients that take turns with one request each; a request is a session of its own to the model.

    Each kind comes with guidance, where the negative prompt's branch runs too, and then without.
    """

    model = COSMOS3

    def __init__(self, *, sessions: int, steps: int) -> None:
        asked: list[tuple[int, str, dict[str, Any]]] = []
        ways = [(kind, guidance) for kind in KINDS for guidance in (4.0, 1.0)]
        for turn in range(steps):
            for session in range(1, sessions + 1):
                kind, guidance = ways[(turn + 3 * (session - 1)) % len(ways)]
                words = {
                    "kind": kind,
                    "prompt": f"{_PROMPTS[kind]}, take {turn + 1}",
                    "negative": "blurry",
                    "guidance": guidance,
                    "seed": len(asked),
                    "frames": 1 if kind == "t2i" else FRAMES,
                    "height": PIXELS,
                    "width": PIXELS,
                    "denoising": DENOISING,
                }
                asked.append((session, "generate", words))
        self.asks = numbered(asked)

    def arrays(self, ask: Request) -> dict[str, Any]:
        """The picture with which a clip begins."""
        if ask.words["kind"] != "i2v":
            return {}
        rng = np.random.default_rng((0, ask.number))
        return {"image": rng.integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)}

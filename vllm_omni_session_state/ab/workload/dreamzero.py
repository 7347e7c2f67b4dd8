"""What robots send to DreamZero, drawn from a seed: interleaved sessions with all that can happen to one.

The pictures are noise, as are the joints: what is compared is bits, not what a robot would do with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_omni_session_state.ab.workload.requests import DREAMZERO, Request, numbered

CAMERA = (180, 320)
"""Height and width in pixels of a camera's picture, as the robots of the published checkpoint send it."""

VIEWS = ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")
CHUNK = 4
"""Pictures per camera from a session's second step on; with the first comes one."""

_PROMPTS = ("pick up the cup", "open the drawer", "wave", "push the button")


class Robots:
    """Robots that step in turns. Each with its own prompt; see `docs/ab.md` for what happens when.

    A window of attention is full after some steps of one prompt, and the model resets it by itself; besides
    that, one robot is closed early, goes on and changes its prompt later, one resets with a step, and one,
    late, by a call to begin something new: until then it has more frames than the model reads.
    """

    model = DREAMZERO

    def __init__(self, *, sessions: int, steps: int) -> None:
        first, second, last = 1, min(2, sessions), sessions
        asked: list[tuple[int, str, dict[str, Any]]] = []
        for turn in range(steps):
            if turn and turn == max(1, steps // 6):
                asked.append((second, "close", {}))
            if turn and turn == max(1, steps - 2):
                asked.append((first, "reset", {}))
            for session in range(1, sessions + 1):
                changed = session == second and turn >= max(1, steps // 2)
                prompt = "close the drawer" if changed else _PROMPTS[(session - 1) % len(_PROMPTS)]
                words: dict[str, Any] = {"prompt": prompt, "seed": len(asked)}
                if session == last and turn and turn == steps // 2:
                    words["reset"] = True
                if session == last and turn == steps - 1:
                    words["close"] = True
                asked.append((session, "step", words))
        self.asks = numbered(asked)

    def arrays(self, ask: Request) -> dict[str, Any]:
        """What a robot sees and where its joints are; nothing goes with a reset or a close."""
        if ask.do != "step":
            return {}
        rng = np.random.default_rng((0, ask.number))
        shape = (*CAMERA, 3) if ask.step == 1 else (CHUNK, *CAMERA, 3)
        return {
            **{f"observation/{view}": rng.integers(0, 256, shape, dtype=np.uint8) for view in VIEWS},
            "observation/joint_position": rng.normal(size=7).astype(np.float32),
            "observation/cartesian_position": np.zeros(6, np.float32),
            "observation/gripper_position": rng.random(1).astype(np.float32),
        }

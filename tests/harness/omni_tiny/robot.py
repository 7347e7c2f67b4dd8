"""What a robot sends: random camera views and joint positions, and the request around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.random import Generator

CAMERA = (18, 32)
"""Height and width in pixels of a camera's picture before the model's own resizing."""


def observation(rng: Generator, *, session: str, prompt: str, frames: int = 4) -> dict[str, Any]:
    """Draw one observation.

    Args:
        rng: Two generators of one state give equal observations.
        session: The session's id, as the robot protocol carries it.
        prompt: What the robot is told to do.
        frames: Pictures per camera: 1, or a chunk of 4. A session's first step looks at the last one only.
    """
    shape = (*CAMERA, 3) if frames == 1 else (frames, *CAMERA, 3)
    views = ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")
    seen = {f"observation/{view}": rng.integers(0, 256, shape, dtype=np.uint8) for view in views}
    return {
        **seen,
        "observation/joint_position": rng.normal(size=7).astype(np.float32),
        "observation/cartesian_position": np.zeros(6, np.float32),
        "observation/gripper_position": rng.random(1).astype(np.float32),
        "prompt": prompt,
        "session_id": session,
    }


def sampling_params(seen: dict[str, Any], *, reset: bool = False, close: bool = False) -> Any:
    """Put an observation into vLLM-Omni's sampling parameters.

    Args:
        seen: From `observation`; its session is the request's session.
        reset: The runner drops the session before this step.
        close: The runner drops the session after this step.
    """
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    arguments = {"session_id": seen["session_id"], "robot_obs": seen}
    if reset:
        arguments["reset"] = True
    if close:
        arguments["close_session"] = True
    return OmniDiffusionSamplingParams(seed=0, extra_args=arguments)

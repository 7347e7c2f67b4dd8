"""Requests to the tiny Cosmos3: one function from a kind and a few words to what the runner takes.

Covers every kind that the pipeline serves without a further model (sound and RoboLab need one).
Does not run anything.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch

Kind = Literal[
    "t2v", "i2v", "v2v", "t2i", "policy", "forward_dynamics", "inverse_dynamics", "transfer", "long_transfer"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
ACTION_KINDS: tuple[Kind, ...] = ("policy", "forward_dynamics", "inverse_dynamics")

# What each checkpoint serves; the pipeline refuses the rest with a ValueError.
SERVES: dict[str, tuple[Kind, ...]] = {
    "regular": tuple(kind for kind in KINDS if kind not in ACTION_KINDS),
    "edge": ("t2v", "i2v", "t2i"),
    "action": KINDS,
    "distilled": ("t2i", "i2v"),
}

_FRAMES = 5  # pixel frames: two latent frames
_MORE_FRAMES = 9  # three latent frames: v2v keeps two of them clean, long_transfer needs a second chunk
_PIXELS = 64  # 4 x 4 latent pixels: 2 x 2 tokens a frame
_RAW_ACTION_DIM = 6  # fewer than the checkpoint's 8, so that the padding is exercised


def cosmos3_request(
    request_id: str,
    *,
    kind: Kind = "t2v",
    prompt: str = "a red cube",
    negative: str = "blurry",
    guidance: float = 4.0,
    seed: int = 0,
    steps: int = 3,
    n: int = 1,
    media: int = 0,
    extra: dict[str, Any] | None = None,
) -> Any:
    """Build one request, before the pipeline's own preprocessing.

    Args:
        request_id: vLLM-Omni takes it as the session id.
        kind: What to generate. ``transfer`` is one chunk, ``long_transfer`` two; both run at 256 x 256,
            the smallest size that transfer has.
        prompt: What the conditional branch reads.
        negative: What the unconditional branch reads.
        guidance: Above 1.0 the unconditional branch runs too. A distilled checkpoint has none.
        seed: Seed of the noise.
        steps: Denoising steps; a distilled checkpoint takes its own four.
        n: Images of a ``t2i`` request.
        media: Seed of the conditioning image, video, action or control.
        extra: Further ``extra_args``, as the HTTP endpoints pass them.

    Returns:
        An ``OmniDiffusionRequest``.

    Raises:
        ValueError: If ``kind`` is unknown or ``n`` is asked of anything but ``t2i``.
    """
    from vllm_omni.diffusion.request import OmniDiffusionRequest
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
    if n != 1 and kind != "t2i":
        raise ValueError(f"n={n} with kind={kind!r}: only t2i makes several outputs of one request")
    body: dict[str, Any] = {"prompt": prompt, "negative_prompt": negative}
    arguments: dict[str, Any] = {}
    frames = _frames(media, _MORE_FRAMES)
    count = 1 if kind == "t2i" else _MORE_FRAMES if kind in ("v2v", "long_transfer") else _FRAMES
    if kind == "t2i":
        body["modalities"] = ["image"]
    elif kind in ("i2v", "policy", "forward_dynamics"):
        body["multi_modal_data"] = {"image": frames[0]}
    elif kind in ("v2v", "inverse_dynamics"):
        body["multi_modal_data"] = {"video": list(frames[:_FRAMES])}
    if kind in ACTION_KINDS:
        arguments |= {"action_mode": kind, "domain_id": 3, "raw_action_dim": _RAW_ACTION_DIM}
    if kind == "forward_dynamics":
        arguments["action"] = _actions(media)
    if kind in ("transfer", "long_transfer"):
        arguments |= {
            "depth": {"control": torch.from_numpy(frames[:count]).permute(3, 0, 1, 2)},
            "resolution": "256",
            "guidance_scale": guidance,
            "num_video_frames_per_chunk": _FRAMES,
        }
    return OmniDiffusionRequest(
        request_id=request_id,
        prompt=body,
        sampling_params=OmniDiffusionSamplingParams(
            height=_PIXELS,
            width=_PIXELS,
            num_frames=count,
            seed=seed,
            num_inference_steps=steps,
            guidance_scale=guidance,
            num_outputs_per_prompt=n,
            extra_args=arguments | (extra or {}),
        ),
    )


def _frames(media: int, count: int) -> np.ndarray:
    """Return ``count`` random RGB frames, uint8, ``[T, H, W, 3]``."""
    rng = np.random.default_rng(media)
    return rng.integers(0, 256, (count, _PIXELS, _PIXELS, 3), dtype=np.uint8)


def _actions(media: int) -> list[list[float]]:
    """Return one row per frame step, as JSON would carry it: ``[T - 1, raw action dim]``."""
    return np.random.default_rng(media).normal(size=(_FRAMES - 1, _RAW_ACTION_DIM)).tolist()

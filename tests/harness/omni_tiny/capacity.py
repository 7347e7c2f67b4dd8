"""How much free memory makes the runner keep exactly so many sessions of the tiny DreamZero.

The runner takes the largest number of sessions whose reserved bytes fit the free memory; this is its
sum, for the sizes in `checkpoint.dreamzero`. `TinyDreamZero` checks the answer against the runner.
"""

from __future__ import annotations

from omni_tiny.checkpoint.dreamzero import FRAMES_PER_BLOCK, TRANSFORMER
from omni_tiny.tiny import MODEL_OWNED_BYTES

FREE_BYTES_VARIABLE = "OMNI_TINY_FREE_BYTES"
"""Environment variable: the free device memory that the CPU platform reports, in bytes."""

LESS_BYTES_VARIABLE = "OMNI_TINY_LESS_"
"""With a rank's number behind it: what that rank has less of it, in bytes, as where devices are not alike."""

_BRANCHES = 2  # with and without the prompt
_WINDOW = TRANSFORMER["max_chunk_size"] * FRAMES_PER_BLOCK + 1  # frames of attention, one page each
_TOKEN = 2 * TRANSFORMER["dim"] * TRANSFORMER["num_layers"] * 2  # K and V, every layer, bfloat16
_PAGE = TRANSFORMER["frame_seqlen"] * _TOKEN
_IMAGE_TOKENS = 257


def free_bytes(sessions: int) -> int:
    """Count the bytes of free memory that admit exactly this many sessions.

    Args:
        sessions: 1 to 64, the model's own bound.

    Raises:
        ValueError: The number is outside that range.
    """
    if not 1 <= sessions <= 64:
        raise ValueError(f"the runner keeps 1 to 64 sessions, not {sessions}: ask for a number in between")
    extra_tokens = TRANSFORMER["num_action_per_block"] + TRANSFORMER["num_state_per_block"]
    scratch = FRAMES_PER_BLOCK + -(-extra_tokens // TRANSFORMER["frame_seqlen"])
    fixed = _BRANCHES * (scratch + FRAMES_PER_BLOCK) * _PAGE + 2 * _PAGE
    cross_attention = _BRANCHES * (TRANSFORMER["text_len"] + _IMAGE_TOKENS) * _TOKEN
    return fixed + sessions * (cross_attention + MODEL_OWNED_BYTES + _BRANCHES * _WINDOW * _PAGE)

"""What becomes of the chunks that DreamZero keeps of its video: all stay, or older ones are spilled or go.

The chunks are read in one place, vLLM-Omni's ``get_concatenated_video_latents``, and written in one, the end
of a forward.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from vllm_omni_session_state.base.errors import LatentsUnreadableError
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.base.kinds import VideoLatents
from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.manager.manager import SessionStateManager
from vllm_omni_session_state.offload.spill import Spiller
from vllm_omni_session_state.state.buffers import LatentBuffer
from vllm_omni_session_state.state.session import SessionState

FIELD = "video_latents_across_time"
"""vLLM-Omni's name for the list of chunks, each ``(B, C, T, H, W)``."""

READER = "get_concatenated_video_latents"
"""vLLM-Omni's method that reads all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What becomes of the older chunks; with neither they stay.

    Attributes:
        spiller: Moves them to the disk.
        last: How many are kept.
    """

    spiller: Spiller | None = None
    last: int | None = None

    def after_forward(self, session: SessionState) -> None:
        """Let go of older chunks. Never raises."""
        buffer = _buffer_of(session)
        if buffer is None:
            return
        if self.spiller is not None:
            self.spiller.spill(session.key, buffer)
        elif self.last is not None:
            # A cut has the whole list counted anew, so it is made for several chunks at a time.
            _cut(buffer, self.last, slack=self.last // 4)

    def trim(self, session: SessionState) -> None:
        """Have as many chunks as the setting says, and not some more."""
        buffer = _buffer_of(session)
        if buffer is not None and self.last is not None:
            _cut(buffer, self.last, slack=0)


def policy_of(setting: VideoLatents, manager: SessionStateManager, pipeline: type) -> Policy:
    """The policy for a setting; one that cannot be followed is said once at WARNING.

    Args:
        setting: What the operator wrote.
        manager: Has the disk tier, or has none.
        pipeline: vLLM-Omni's class.
    """
    if isinstance(setting, int):
        return Policy(last=setting)
    if setting == "keep":
        return Policy()
    why = None
    if manager.spiller is None:
        why = "needs disk.path and disk.budget; set both, or set last:N"
    elif READER not in _names_in(getattr(pipeline, "decode_accumulated_video_latents", None)):
        why = f"needs a vLLM-Omni whose decode reads through {READER}()"
    if why is None:
        return Policy(spiller=manager.spiller)
    log_once(
        logging.WARNING,
        ("video_latents",),
        "video_latents=spill %s. It is ignored, and a session's chunks stay in host memory for its life",
        why,
    )
    return Policy()


def whole(session: SessionState) -> SessionState:
    """The session as it would be had no chunk ever left it; itself, where none has.

    Raises:
        LatentsUnreadableError: If chunks on the disk cannot be read; nothing has changed.
    """
    buffer = _buffer_of(session)
    if buffer is None or not buffer.segments:
        return session
    everything: LatentBuffer[Any] = LatentBuffer()
    try:
        everything.replace(buffer.whole())
    except Exception as error:  # noqa: BLE001 - whatever it was, the caller gets an error of this package
        raise LatentsUnreadableError(display_id(session.key), error) from error.with_traceback(None)
    # Of nobody: what it holds beyond the session goes with whoever reads it.
    at_hand = SessionState(session.key)
    at_hand.attrs = session.attrs
    for name, obj in session.objects.items():
        at_hand.put(name, everything if name == FIELD else obj)
    return at_hand


def _buffer_of(session: SessionState) -> LatentBuffer[Any] | None:
    buffer = session.get(FIELD)
    return buffer if isinstance(buffer, LatentBuffer) and buffer.growing is not None else None


def _cut(buffer: LatentBuffer[Any], count: int, *, slack: int) -> None:
    chunks = buffer.growing
    if chunks is not None and len(chunks) > count + slack:
        del chunks[:-count]


def _names_in(function: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = getattr(getattr(function, "__code__", None), "co_names", ())
    return names

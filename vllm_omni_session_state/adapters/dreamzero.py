"""DreamZero: which field of the model's own state lives where.

The view inherits vLLM-Omni's own ``DreamZeroState``, so every rule (frame accumulation, resets, encoder
stream) is vLLM-Omni's and follows its version; what is written here is one line a field. Attention KV is
not here: the AR-Diffusion engine owns it.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Protocol

import torch

from vllm_omni_session_state.adapters.patches import Patches
from vllm_omni_session_state.adapters.video_latents import Policy, policy_of, whole
from vllm_omni_session_state.base.ids import session_key
from vllm_omni_session_state.base.kinds import VideoLatents
from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.manager.manager import SessionStateManager
from vllm_omni_session_state.state.buffers import LatentBuffer
from vllm_omni_session_state.state.session import Declaration, HoldsSession, SessionAttr, SessionState, Unset

HOST_FIELDS = frozenset({"stitched_buffer", "video_latents_across_time"})
"""Values that the model keeps in host memory; all others are on its device."""

OUTSIDE = "vae._enc_feat_map"
"""Where vLLM-Omni keeps a feature map beside the sessions'."""

HOST_MODULE = "vllm_omni.diffusion.models.dreamzero.pipeline_dreamzero"

DECLARED = "DREAMZERO_MODEL_OWNED_STATE_BYTES_PER_SESSION"
"""vLLM-Omni's constant for what one session holds on the device."""

_OWN = frozenset({"_session", "_vae_encoder_window"})
"""What a view itself holds; everything else is the session's."""


class BufferField:
    """A list or deque of the model that lives in a ``LatentBuffer`` of the session.

    Reading hands out the buffer's own container, so that the model's ``append`` and ``torch.cat`` work on
    it. Assigning rebuilds the buffer from any iterable: a ring where that is a bounded deque, else an
    append buffer.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, obj: HoldsSession | None, owner: type) -> Any:
        return self if obj is None else self._buffer(obj).container

    def __set__(self, obj: HoldsSession, value: Iterable[Any]) -> None:
        held = obj._session.get(self.name)
        # The same object, for a model that assigns what it read: then nothing in it is walked again.
        buffer: LatentBuffer[Any] = held if isinstance(held, LatentBuffer) else LatentBuffer()
        buffer.discard()
        buffer.replace(value, maxlen=value.maxlen if isinstance(value, deque) else None)
        obj._session.put(self.name, buffer)

    def _buffer(self, obj: HoldsSession) -> LatentBuffer[Any]:
        buffer = obj._session.get(self.name)
        if not isinstance(buffer, LatentBuffer):
            buffer = obj._session.put(self.name, LatentBuffer())
        if not buffer.resident:  # its session ended while this view was held: write on, for the holder alone
            buffer.allocate(maxlen=buffer.maxlen)
        return buffer


class EncoderWindowField:
    """The VAE encoder's output, of which the session keeps the last ``num_frame_per_block`` frames.

    The model's only reader quantises it pointwise in time and takes that many frames from the end, so the
    earlier ones never matter; the model itself keeps them all for as long as the session lives.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, obj: DreamZeroFields | None, owner: type) -> Any:
        if obj is None:
            return self
        buffer = obj._session.get(self.name)
        return buffer.container[-1] if isinstance(buffer, LatentBuffer) and len(buffer) else None

    def __set__(self, obj: DreamZeroFields, value: torch.Tensor | None) -> None:
        # A copy: a slice would keep the whole history's storage alive.
        kept = () if value is None else (value[:, :, -obj._vae_encoder_window :].clone(),)
        ring: LatentBuffer[torch.Tensor] = LatentBuffer()
        ring.replace(kept, maxlen=1)
        obj._session.put(self.name, ring)


class DreamZeroFields:
    """Where each field of ``DreamZeroState`` lives; shapes are the model's own."""

    call_count = SessionAttr[int](default=0, coerce=int)
    current_start_frame = SessionAttr[int](default=0, coerce=int)
    clip_feas = SessionAttr[torch.Tensor | None](default=None)
    ys = SessionAttr[torch.Tensor | None](default=None)
    language = SessionAttr[torch.Tensor | None](default=None)
    prompt_embeds = SessionAttr[torch.Tensor | None](default=None)
    vae_stream_initialized = SessionAttr[bool](default=False, coerce=bool)
    # 603 MiB at the shipped size, yet an attribute: it is replaced wholesale and cannot be rebuilt.
    vae_enc_feat_map = SessionAttr[list[torch.Tensor | None] | None](default=None)
    vae_pending_body_frames = SessionAttr[torch.Tensor | None](default=None)
    stitched_buffer = BufferField()
    video_latents_across_time = BufferField()
    vae_encoder_out = EncoderWindowField()

    _session: SessionState
    _vae_encoder_window: int
    _homes: ClassVar[set[str]]  # names that were set before, and so have a home

    @property
    def session_id(self) -> str:
        """Key of the session that this view shows."""
        return self._session.key

    @property
    def vae_encoder_window(self) -> int:
        """Latent frames of encoder output that are kept; vLLM-Omni refuses to read more."""
        return self._vae_encoder_window

    def get_concatenated_video_latents(self) -> torch.Tensor | None:
        """vLLM-Omni's method of this name, over all chunks, wherever they are.

        Raises:
            LatentsUnreadableError: If some on the disk cannot be read; nothing has changed.
        """
        view = self._over(whole(self._session))
        return super(DreamZeroFields, view).get_concatenated_video_latents()  # type: ignore[misc, no-any-return]

    def _over(self, session: SessionState) -> DreamZeroFields:
        """A view like this one over that session."""
        if session is self._session:
            return self
        view = type(self).__new__(type(self))
        vars(view).update(vars(self), _session=session)
        return view

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self._homes:
            _declare(type(self), name)
        object.__setattr__(self, name, value)


def _declare(view: type[DreamZeroFields], name: str) -> None:
    """Carry a field that the model grew: give it a home in the session the first time it is set."""
    held = _declared(view, name)
    if not hasattr(type(held), "__set__"):
        field = SessionAttr[Any](default=held)
        field.__set_name__(view, name)
        setattr(view, name, field)
        log_once(
            logging.WARNING,
            ("undeclared", view.__name__, name),
            "DreamZero's state has a field %r unknown to this plugin; its sessions carry it as an attribute",
            name,
        )
    view._homes.add(name)


def _declared(view: type, name: str) -> object:
    for base in view.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return Unset.UNSET


@functools.cache
def view_class(host_state: type) -> type[DreamZeroFields]:
    """vLLM-Omni's state class with its fields in a session."""
    return type(
        "ManagedDreamZeroState",
        (DreamZeroFields, host_state),
        {"__doc__": host_state.__doc__, "_homes": set(_OWN)},
    )


def view_of(session: SessionState, host_state: type, *, window: int) -> DreamZeroFields:
    """A view of ``session``; vLLM-Omni's ``__init__``, which resets it, runs for a new session only."""
    cls = view_class(host_state)
    view = cls.__new__(cls)
    vars(view).update(_session=session, _vae_encoder_window=window)  # every step: past ``__setattr__``
    if session.empty:
        host_state.__init__(view)  # type: ignore[misc] # the view's class is made from it
    return view


class Pipeline(Protocol):
    """What this adapter reads of vLLM-Omni's ``DreamZeroPipeline``."""

    num_frame_per_block: int
    state: object

    vae: Any

    def bind_ar_diffusion_state(self, session_id: str, state: object) -> AbstractContextManager[None]:
        """Hold the engine's KV for one forward."""

    def decode_accumulated_video_latents(self, session_id: str | None = None) -> torch.Tensor:
        """Decode a session's chunks."""

    def clear_accumulated_video_latents(self, session_id: str | None = None) -> None:
        """Forget a session's chunks."""

    def warmup_compile(self) -> None:
        """Run the compiled parts once, on the default session."""


class DreamZeroAdapter:
    """Stands between one pipeline object and the manager.

    The pipeline holds this object's methods, so this object holds the pipeline only weakly. When
    vLLM-Omni lets go of a model to load it again, the weights' memory must be free at once.
    """

    def __init__(
        self, pipeline: Pipeline, manager: SessionStateManager, host_state: type, latents: Policy
    ) -> None:
        self._pipeline = weakref.ref(pipeline)
        self._manager = manager
        self._host_state = host_state
        self._latents = latents
        self._window = int(pipeline.num_frame_per_block)
        self._only_existing = False

    def get_or_create_state(self, session_id: str | None) -> DreamZeroFields:
        """A view of that session, in place of vLLM-Omni's method of this name."""
        if self._only_existing and session_id not in self._manager:
            session = SessionState(session_key(session_id))  # of nobody: a look makes no session
        else:
            session = self._manager.get_or_create_session(session_id)
        return view_of(session, self._host_state, window=self._window)

    def drop_state(self, session_id: str | None) -> None:
        """End that session, in place of vLLM-Omni's method, with the alias that would keep its view."""
        self._manager.drop_session(session_id)
        pipeline = self._host()
        alias = pipeline.state
        if isinstance(alias, DreamZeroFields) and alias.session_id == session_key(session_id):
            pipeline.state = None

    @contextmanager
    def bind(self, session_id: str, state: object) -> Iterator[None]:
        """vLLM-Omni's ``bind_ar_diffusion_state``: one forward, for which the session is leased."""
        pipeline = self._host()
        with self._manager.lease(session_id) as session:
            with type(pipeline).bind_ar_diffusion_state(pipeline, session_id, state):
                yield
            self._latents.after_forward(session)
        # The encoder keeps the lists that it worked on: one whole feature map that is no session's.
        self._manager.charge_outside(OUTSIDE, getattr(pipeline.vae, "_enc_feat_map", None))

    def decode(self, session_id: str | None = None) -> torch.Tensor:
        """vLLM-Omni's ``decode_accumulated_video_latents``, which would make the session it looks for."""
        pipeline = self._host()
        with self._looking(session_id):
            return type(pipeline).decode_accumulated_video_latents(pipeline, session_id)

    def clear(self, session_id: str | None = None) -> None:
        """vLLM-Omni's ``clear_accumulated_video_latents``, likewise."""
        pipeline = self._host()
        with self._looking(session_id):
            type(pipeline).clear_accumulated_video_latents(pipeline, session_id)

    def warmup_compile(self) -> None:
        """vLLM-Omni's method of this name; it leaves its dummy frames in the default session, which ends."""
        pipeline = self._host()
        type(pipeline).warmup_compile(pipeline)
        self.drop_state(None)

    def _host(self) -> Pipeline:
        pipeline = self._pipeline()
        assert pipeline is not None, "whoever calls holds the pipeline"
        return pipeline

    @contextmanager
    def _looking(self, session_id: str | None) -> Iterator[None]:
        """Lease a session that is there; one that is not there is not made."""
        if self._manager.prepare(session_id, new=False) is not None:
            with self._manager.lease(session_id) as session:
                self._latents.trim(session)
                yield
            return
        self._only_existing = True
        try:
            yield
        finally:
            self._only_existing = False


def attach(
    pipeline: Pipeline, manager: SessionStateManager, patches: Patches, *, video_latents: VideoLatents
) -> None:
    """Give ``pipeline`` manager-backed session state.

    Args:
        pipeline: The loaded ``DreamZeroPipeline``.
        manager: Owner of its sessions.
        patches: Takes note of each attribute that is set, so that all can be taken back together.
        video_latents: What becomes of older chunks of video latents.
    """
    from vllm_omni.diffusion.models.dreamzero.state_dreamzero import DreamZeroState  # noqa: PLC0415

    declared = getattr(sys.modules.get(HOST_MODULE), DECLARED, None)
    if declared is not None:
        manager.declaration = Declaration(device_nbytes=int(declared), host_fields=HOST_FIELDS)
    latents = policy_of(video_latents, manager, type(pipeline))
    adapter = DreamZeroAdapter(pipeline, manager, DreamZeroState, latents)
    patches.set(pipeline, "_memory_manager", manager)
    patches.set(pipeline, "_states", OrderedDict())
    patches.set(pipeline, "_get_or_create_state", adapter.get_or_create_state)
    patches.set(pipeline, "_drop_ar_diffusion_session_state", adapter.drop_state)
    patches.set(pipeline, "bind_ar_diffusion_state", adapter.bind)
    patches.set(pipeline, "decode_accumulated_video_latents", adapter.decode)
    patches.set(pipeline, "clear_accumulated_video_latents", adapter.clear)
    patches.set(pipeline, "warmup_compile", adapter.warmup_compile)
    # vLLM-Omni begins with a state for the default session. Of nobody here: an unused session in the table
    # would one day be the oldest and go with a warning that a rollout was lost.
    unused = view_of(
        SessionState(session_key(None)), DreamZeroState, window=int(pipeline.num_frame_per_block)
    )
    patches.set(pipeline, "state", unused)

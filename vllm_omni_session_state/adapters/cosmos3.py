"""Cosmos3: the text branches' K/V and rotary frequencies, encoded once a request and gone after it.

One call of ``diffuse`` is one session. Its state is what the denoising loop reads at every step: per
guidance branch the K/V of the text and the rotary frequencies that go with it, captured in one piece and
served only to the input that they were computed from. Transfer mode has no such state and runs the
host's own path.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from vllm_omni_session_state.adapters.patches import Patches
from vllm_omni_session_state.base.errors import SeamMismatchError
from vllm_omni_session_state.base.ids import session_key
from vllm_omni_session_state.base.kinds import VideoLatents
from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.manager.manager import SessionStateManager
from vllm_omni_session_state.offload.memory import bytes_of
from vllm_omni_session_state.state.buffers import EncodeOnceKV
from vllm_omni_session_state.state.session import SessionState

KVPair = tuple[torch.Tensor, torch.Tensor]
Encoded = tuple[list[KVPair], KVPair]
"""K and V of each layer, ``[B, S_text, H_kv, D]``; cosine and sine, ``[1, S_gen, 1, D]``."""

BRANCHES = ("und_kv", "und_kv_neg")
"""Names of the state objects of the conditional and the unconditional branch."""


class Transformer(Protocol):
    """What this adapter reads and writes of vLLM-Omni's ``Cosmos3VFMTransformer``."""

    cached_kv: list[KVPair] | None
    cached_freqs_gen: KVPair | None

    def reset_cache(self) -> None:
        """Forget both."""


class Pipeline(Protocol):
    """What this adapter reads of vLLM-Omni's ``Cosmos3OmniDiffusersPipeline``."""

    transformer: Transformer

    def diffuse(self, *args: Any, **kwargs: Any) -> Any:
        """Run the denoising loop."""


class Cosmos3State:
    """One request's state, as vLLM-Omni's loop asks for it. vLLM-Omni calls these three methods by name.

    Args:
        session: Where it lives.
        identities: Of the conditional and the unconditional branch's input.
        manager: Told when the session holds more than before.
    """

    def __init__(
        self, session: SessionState, identities: tuple[str, str], manager: SessionStateManager
    ) -> None:
        self._session = session
        self._manager = manager
        self._identities = identities

    def load_into_transformer(self, transformer: Transformer, is_negative: bool) -> None:  # noqa: FBT001
        """Put the branch's content onto the transformer, or nothing, from which it computes it.

        Raises:
            IdentityMismatchError: If the content was computed from another input.
        """
        encoded = self._branch(is_negative).read(self._identities[is_negative])
        transformer.cached_kv, transformer.cached_freqs_gen = (None, None) if encoded is None else encoded

    def capture_from_transformer(self, transformer: Transformer, is_negative: bool) -> None:  # noqa: FBT001
        """Keep what the transformer computed for the branch, both parts or neither, the first time.

        Raises:
            RuntimeError: If the transformer has not computed both.
        """
        branch = self._branch(is_negative)
        if branch.resident:
            return
        if transformer.cached_kv is None or transformer.cached_freqs_gen is None:
            raise RuntimeError("Cosmos3's transformer did not compute its text K/V and rotary frequencies")
        branch.commit((list(transformer.cached_kv), transformer.cached_freqs_gen))
        self._manager.settle(self._session)

    def reset(self) -> None:
        """Forget both branches."""
        self._session.reset()

    def _branch(self, is_negative: bool) -> EncodeOnceKV[Encoded]:  # noqa: FBT001
        name = BRANCHES[is_negative]
        branch = self._session.get(name)
        if not isinstance(branch, EncodeOnceKV):
            branch = self._session.put(name, EncodeOnceKV[Encoded]())
        if branch.identity is None:
            branch.allocate(identity=self._identities[is_negative])
        return branch


class Cosmos3Adapter:
    """Stands between one pipeline object and the manager; holds the pipeline only weakly."""

    def __init__(self, pipeline: Pipeline, manager: SessionStateManager) -> None:
        self._pipeline = weakref.ref(pipeline)
        self._manager = manager
        self._signature = inspect.signature(type(pipeline).diffuse)
        self._wrapped = vars(pipeline).get("diffuse")  # somebody, a profiler say, may have been here before
        self._calls: dict[str, Cosmos3State | None] = {}
        self._lock = threading.Lock()

    def diffuse(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM-Omni's denoising loop, around which the request's session begins and ends."""
        pipeline = self._pipeline()
        assert pipeline is not None, "whoever calls holds the pipeline"
        host = self._wrapped or functools.partial(type(pipeline).diffuse, pipeline)
        call = self._signature.bind(pipeline, *args, **kwargs)
        identities = (
            identity_of(call.arguments, call.arguments["cond_ids"], call.arguments["cond_mask"]),
            identity_of(call.arguments, call.arguments["uncond_ids"], call.arguments["uncond_mask"]),
        )
        key = self._begin(session_key(call.arguments.get("session_id")))
        call.arguments["session_id"] = key  # vLLM-Omni asks for its state, and drops it, by this key
        try:
            with self._manager.lease(key) as session:
                state = self._calls[key] = Cosmos3State(session, identities, self._manager)
                try:
                    return host(*call.args[1:], **call.kwargs)
                finally:
                    state.reset()
        finally:
            self._end(key, pipeline.transformer)

    def state_of(self, session_id: str | None) -> Cosmos3State | None:
        """The state of a call under way, in place of vLLM-Omni's ``_new_cosmos3_state``."""
        return self._calls.get(session_key(session_id))

    def _begin(self, request: str) -> str:
        """The request's own key, or one beside it while another call under that id runs."""
        with self._lock:
            key, number = request, 1
            while key in self._calls:
                number += 1
                key = f"{request}/{number}"
            self._calls[key] = None
        self._manager.drop_session(key)  # nothing of an earlier request is there to be found
        return key

    def _end(self, key: str, transformer: Transformer) -> None:
        """Let go of all of it, whatever happened; an error of the request must come through as it was."""
        self._manager.drop_session(key)
        with self._lock:
            del self._calls[key]
        try:
            # vLLM-Omni leaves the last branch here. Another call under way loads its own before it reads.
            transformer.reset_cache()
        except Exception as error:  # noqa: BLE001 - nothing may raise after the forward's own body
            log_once(logging.WARNING, ("cosmos3", "reset_cache"), "Cosmos3's reset_cache() failed: %s", error)


def identity_of(arguments: Mapping[str, Any], ids: torch.Tensor, mask: torch.Tensor) -> str:
    """Digest of all that a branch's K/V and rotary frequencies are computed from.

    Args:
        arguments: Of ``diffuse``: the token ids aside, the geometry decides. Scalars of ``shared_kwargs``
            (video shape, frame rates, offsets) go in as they are, tensors by shape and type.
        ids: The branch's token ids, ``[B, S]``.
        mask: Their mask, ``[B, S]``.

    Returns:
        A hexadecimal digest.
    """
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (ids, mask):
        digest.update(_described(tensor).encode())
        digest.update(bytes_of(tensor).tobytes())
    shared = arguments.get("shared_kwargs") or {}
    geometry = [(name, _described(shared[name])) for name in sorted(shared)]
    geometry += [
        (name, _described(arguments.get(name))) for name in ("latents", "action_latents", "sound_latents")
    ]
    digest.update(repr(geometry).encode())
    return digest.hexdigest()


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.device}"
    return repr(value)


def attach(
    pipeline: Pipeline,
    manager: SessionStateManager,
    patches: Patches,
    *,
    video_latents: VideoLatents,  # noqa: ARG001 - it keeps none
) -> None:
    """Give ``pipeline`` manager-backed session state.

    Args:
        pipeline: The loaded ``Cosmos3OmniDiffusersPipeline``.
        manager: Owner of its sessions.
        patches: Takes note of each attribute that is set, so that all can be taken back together.
        video_latents: Of no use here: this model keeps none for later.

    Raises:
        SeamMismatchError: If its transformer does not keep its cache where this adapter looks.
    """
    for name in ("cached_kv", "cached_freqs_gen", "reset_cache"):
        if not hasattr(pipeline.transformer, name):
            place = f"{type(pipeline.transformer).__qualname__}.{name}"
            raise SeamMismatchError(place, expected="the transformer's cache", found="nothing of that name")
    adapter = Cosmos3Adapter(pipeline, manager)
    patches.set(pipeline, "_memory_manager", manager)
    # vLLM-Omni reads this for one thing only: to refuse transfer mode, which keeps no session state at all.
    patches.set(pipeline, "_use_session_state", False)
    patches.set(pipeline, "_new_cosmos3_state", adapter.state_of)
    patches.set(pipeline, "diffuse", adapter.diffuse)

"""Mistakes that this plugin could make, each as a patch of its own code.

A mutant is a context manager; the model is loaded under it, and some test of this folder must fail.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest import mock

from vllm_omni_session_state import SessionAttr, SessionState, SessionStateManager
from vllm_omni_session_state.adapters import dreamzero
from vllm_omni_session_state.omni.hooks import loader, patching, seams
from vllm_omni_session_state.omni.hooks.import_hook import when_imported
from vllm_omni_session_state.state.buffers import LatentBuffer


def patched(owner: Any, name: str, value: Any) -> Any:
    return mock.patch.object(owner, name, value)


def view_keyed_to_the_wrong_session():
    """One session for everybody."""
    host = SessionStateManager.get_or_create_session
    return patched(
        SessionStateManager, "get_or_create_session", lambda self, session_id: host(self, "default")
    )


def buffer_setter_shares_the_callers_list():
    def replace(self: Any, items: Any, *, maxlen: int | None = None) -> None:
        self._items, self._maxlen = items, maxlen

    return patched(LatentBuffer, "replace", replace)


def _window_of(change: int, *, copy: bool) -> Any:
    def __set__(self: Any, obj: Any, value: Any) -> None:  # noqa: N807 - it replaces one
        kept = ()
        if value is not None:
            end = value[:, :, -(obj._vae_encoder_window + change) :]
            kept = (end.clone() if copy else end,)
        ring: LatentBuffer[Any] = LatentBuffer()
        ring.replace(kept, maxlen=1)
        obj._session.put(self.name, ring)

    return patched(dreamzero.EncoderWindowField, "__set__", __set__)


def ring_one_frame_short():
    return _window_of(-1, copy=True)


def ring_one_frame_long_that_aliases():
    return _window_of(+1, copy=False)


@contextmanager
def attribute_kept_on_the_view():
    def keep(self: Any, obj: Any, value: Any) -> None:
        vars(obj)[self.name] = value

    def read(self: Any, obj: Any, owner: type) -> Any:
        return self if obj is None else vars(obj).get(self.name, self.default)

    with patched(SessionAttr, "__set__", keep), patched(SessionAttr, "__get__", read):
        yield


def drop_that_forgets():
    return patched(SessionStateManager, "drop_session", lambda self, session_id: True)


def reset_that_skips_an_attribute():
    def reset(self: Any) -> None:
        for obj in self._objects.values():
            obj.reset()
        for name in list(self.attrs):
            if name != "prompt_embeds":
                del self.attrs[name]

    return patched(SessionState, "reset", reset)


@contextmanager
def hook_that_attaches_twice():
    """The loader's wrapper is not recognised, so that registering again wraps it again."""
    from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

    once = DiffusersPipelineLoader.load_model
    with patched(patching, "MARK", "__another_mark__"):
        when_imported(seams.LOADER_MODULE, loader.wrap)
    try:
        yield
    finally:
        DiffusersPipelineLoader.load_model = once


def decode_of_what_is_in_memory_alone():
    return patched(dreamzero, "whole", lambda session: session)


def assigned_list_in_a_new_buffer():
    """What was spilled stays with the buffer that was."""

    def __set__(self: Any, obj: Any, value: Any) -> None:  # noqa: N807 - it replaces one
        buffer: LatentBuffer[Any] = LatentBuffer()
        buffer.replace(value, maxlen=getattr(value, "maxlen", None))
        obj._session.put(self.name, buffer)

    return patched(dreamzero.BufferField, "__set__", __set__)


MUTANTS = (
    view_keyed_to_the_wrong_session,
    buffer_setter_shares_the_callers_list,
    ring_one_frame_short,
    ring_one_frame_long_that_aliases,
    attribute_kept_on_the_view,
    drop_that_forgets,
    reset_that_skips_an_attribute,
    hook_that_attaches_twice,
    decode_of_what_is_in_memory_alone,
    assigned_list_in_a_new_buffer,
)

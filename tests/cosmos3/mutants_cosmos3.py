"""Mistakes that the Cosmos3 adapter could make, each as a patch of its own code."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

from vllm_omni_session_state import SessionStateManager
from vllm_omni_session_state.adapters.cosmos3 import Cosmos3Adapter, Cosmos3State
from vllm_omni_session_state.state.buffers import EncodeOnceKV


class Sink:
    """A transformer that nobody sees."""

    def reset_cache(self):
        """Do nothing."""


@contextmanager
def alias_left_on_the_transformer():
    end = Cosmos3Adapter._end
    with mock.patch.object(Cosmos3Adapter, "_end", lambda self, key, _: end(self, key, Sink())):
        yield


@contextmanager
def drop_that_forgets():
    with (
        mock.patch.object(SessionStateManager, "drop_session", return_value=True),
        mock.patch.object(Cosmos3State, "reset", return_value=None),
    ):
        yield


@contextmanager
def one_state_for_one_id():
    """Two calls under one id share a session, and nobody asks whose K/V it is."""

    def shared(self, request):
        self._calls.setdefault(request, None)
        return request

    def end(self, key, transformer):
        self._calls.pop(key, None)
        if not self._calls:
            self._manager.drop_session(key)

    def read(self, identity):
        return None if self._encoded is None else self._encoded[0]

    with (
        mock.patch.object(Cosmos3Adapter, "_begin", shared),
        mock.patch.object(Cosmos3Adapter, "_end", end),
        mock.patch.object(EncodeOnceKV, "read", read),
    ):
        yield


@contextmanager
def capture_layer_by_layer():
    def capture(self, transformer, is_negative):
        branch = self._branch(is_negative)
        if not branch.resident:
            layers = []
            branch.commit((layers, transformer.cached_freqs_gen))
            layers.extend(transformer.cached_kv)

    with mock.patch.object(Cosmos3State, "capture_from_transformer", capture):
        yield


MUTANTS = (alias_left_on_the_transformer, drop_that_forgets, one_state_for_one_id, capture_layer_by_layer)

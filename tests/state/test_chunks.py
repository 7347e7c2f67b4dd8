"""A list that is a list in every way; what is outside is walked again only if it is other memory."""

import copy
import pickle
import weakref
from unittest import mock

import numpy as np
import pytest
import torch

from vllm_omni_session_state import SessionStateManager
from vllm_omni_session_state.accounting.append_list import AppendTrackedList
from vllm_omni_session_state.offload.pack import pack
from vllm_omni_session_state.offload.unpack import unpack


def test_chunks_are_a_list_in_every_way():
    chunks = AppendTrackedList([1, 2])
    chunks.append(3)
    assert isinstance(chunks, list)
    assert chunks == [1, 2, 3]
    assert repr(chunks) == "[1, 2, 3]"
    for copied in (
        copy.copy(chunks),
        copy.deepcopy(chunks),
        chunks[:],
        chunks.copy(),
        chunks * 1,
    ):
        assert type(copied) is list
        assert copied == chunks
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert type(pickle.loads(pickle.dumps(chunks, protocol))) is list
    chunks.append(chunks)
    assert (twin := copy.deepcopy(chunks))[3] is twin
    with pytest.raises(TypeError):
        hash(chunks)
    tensors = AppendTrackedList([torch.ones(1, 2), torch.zeros(1, 2)])
    assert torch.cat(tensors, dim=1).shape == (1, 4)
    assert torch.stack(tensors).shape == (2, 1, 2)


def test_chunks_inside_of_a_value_stay_as_they_are():
    """They are, or were, a buffer's own: a copy would be another list than the buffer's."""
    chunks = AppendTrackedList([torch.ones(2)])
    packed = pack({"x": chunks})
    assert packed.storages == []
    assert unpack(packed.tree, [])["x"] is chunks


def test_every_method_that_changes_a_list_is_known():
    """A method that a later Python adds must be looked at here."""
    silent = {"append", "extend", "__iadd__"}  # what was there stays where it was
    reading = {name for name in dir(tuple) if hasattr(list, name)} | {"copy", "__reversed__"}
    changing = set(dir(list)) - reading - silent | {"__init__"}
    assert {name for name in vars(AppendTrackedList) if hasattr(list, name)} >= changing
    assert changing == {
        *("__init__", "__setitem__", "__delitem__", "__imul__"),
        *("clear", "insert", "pop", "remove", "reverse", "sort"),
    }


def test_what_is_outside_is_walked_again_only_if_it_is_other_memory():
    manager = SessionStateManager()
    kept = [torch.zeros(10, dtype=torch.uint8), None]
    manager.charge_outside("copy", kept)
    with mock.patch.object(torch.Tensor, "untyped_storage", side_effect=AssertionError("walked")):
        manager.charge_outside("copy", kept)
        manager.charge_outside("copy", list(kept))
    for change, size in (
        (lambda: kept.append(torch.zeros(5, dtype=torch.uint8)), 15),
        (kept.pop, 10),
        (lambda: kept.__setitem__(0, torch.zeros(7, dtype=torch.uint8)), 7),
        (lambda: kept[0].set_(torch.zeros(9, dtype=torch.uint8)), 9),
        (lambda: kept.append(np.zeros(2, np.uint8)), 11),
        (lambda: kept.append([torch.zeros(1, dtype=torch.uint8)]), 12),
    ):
        change()
        manager.charge_outside("copy", kept)
        assert manager.stats()["outside"] == size
    kept[-1].clear()
    manager.charge_outside("copy", kept)
    assert manager.stats()["outside"] == 11
    manager.charge_outside("copy")
    assert manager.stats()["outside"] == 0


def test_what_is_outside_is_not_kept_alive():
    manager = SessionStateManager()
    kept = [torch.zeros(10)]
    gone = weakref.ref(kept[0])
    manager.charge_outside("copy", kept)
    kept.clear()
    assert gone() is None

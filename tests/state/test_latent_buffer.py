"""``LatentBuffer`` against a plain list, after every step; and the life cycle of the contract."""

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_omni_session_state import LatentBuffer
from vllm_omni_session_state.base.errors import BadPayloadError, NotAllocatedError, NothingStagedError

ITEMS = st.integers(0, 1000)


class LatentBufferMachine(RuleBasedStateMachine):
    """Every operation on the buffer and on a list side by side; a ring is a list cut from the front."""

    @initialize(maxlen=st.none() | st.integers(1, 4))
    def start(self, maxlen):
        self.buffer = LatentBuffer()
        self.buffer.allocate(maxlen=maxlen)
        self.maxlen = maxlen
        self.model = []
        self.staged = []

    def cut(self, items):
        return items if self.maxlen is None else items[-self.maxlen :]

    @precondition(lambda self: self.model is not None)
    @rule(item=ITEMS)
    def append(self, item):
        self.buffer.append(item)
        self.model = self.cut([*self.model, item])

    @precondition(lambda self: self.model is not None)
    @rule(items=st.lists(ITEMS, max_size=6))
    def extend(self, items):
        self.buffer.extend(items)
        self.model = self.cut([*self.model, *items])

    @precondition(lambda self: self.model is not None)
    @rule(item=ITEMS)
    def write_through_the_container(self, item):
        self.buffer.container.append(item)
        self.model = self.cut([*self.model, item])

    @rule(items=st.lists(ITEMS, max_size=6), maxlen=st.none() | st.integers(1, 4))
    def replace(self, items, maxlen):
        self.buffer.replace(items, maxlen=maxlen)
        items.append(-1)  # the caller's own list is the caller's
        self.maxlen = maxlen
        self.model = self.cut(items[:-1])

    @rule(item=ITEMS)
    def stage(self, item):
        self.buffer.stage(item)
        self.staged = [item]

    @rule()
    def discard(self):
        self.buffer.discard()
        self.staged = []

    @rule()
    def commit_staged(self):
        if not self.staged:
            with pytest.raises(NothingStagedError):
                self.buffer.commit()
        elif self.model is None:
            with pytest.raises(NotAllocatedError):
                self.buffer.commit()
        else:
            self.buffer.commit()
            self.model = self.cut([*self.model, *self.staged])
            self.staged = []

    @rule()
    def evict(self):
        self.buffer.evict()
        self.model = None

    @rule()
    def reset(self):
        self.buffer.reset()
        self.model = None
        self.staged = []

    @rule(maxlen=st.none() | st.integers(1, 4))
    def allocate(self, maxlen):
        self.buffer.allocate(maxlen=maxlen)
        self.maxlen = maxlen
        self.model = []

    @precondition(lambda self: self.model is not None)
    @rule()
    def move(self):
        """Exported, released and imported into another object: the same buffer."""
        moved = LatentBuffer()
        moved.import_payload(self.buffer.export_payload())
        for item in self.staged:
            moved.stage(item)
        self.buffer = moved

    @invariant()
    def equals_the_list(self):
        assert self.buffer.resident is (self.model is not None)
        if self.model is None:
            with pytest.raises(NotAllocatedError):
                self.buffer.view()
            assert len(self.buffer) == 0
            return
        assert self.buffer.view(include_staged=False) == self.model
        assert self.buffer.view() == self.cut([*self.model, *self.staged])
        assert len(self.buffer) == len(self.model)
        assert self.buffer.maxlen == self.maxlen


TestLatentBufferMachine = LatentBufferMachine.TestCase


def test_an_append_buffer_hands_out_a_list_that_torch_can_concatenate():
    buffer = LatentBuffer()
    buffer.allocate()
    buffer.extend([torch.zeros(1, 2), torch.ones(1, 2)])
    assert isinstance(buffer.container, list)
    assert torch.cat(buffer.container).shape == (2, 2)


@pytest.mark.parametrize("maxlen", [0, -1])
def test_a_ring_that_keeps_nothing_is_refused_and_changes_nothing(maxlen):
    buffer = LatentBuffer()
    buffer.replace([1, 2])
    with pytest.raises(ValueError, match=f"maxlen={maxlen}"):
        buffer.allocate(maxlen=maxlen)
    assert buffer.view() == [1, 2]


@pytest.mark.parametrize(
    "tree",
    [None, [], {}, {"items": []}, {"maxlen": None, "items": ()}, {"maxlen": 1, "items": [1, 2]}]
    + [{"maxlen": bad, "items": []} for bad in (0, -1, True, 1.0, "2")]
    + [{"maxlen": None, "items": [], "more": 1}],
)
def test_a_foreign_payload_is_refused_and_changes_nothing(tree):
    buffer = LatentBuffer()
    buffer.replace([1, 2])
    with pytest.raises(BadPayloadError, match="changed nothing"):
        buffer.import_payload(tree)
    assert buffer.view() == [1, 2]


def test_an_empty_buffer_is_still_a_buffer():
    assert LatentBuffer()


def test_none_can_be_staged():
    buffer = LatentBuffer()
    buffer.allocate()
    buffer.stage(None)
    buffer.commit()
    assert buffer.view() == [None]


def test_an_object_is_recomputable_only_while_its_source_is_resident():
    source, derived = LatentBuffer(), LatentBuffer()
    assert not derived.recomputable
    derived.recompute_source = source
    assert not derived.recomputable
    source.allocate()
    assert derived.recomputable
    source.evict()
    assert not derived.recomputable

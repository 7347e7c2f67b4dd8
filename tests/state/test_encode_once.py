"""``EncodeOnceKV``: written once, all or nothing, and never another's."""

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_omni_session_state.base.errors import (
    AlreadyEncodedError,
    BadPayloadError,
    IdentityMismatchError,
    NotAllocatedError,
    NothingStagedError,
)
from vllm_omni_session_state.state.buffers import EncodeOnceKV

IDENTITIES = st.sampled_from(["cup", "drawer"])


class EncodeOnceMachine(RuleBasedStateMachine):
    """Every operation against four plain variables."""

    @initialize()
    def start(self):
        self.object = EncodeOnceKV()
        self.identity = self.content = self.staged = None
        self.count = 0

    @rule(identity=IDENTITIES)
    def allocate(self, identity):
        self.object.allocate(identity=identity)
        self.identity, self.content = identity, None

    @rule(staged=st.booleans())
    def write(self, staged):
        self.count += 1
        if staged:
            self.object.stage(self.count)
            self.staged = self.count
        error = NotAllocatedError if self.identity is None else AlreadyEncodedError
        if self.identity is None or self.content is not None:
            with pytest.raises(error):
                self.object.commit(None if staged else self.count)
            return
        self.object.commit(None if staged else self.count)
        self.content = self.count
        if staged:
            self.staged = None

    @rule()
    def discard(self):
        self.object.discard()
        self.staged = None
        with pytest.raises(NothingStagedError):
            self.object.commit()

    @rule()
    def evict(self):
        self.object.evict()
        self.content = None

    @rule()
    def reset(self):
        self.object.reset()
        self.identity = self.content = self.staged = None

    @rule()
    def move(self):
        if self.content is None:
            with pytest.raises(NotAllocatedError):
                self.object.export_payload()
            return
        moved = EncodeOnceKV()
        moved.import_payload(self.object.export_payload())
        if self.staged is not None:
            moved.stage(self.staged)
        self.object = moved

    @invariant()
    def serves_its_own_identity_only(self):
        assert self.object.identity == self.identity
        assert self.object.resident is (self.content is not None)
        for asked in ("cup", "drawer"):
            if self.identity is None:
                with pytest.raises(NotAllocatedError):
                    self.object.read(asked)
            elif asked == self.identity:
                assert self.object.read(asked) == self.content
            else:
                with pytest.raises(IdentityMismatchError, match="its own id"):
                    self.object.read(asked)


TestEncodeOnceMachine = EncodeOnceMachine.TestCase


def test_it_counts_all_layers_in_one_footprint():
    encoded = EncodeOnceKV()
    encoded.allocate(identity="x")
    base = torch.zeros(64, dtype=torch.uint8)
    encoded.commit([(base[:8], base[8:16]), (base[16:], torch.zeros(6, dtype=torch.uint8))])
    assert encoded.nbytes == 70
    del base
    assert encoded.evict() == 70


@pytest.mark.parametrize("tree", [None, {}, {"identity": 1, "encoded": 2}, {"identity": "x"}, {"encoded": 1}])
def test_a_foreign_payload_is_refused_and_changes_nothing(tree):
    encoded = EncodeOnceKV()
    encoded.allocate(identity="x")
    encoded.commit(5)
    with pytest.raises(BadPayloadError, match="changed nothing"):
        encoded.import_payload(tree)
    assert encoded.read("x") == 5


def test_anothers_content_cannot_be_imported():
    encoded, another = EncodeOnceKV(), EncodeOnceKV()
    encoded.allocate(identity="x")
    another.allocate(identity="y")
    another.commit(1)
    with pytest.raises(BadPayloadError, match="holds x and was given y"):
        encoded.import_payload(another.export_payload())

"""The suite can fail: mistakes that the Cosmos3 adapter could make, each caught by a test of this folder."""

from __future__ import annotations

import mutants_cosmos3 as mutants
import pytest
import test_session_state_cosmos3 as tests

from vllm_omni_session_state.adapters.cosmos3 import Cosmos3State
from vllm_omni_session_state.base.errors import IdentityMismatchError

pytestmark = pytest.mark.host


def same_id_is_exact(off, on, monkeypatch):
    tests.test_two_step_interleaved_generations_are_both_exact(off, on, monkeypatch, ("same", "same"), 1, 4.0)


def a_failing_request_leaves_nothing(off, on, monkeypatch):
    tests.test_a_failing_forward_gives_the_hosts_error_and_leaves_nothing(off, on, monkeypatch, 3, 4.0)


def a_torn_capture_keeps_nothing(off, on, monkeypatch):
    tests.test_a_capture_that_fails_between_two_layers_keeps_neither(on, off, monkeypatch)


CAUGHT_BY = {
    mutants.alias_left_on_the_transformer: a_failing_request_leaves_nothing,
    mutants.drop_that_forgets: a_failing_request_leaves_nothing,
    mutants.one_state_for_one_id: same_id_is_exact,
    mutants.capture_layer_by_layer: a_torn_capture_keeps_nothing,
}


def test_every_mutant_has_its_test():
    assert set(CAUGHT_BY) == set(mutants.MUTANTS)


@pytest.fixture
def off(tiny_cosmos3):
    return tiny_cosmos3("regular")


@pytest.mark.parametrize("mutant", CAUGHT_BY, ids=lambda mutant: mutant.__name__)
def test_the_mutant_is_caught(mutant, off, cosmos3_checkpoint, monkeypatch):
    from omni_tiny.cosmos3 import TinyCosmos3

    with TinyCosmos3(cosmos3_checkpoint("regular"), flag=True) as on, mutant(), pytest.raises(AssertionError):
        CAUGHT_BY[mutant](off, on, monkeypatch)


def test_where_two_calls_share_a_session_the_identity_refuses_the_second(off, cosmos3_checkpoint):
    """The second line of defence: even so nobody is served another's K/V."""
    from omni_tiny.cosmos3 import TinyCosmos3

    with TinyCosmos3(cosmos3_checkpoint("regular"), flag=True) as on:
        session = on.pipeline._memory_manager.get_or_create_session("shared")
        manager = on.pipeline._memory_manager
        mine, theirs = (Cosmos3State(session, (name, name), manager) for name in ("cup", "drawer"))
        mine.load_into_transformer(on.pipeline.transformer, False)
        with pytest.raises(IdentityMismatchError):
            theirs.load_into_transformer(on.pipeline.transformer, False)

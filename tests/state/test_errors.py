"""Errors: each says in one sentence what it is about, and can be caught as what it is."""

import inspect

import pytest

import vllm_omni_session_state
from vllm_omni_session_state.base import errors
from vllm_omni_session_state.base.errors import NoRoomError, SessionStateError, TierFullError, error_text

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, SessionStateError) and kind is not SessionStateError
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_says_all_that_it_carries(kind):
    names = inspect.signature(kind).parameters
    numbers = ("wanted", "room", "most", "tokens")
    facts = {name: 7 if name in numbers else f"<{name}>" for name in names}
    error = kind(**facts)
    said = str(error)
    for name in names:
        assert str(getattr(error, name)) in said, name
    assert "{" not in said
    assert len(said.splitlines()) == 1
    assert error_text(error) == f"{kind.__name__}: {said}"
    assert getattr(vllm_omni_session_state, kind.__name__) is kind
    assert len({error, kind(**facts)}) == 2, "an error is itself, also where another says the same"


def test_what_an_error_says_is_a_strangers_and_no_format():
    assert str(NoRoomError("{kind} {0}")).startswith("no room for a new session: {kind} {0}. Close")
    full = TierFullError("{tier}", wanted=5, room=-3, setting="{setting}")
    assert str(full) == "the {tier} tier has 0 bytes left and 5 are wanted; raise {setting}"
    assert str(SessionStateError("as {it} is")) == "as {it} is"
    assert error_text(None) == ""

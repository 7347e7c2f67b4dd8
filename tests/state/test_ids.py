"""Session ids: which are the same session, and that a shown one gives nothing away."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_session_state.ids import session_key, shown


@pytest.mark.parametrize("nobody", [None, ""])
def test_a_client_that_names_no_session_has_the_default_one(nobody):
    assert session_key(nobody) == "default"


@given(st.text(min_size=1))
def test_a_string_is_its_own_key(text):
    assert session_key(text) == text


@pytest.mark.parametrize("value", [0, 1, b"a", 1.5, ("a",), object()])
def test_what_is_no_string_is_refused_by_name(value):
    with pytest.raises(TypeError, match=type(value).__name__):
        session_key(value)


@given(st.text(st.characters(), min_size=1), st.text(st.characters(), min_size=1))
def test_shown_ids_tell_sessions_apart_without_their_ids(a, b):
    assert shown(a) == shown(a)
    assert (shown(a) == shown(b)) == (a == b)
    assert a not in shown(a) or len(a) <= 2  # one or two characters occur in any hash


def test_a_shown_id_cannot_be_guessed_from_another_process():
    code = "from vllm_omni_session_state.ids import shown; print(shown('robot-1'))"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert other.startswith("s-")
    assert other != shown("robot-1")

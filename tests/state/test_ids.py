"""Session ids: which are the same session, and that a shown one gives nothing away."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import sized

from vllm_omni_session_state.base.ids import (
    ENV_KEY,
    Names,
    display_id,
    export_key,
    redacted_id,
    session_key,
    show_in_the_clear,
)


@pytest.mark.parametrize("nobody", [None, ""])
def test_a_client_that_names_no_session_has_the_default_one(nobody):
    assert session_key(nobody) == "default"


@sized(2000)
@given(st.text(min_size=1))
def test_a_string_is_its_own_key(text):
    assert session_key(text) == text


@pytest.mark.parametrize("value", [0, 1, b"a", 1.5, ("a",), object()])
def test_what_is_no_string_is_refused_by_name(value):
    with pytest.raises(TypeError, match=type(value).__name__):
        session_key(value)


@sized(2000)
@given(st.text(st.characters(), min_size=1), st.text(st.characters(), min_size=1))
def test_shown_ids_tell_sessions_apart_without_their_ids(a, b):
    assert display_id(a) == display_id(a)
    assert (display_id(a) == display_id(b)) == (a == b)
    assert a not in display_id(a) or len(a) <= 2  # one or two characters occur in any hash


def shown_elsewhere(session_id, environ):
    """The id as another process shows it, under that environment."""
    code = f"from vllm_omni_session_state.base.ids import display_id; print(display_id({session_id!r}))"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout.strip()


def test_a_shown_id_cannot_be_guessed_from_another_deployment():
    elsewhere = {name: value for name, value in os.environ.items() if name != ENV_KEY}
    other = shown_elsewhere("robot-1", elsewhere)
    assert other.startswith("s-")
    assert other != display_id("robot-1")


def test_all_processes_of_a_deployment_show_a_session_alike(monkeypatch):
    monkeypatch.delenv(ENV_KEY, raising=False)
    export_key()
    assert shown_elsewhere("robot-1", dict(os.environ)) == display_id("robot-1")


def test_a_key_that_was_given_is_used_and_kept(monkeypatch):
    monkeypatch.setenv(ENV_KEY, "of both machines")
    before = display_id("robot-1")
    export_key()
    assert os.environ[ENV_KEY] == "of both machines"
    assert display_id("robot-1") == before
    monkeypatch.setenv(ENV_KEY, "of another deployment")
    assert display_id("robot-1") != before


@pytest.fixture
def in_the_clear():
    show_in_the_clear(True)
    yield
    show_in_the_clear(False)


def test_ids_are_shown_in_the_clear_only_where_that_is_asked_for(in_the_clear):
    assert display_id("robot-1") == "robot-1"
    assert display_id("\ud800").encode()  # what no wire carries is written out
    show_in_the_clear(False)
    assert display_id("robot-1") == redacted_id("robot-1")


@sized(2000)
@given(st.lists(st.text(min_size=1), unique=True, min_size=1), st.data())
def test_a_session_is_found_by_its_id_and_by_what_is_shown_of_it(keys, data):
    key = data.draw(st.sampled_from(keys))
    assert Names(keys).find(key) == key
    assert Names(keys).find(display_id(key)) == (display_id(key) if display_id(key) in keys else key)


def test_both_names_find_a_session_that_is_shown_in_the_clear(in_the_clear):
    assert Names(["robot-1"]).find("robot-1") == "robot-1"
    assert Names(["robot-1"]).find(redacted_id("robot-1")) == "robot-1"


def test_nobody_finds_what_is_not_there():
    assert Names([]).find("robot-1") is None
    assert Names(["robot-1"]).find(None) is None
    assert Names(["default"]).find("") == "default"

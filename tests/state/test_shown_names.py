"""Ids that mean harm: no two are shown alike, and a name means the session that is shown like it."""

import contextlib

import hostile
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import sized

from vllm_omni_session_state.base import ids
from vllm_omni_session_state.base.ids import (
    AmbiguousNameError,
    Names,
    display_id,
    redacted_id,
    show_in_the_clear,
)


@contextlib.contextmanager
def showing(clear):
    show_in_the_clear(clear)
    try:
        yield
    finally:
        show_in_the_clear(False)


def one_word_of_ascii(text):
    return text.isascii() and text.isprintable() and len(text.split(" ")) == 1


@sized(4000)
@given(hostile.ids, hostile.ids)
def test_two_ids_are_never_shown_alike_and_each_is_one_word(a, b):
    with showing(True):
        texts = {key: display_id(key) for key in {a, b}}
        assert len(set(texts.values())) == len(texts)
        assert all(one_word_of_ascii(text) and len(text) < 1000 for text in texts.values())
        assert not {*texts.values()} & {redacted_id(a), redacted_id(b)}, "no id is shown as a hash is"


@pytest.mark.parametrize("key", ["robot-1", "a/b", "[1]", "default", "x" * 96])
def test_what_cannot_be_mistaken_is_shown_as_it_is(key):
    with showing(True):
        assert display_id(key) == key


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("a\nb\x1b[2K", r"a\nb\x1b[2K"),
        ("a\\nb", r"a\\nb"),
        ("r\u0430bot ", r"r\u0430bot\x20"),
        ("\u202e\ud800", r"\u202e\ud800"),
        ("s-0123456789ab", r"\x73-0123456789ab"),
    ],
)
def test_what_can_is_written_out(key, text):
    with showing(True):
        assert display_id(key) == text


def test_a_long_id_is_shown_in_part_and_by_its_hash():
    one, other = "x" * 5000, "x" * 4999 + "y"
    with showing(True):
        assert display_id(one) == f"{'x' * 48}\\...{redacted_id(one)}"
        assert display_id(one) != display_id(other)
        assert Names([other, one]).find(display_id(one)) == one


@sized(2000)
@given(hostile.sessions(), st.booleans())
def test_a_name_means_the_session_that_a_listing_shows_like_it(keys, clear):
    with showing(clear):
        names = Names(keys)
        for key in keys:
            assert names.find(display_id(key)) == key
            assert names.find(display_id(key), only="shown") == key
            assert names.find(key, only="id") == key
            others = [
                other for other in keys if key in (display_id(other), redacted_id(other)) and other != key
            ]
            if not others:
                assert names.find(key) == key
            elif clear and key == redacted_id(others[0]):
                with pytest.raises(AmbiguousNameError, match="by its id"):
                    names.find(key)
            else:
                assert names.find(key) == others[0], "not the one that took its name"


@sized(1000)
@given(hostile.sessions(), hostile.ids, st.booleans())
def test_nobody_is_meant_by_what_is_neither_shown_nor_an_id(keys, name, clear):
    with showing(clear):
        known = {*keys, *map(display_id, keys), *map(redacted_id, keys)}
        if name not in known:
            assert Names(keys).find(name) is None


def test_who_takes_anothers_hash_for_an_id_is_not_who_that_hash_means():
    trap = redacted_id("robot-1")
    assert Names([trap, "robot-1"]).find(trap) == "robot-1"
    assert Names([trap, "robot-1"]).find(redacted_id(trap)) == trap
    assert Names([trap]).find(trap) == trap, "and alone it can be named by its id"
    assert Names([trap]).find(trap, only="shown") is None


def test_two_sessions_of_one_hash_are_told_apart_by_their_ids_alone(monkeypatch):
    monkeypatch.setattr(ids, "fingerprint", lambda key: b"alike!" + key.encode().ljust(10))
    assert redacted_id("a") == redacted_id("b")
    with pytest.raises(AmbiguousNameError):
        Names(["a", "b"]).find(redacted_id("a"))
    assert Names(["a", "b"]).find("b") == "b"

"""Settings: the precedence of the seed, in both directions, and one complaint for each piece of nonsense."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_session_state.config import ENV_FLAG, ENV_MAX_SESSIONS, FLAG, resolve


def test_it_is_off_by_default():
    settings, complaints = resolve(None, {})
    assert not settings.enabled
    assert settings.max_sessions == 64
    assert complaints == ()


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_a_set_variable_turns_it_on_whatever_the_config_says(flag, text):
    settings, complaints = resolve(flag, {ENV_FLAG: text})
    assert settings.enabled
    assert complaints == ()


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("text", ["0", "False", "no", "off\n"])
def test_a_set_variable_turns_it_off_whatever_the_config_says(flag, text):
    settings, complaints = resolve(flag, {ENV_FLAG: text})
    assert not settings.enabled
    assert complaints == ()


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("environ", [{}, {ENV_FLAG: ""}, {ENV_FLAG: "  "}])
def test_without_the_variable_the_config_decides(flag, environ):
    settings, complaints = resolve(flag, environ)
    assert settings.enabled is flag
    assert complaints == ()


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("text", ["maybe", "2", "-1", "12.5", "tru"])
def test_nonsense_in_the_variable_leaves_the_config_and_complains_once(flag, text):
    settings, (complaint,) = resolve(flag, {ENV_FLAG: text})
    assert settings.enabled is flag
    used = "on" if flag else "off"
    assert str(complaint) == (
        f"{ENV_FLAG}={text!r} is not one of 1/true/yes/on/0/false/no/off; using the config's {used}"
    )


@pytest.mark.parametrize(("flag", "on"), [("true", True), ("Off", False), (1, True), (0, False)])
def test_a_config_may_spell_the_flag_as_a_word(flag, on):
    settings, complaints = resolve(flag, {})
    assert settings.enabled is on
    assert complaints == ()


@pytest.mark.parametrize("flag", ["maybe", 2, 12.5, [], {"on": True}])
def test_nonsense_in_the_config_means_off_and_complains_once(flag):
    settings, (complaint,) = resolve(flag, {})
    assert not settings.enabled
    assert complaint.setting == FLAG
    assert complaint.value == str(flag)


@pytest.mark.parametrize(("text", "count"), [("1", 1), (" 7 ", 7), ("100000", 100000)])
def test_the_cap_is_read_from_the_environment(text, count):
    settings, complaints = resolve(None, {ENV_MAX_SESSIONS: text})
    assert settings.max_sessions == count
    assert complaints == ()


@pytest.mark.parametrize("text", ["-3", "0", "12.5", "maybe", "1e3", "0x10", "9" * 5000])
def test_a_nonsense_cap_is_replaced_and_named(text):
    settings, (complaint,) = resolve(None, {ENV_MAX_SESSIONS: text})
    assert settings.max_sessions == 64
    assert complaint.setting == ENV_MAX_SESSIONS
    assert complaint.value == text
    assert complaint.instead == "64"


def test_two_pieces_of_nonsense_make_two_complaints():
    _, complaints = resolve(None, {ENV_FLAG: "maybe", ENV_MAX_SESSIONS: "-3"})
    assert [complaint.setting for complaint in complaints] == [ENV_FLAG, ENV_MAX_SESSIONS]


@given(
    flag=st.none() | st.booleans() | st.integers() | st.text() | st.floats() | st.lists(st.integers()),
    environ=st.dictionaries(st.sampled_from([ENV_FLAG, ENV_MAX_SESSIONS]), st.text()),
)
def test_no_value_whatever_makes_it_raise_or_keep_nobody(flag, environ):
    settings, _ = resolve(flag, environ)
    assert isinstance(settings.enabled, bool)
    assert settings.max_sessions >= 1

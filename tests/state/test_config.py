"""Settings: the precedence of the seed, in both directions, and one complaint for each piece of nonsense."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import sized

from vllm_omni_session_state.base.settings import (
    ENV_FLAG,
    ENV_MAX_SESSIONS,
    FLAG,
    OPTIONS,
    options_of,
    resolve,
)


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


RESUME, SHOW, SWITCH = (f"{ENV_FLAG}_{name}" for name in ("RESUME_S", "SHOW_IDS", "SWITCH_ENDS"))


def test_nothing_else_is_on_by_default():
    settings, complaints = resolve(True, {})
    assert (settings.show_ids, settings.resume_s, settings.switch_ends) == (False, 0.0, False)
    assert complaints == ()


def test_settings_are_read_from_the_stage():
    options = {"show_ids": True, "resume_s": 90, "switch_ends": "on"}
    settings, complaints = resolve(True, {}, options=options)
    assert (settings.show_ids, settings.resume_s, settings.switch_ends) == (True, 90.0, True)
    assert complaints == ()


def test_the_environment_wins_over_the_stage_in_both_directions():
    options = {"show_ids": True, "resume_s": 90}
    settings, _ = resolve(True, {SHOW: "0", RESUME: "0", SWITCH: "yes"}, options=options)
    assert (settings.show_ids, settings.resume_s, settings.switch_ends) == (False, 0.0, True)
    settings, _ = resolve(True, {SHOW: "", RESUME: " "}, options=options)
    assert (settings.show_ids, settings.resume_s) == (True, 90.0)


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", "1e999", "-0.5"])
def test_a_time_that_is_none_is_named_and_the_stages_stands(value):
    settings, (complaint,) = resolve(True, {RESUME: value}, options={"resume_s": 2})
    assert settings.resume_s == 2.0
    assert str(complaint) == f"{RESUME}={value!r} is not a number of seconds, 0 or more; using 2.0"


@pytest.mark.parametrize("value", [True, -1, float("nan"), 10**400, [], {}])
def test_a_time_in_the_stage_that_is_none_is_named(value):
    settings, (complaint,) = resolve(True, {}, options={"resume_s": value})
    assert settings.resume_s == 0.0
    assert complaint.setting == f"{OPTIONS}.resume_s"


def test_two_wrong_places_of_one_setting_are_two_complaints():
    settings, complaints = resolve(True, {SHOW: "maybe"}, options={"show_ids": "perhaps"})
    assert not settings.show_ids
    assert [complaint.setting for complaint in complaints] == [f"{OPTIONS}.show_ids", SHOW]


def test_keys_that_nobody_knows_are_named_in_one_complaint():
    settings, (complaint,) = resolve(True, {}, options={"resume": 3, "resume_s": 4, 7: 1})
    assert settings.resume_s == 4.0
    assert complaint.setting == OPTIONS
    assert complaint.value == "7, resume"


@pytest.mark.parametrize("options", ["resume_s=3", ["resume_s"], 3])
def test_options_that_are_no_mapping_are_named_once(options):
    settings, (complaint,) = resolve(True, {}, options=options)
    assert settings.resume_s == 0.0
    assert complaint.setting == OPTIONS


@pytest.mark.parametrize("model_config", [None, 3, {}, {"session_state": None}])
def test_a_stage_without_options_has_none(model_config):
    assert options_of(SimpleNamespace(model_config=model_config)) is None
    assert options_of(object()) is None


@sized(2000)
@given(
    flag=st.none() | st.booleans() | st.integers() | st.text() | st.floats() | st.lists(st.integers()),
    environ=st.dictionaries(st.sampled_from([ENV_FLAG, ENV_MAX_SESSIONS, RESUME, SHOW]), st.text()),
    options=st.none()
    | st.text()
    | st.dictionaries(
        st.sampled_from(["show_ids", "resume_s", "switch_ends"]) | st.text(),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers()),
    ),
)
def test_no_value_whatever_makes_it_raise_or_keep_nobody(flag, environ, options):
    settings, _ = resolve(flag, environ, options=options)
    assert settings.resume_s >= 0
    assert isinstance(settings.enabled, bool)
    assert settings.max_sessions >= 1


def test_budgets_are_read_from_both_places_and_the_environment_wins():
    options = {"device_budget": "2GiB", "host_budget": "50%", "on_lost": "error", "max_parked": 7}
    environ = {f"{ENV_FLAG}_HOST_BUDGET": "1000"}
    settings, complaints = resolve(True, environ, options=options)
    assert complaints == ()
    assert str(settings.device_budget) == str(2 << 30)
    assert (str(settings.host_budget), settings.on_lost, settings.max_parked) == ("1000", "error", 7)


@pytest.mark.parametrize(
    ("name", "value"),
    [("device_budget", "lots"), ("host_budget", -1), ("on_lost", "panic"), ("max_parked", 0)],
)
def test_a_nonsense_budget_is_named_and_replaced(name, value):
    settings, (complaint,) = resolve(True, {}, options={name: value})
    assert complaint.setting == f"model_config.session_state.{name}"
    assert complaint.value == str(value)
    default, _ = resolve(True, {})
    assert settings == default

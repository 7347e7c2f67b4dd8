"""Where each setting came from agrees with what is in force, whatever is written where."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import sized

from vllm_omni_session_state.base.ids import ENV_KEY
from vllm_omni_session_state.base.settings import (
    ENV_FLAG,
    FLAG,
    OPTION_KEYS,
    OPTIONS,
    SETTINGS,
    Settings,
    origins,
    resolve,
)
from vllm_omni_session_state.cli.doctor import unread

WORDS = st.sampled_from(["", " ", "1", "0", "on", "8GiB", "10%", "warn", "error", "maybe", "-3", "7.5", "12"])
VARIABLES = [ENV_FLAG, *(f"{ENV_FLAG}_{field.name.upper()}" for field in fields(Settings)[1:])]


def by_name(flag, environ, options=None):
    found, _ = origins(flag, environ, options=options)
    return {origin.name: origin for origin in found}


def test_without_anything_all_are_defaults():
    found = by_name(None, {})
    assert set(found) == {FLAG, "max_sessions", *OPTION_KEYS}
    assert {(origin.source, origin.where) for origin in found.values()} == {("default", "")}


def test_each_names_the_variable_or_the_key_that_it_came_from():
    environ = {ENV_FLAG: "0", f"{ENV_FLAG}_HOST_BUDGET": "2GiB", f"{ENV_FLAG}_MAX_SESSIONS": "3"}
    found = by_name(True, environ, {"host_budget": "1GiB", "on_lost": "error", "max_parked": 4096})
    told = {name: (origin.source, origin.where) for name, origin in found.items()}
    assert told[FLAG] == ("environment", ENV_FLAG)
    assert told["host_budget"] == ("environment", f"{ENV_FLAG}_HOST_BUDGET")
    assert told["max_sessions"] == ("environment", f"{ENV_FLAG}_MAX_SESSIONS")
    assert told["on_lost"] == ("config", f"{OPTIONS}.on_lost")
    assert told["max_parked"] == ("config", f"{OPTIONS}.max_parked"), "written, though it is the default"
    assert told["show_ids"] == ("default", "")
    assert found["host_budget"].value.of(0) == 2 << 30


def test_nonsense_is_nobodys_origin():
    found = by_name("maybe", {ENV_FLAG: "perhaps", f"{ENV_FLAG}_ON_LOST": "cry"}, {"on_lost": "error"})
    assert found[FLAG].source == "default"
    assert (found["on_lost"].source, found["on_lost"].value) == ("config", "error")


@given(
    st.sampled_from([None, True, False, "on", "maybe"]),
    st.dictionaries(st.sampled_from(VARIABLES), WORDS),
    st.one_of(st.none(), st.just("text"), st.dictionaries(st.sampled_from(OPTION_KEYS), WORDS)),
)
@sized(1000)
def test_what_each_place_alone_gives_is_what_is_in_force(flag, environ, options):
    settings, complaints = resolve(flag, environ, options=options)
    found, told = origins(flag, environ, options=options)
    assert told == complaints
    places = {
        "environment": resolve(None, environ)[0],
        "config": resolve(flag, {}, options=options)[0],
        "default": Settings(),
    }
    for field, origin in zip(fields(Settings), found, strict=True):
        value = getattr(settings, field.name)
        assert (origin.value, getattr(places[origin.source], field.name)) == (value, value)


@pytest.mark.parametrize("group", [{"disk": {"path": "/a"}}, {"disk.path": "/a"}])
def test_a_key_of_a_group_is_found_in_both_spellings(group):
    found = by_name(None, {}, group)["disk.path"]
    assert (found.value, found.source, found.where) == ("/a", "config", f"{OPTIONS}.disk.path")
    found = by_name(None, {f"{ENV_FLAG}_DISK_PATH": "/b"}, group)["disk.path"]
    assert (found.value, found.source, found.where) == ("/b", "environment", f"{ENV_FLAG}_DISK_PATH")


def test_variables_that_nobody_reads_are_named_with_what_may_be_meant():
    environ = [*VARIABLES, ENV_KEY, "PATH", f"{ENV_FLAG}_HOST_BUGET", f"{ENV_FLAG}_X_Y_Z_ENTIRELY_ELSE"]
    found = unread(environ)
    assert [line.split()[0] for line in found] == environ[-2:]
    assert found[0].endswith(f" is no setting and is not read; do you mean {ENV_FLAG}_HOST_BUDGET?")


def test_one_field_declares_a_setting():
    assert [setting.name for setting in SETTINGS] == [field.name for field in fields(Settings)]
    assert [setting.variable for setting in SETTINGS] == VARIABLES
    assert all(setting.default == getattr(Settings(), setting.name) for setting in SETTINGS)
    for setting in SETTINGS:
        assert setting.meaning
        assert setting.default is None or setting.kind.read(setting.default) == setting.default

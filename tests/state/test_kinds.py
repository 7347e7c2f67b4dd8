"""Sizes as operators write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_session_state.base.kinds import Size, read_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 << 30),
        ("512MB", 512_000_000),
        (" 1.5 kib ", 1536),
        ("0", 0),
        (1000, 1000),
        ("7b", 7),
        ("2TiB", 2 << 40),
    ],
)
def test_a_size_is_read_to_the_byte(text, nbytes):
    assert read_size(text).of(1 << 50) == nbytes


def test_a_percentage_is_a_part_of_the_whole():
    assert read_size("80%").of(1000) == 800
    assert str(read_size("80%")) == "80%"
    assert str(read_size("1KiB")) == "1024"


@pytest.mark.parametrize(
    "value",
    ["", "much", "8 GiB each", "-1", "101%", "1e9", "GiB", None, True, 1.5, [], "\uff18GiB", "9" * 400],
)
def test_what_is_no_size_is_none(value):
    assert read_size(value) is None


@given(st.none() | st.booleans() | st.integers() | st.floats() | st.text())
def test_no_value_makes_it_raise(value):
    assert read_size(value) is None or isinstance(read_size(value), Size)

"""Panels are drawn readably; the picture in the documentation is of the dashboard as it is."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.panels_svg import Panel, Series, drawing, said, ticks

DOCS = Path(__file__).parents[2] / "docs"
UNITS = ("short", "bytes", "binBps", "s", "ops", "percentunit")


def panel(*series, unit="short", **more):
    where = {"x": 0, "y": 0, "w": 12, "h": 8}
    return Panel(
        **{
            "title": "A & B",
            "unit": unit,
            "number": False,
            "stacked": False,
            "decimals": None,
            **where,
            **more,
        },
        series=series,
    )


def words(text):
    return [found.text for found in ET.fromstring(text).iter() if found.tag.endswith("}text")]


@given(st.floats(0, 1e13), st.sampled_from(UNITS), st.sampled_from([None, 0]))
def test_an_axis_has_a_few_marks_from_nothing_to_what_is_highest(top, unit, decimals):
    marks = ticks(top, unit, decimals)
    assert marks[0] == 0
    assert marks[-1] >= top * (1 - 1e-6)
    assert 2 <= len(marks) <= 6
    names = [said(mark, unit, decimals) for mark in marks]
    assert len(set(names)) == len(names), names


@pytest.mark.parametrize(
    ("value", "unit", "name"),
    [
        (1536, "bytes", "1.5 KiB"),
        (3 << 20, "binBps", "3 MiB/s"),
        (0.0021, "s", "2.1 ms"),
        (0.00002, "s", "20 µs"),
        (90, "s", "90 s"),
        (0.5, "ops", "0.5 ops/s"),
        (0.755, "percentunit", "75.5 %"),
        (1234.5, "short", "1234"),
    ],
)
def test_a_value_is_said_with_its_unit(value, unit, name):
    assert said(value, unit) == name


@pytest.mark.parametrize("stacked", [False, True])
def test_what_is_drawn_names_every_series_that_has_points(stacked):
    series = (Series("<a>", ((0, 1), (1, 2), (9, 3))), Series("b", ((0, 0), (1, 0))), Series("c", ()))
    found = words(drawing([panel(*series, stacked=stacked)], seconds=90, caption=["why"]))
    assert {"A & B", "<a>", "b", "why"} <= set(found)
    assert "c" not in found


def test_a_number_is_the_last_value():
    shown = panel(Series("n", ((0, 4), (1, 7))), number=True)
    assert "7" in words(drawing([shown], seconds=1, caption=()))


def test_the_picture_of_the_documentation_has_each_panel_of_the_dashboard_and_fetches_nothing():
    text = (DOCS / "images" / "dashboard.svg").read_text(encoding="utf-8")
    board = json.loads((DOCS / "monitoring" / "dashboard.json").read_text())
    assert {panel["title"] for panel in board["panels"]} <= set(words(text))
    assert "href" not in text
    assert "url(" not in text
    assert text.count("//") == 1, "the name space of SVG"
    assert len(text) < 200 << 10

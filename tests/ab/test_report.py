"""The result as JSON and as a page: complete, with units, and no request leaves it."""

from __future__ import annotations

import html.parser
import json
import re

import made
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import sized

from vllm_omni_session_state.ab.command import verdict
from vllm_omni_session_state.ab.report.html import TEMPLATES, page
from vllm_omni_session_state.ab.report.plots import (
    COLOURS,
    Line,
    bytes_plot,
    bytes_text,
    seconds_plot,
    seconds_text,
)
from vllm_omni_session_state.ab.report.result import COULD_NOT_RUN, DIFFERENT, EQUAL, Run, Step

VOID = {"meta", "br", "line", "polyline", "circle"}
FETCHES = re.compile(
    r"(?:src|href|srcset|action|data|poster)\s*=|url\(|@import|<script|<link|<iframe|https?:|//"
)


class Read(html.parser.HTMLParser):
    """A page as a browser reads it: every element is closed, and what is in it."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def changed(ask, arrays):
    if ask.number >= 3 and "actions" in arrays:
        arrays["actions"][2] += 0.5


def test_an_equal_result_says_so_everywhere(tmp_path):
    result = made.result(tmp_path)
    assert result.status == EQUAL
    said = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert (said["status"], said["verdict"], said["why"], said["first_difference"]) == (
        0,
        "equal",
        None,
        None,
    )
    count = len(result.asks)
    assert (said["asked"], said["compared"], said["outputs"]) == (count, count, 2 * count)
    assert len(said["runs"]["on"]["steps"]) == count
    assert said["runs"]["on"]["steps"][0]["sessions"]["session 2"] == {"cuda:0": 10_000_000, "cpu": 0}
    assert said["runs"]["off"]["steps"][0]["sessions"]["session 1"] == {"cuda:0": 5_000_000, "cpu": 0}
    (line,) = verdict(result)
    assert (
        line == f"EQUAL: all {2 * count} outputs of {count} steps are equal to the last bit, flag off and on."
    )
    text = " ".join(Read(page(result)).texts)
    assert f"All {2 * count} outputs of {count} steps" in text
    assert "Where they differ" not in text


def test_a_different_result_names_the_first_difference_everywhere(tmp_path):
    result = made.result(tmp_path, change=changed)
    ask = result.asks[3]
    assert result.status == DIFFERENT
    said = json.loads(json.dumps(result.as_json(), allow_nan=False))
    first = said["first_difference"]
    wanted = {"session": ask.session, "step": ask.step, "tensor": "actions", "differing": 1, "elements": 6}
    assert first.items() >= {**wanted, "max_difference": 0.5, "off": "F32 (6)"}.items()
    assert first["first"] == [2]
    assert said["outputs_different"] == len(result.asks) - 3
    words = f"session {ask.session}, step {ask.step} ({ask.label}), tensor actions: 1 of 6 elements"
    assert words in "\n".join(verdict(result))
    assert words in " ".join(Read(page(result)).texts)


@pytest.mark.parametrize("on_steps", [0, 3])
def test_a_run_that_died_keeps_what_came_until_then(tmp_path, on_steps):
    result = made.result(tmp_path, on_steps=on_steps)
    result.on.failure, result.why = (
        "signal SIGKILL",
        "the process with the flag on failed: so; its log: on.log",
    )
    if not on_steps:
        result.comparison = None
    assert result.status == COULD_NOT_RUN
    said = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert (said["verdict"], said["why"], said["compared"]) == ("could not run", result.why, on_steps)
    assert said["runs"]["on"]["failure"] == "signal SIGKILL"
    assert len(said["runs"]["off"]["steps"]) == len(result.asks)
    lines = "\n".join(verdict(result))
    assert result.why in lines
    assert f"The run with the flag on answered {on_steps} of {len(result.asks)} steps" in lines
    assert ("As far as both came, all 6 outputs" in lines) == bool(on_steps)
    assert result.why in " ".join(Read(page(result)).texts)


@pytest.mark.parametrize("change", [None, changed])
def test_no_request_leaves_the_page_and_it_fits_a_telephone(tmp_path, change):
    result = made.result(tmp_path, change=change)
    result.about["deploy_config"] = '"><script>alert(1)</script><img src="//a.example/b">'
    text = page(result)
    read, style = Read(text), re.search("<style>(.*)</style>", text, re.DOTALL)[1]
    assert {tag for tag, _ in read.tags} & {"script", "link", "img", "iframe", "base", "object"} == set()
    outside_of_texts = re.sub(r">[^<]*<", "><", text.replace(style, ""))
    assert not FETCHES.search(outside_of_texts)
    assert not FETCHES.search(style)
    metas = [attributes for tag, attributes in read.tags if tag == "meta"]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in metas
    assert any(meta.get("content", "").startswith("default-src 'none'") for meta in metas)
    assert "prefers-color-scheme: dark" in style
    assert all(f".c{number} {{" in style for number in range(COLOURS))


def test_every_plot_has_a_unit_at_its_axis_and_the_last_colour_stands_for_the_rest(tmp_path):
    result = made.result(tmp_path)
    for step in result.on.steps:
        step.sessions.update({f"session {n}": {"cuda:0": n} for n in range(3, 20)})
    read = Read(page(result))
    labels = [attributes["aria-label"] for tag, attributes in read.tags if "aria-label" in attributes]
    assert [label.partition(" over ")[0] for label in labels] == [
        *("session state, KiB", "session state, B", "session state, B"),
        *("session state, MiB",) * 3,
        "memory, GiB",
        "step time, logarithmic",
    ]
    assert "12 more together" in read.texts
    colours = {tag["class"] for _, tag in read.tags if tag.get("class", "").startswith(("c", "key"))}
    assert {"c0", "c1", "c7"} <= colours <= {f"{key}c{n}" for key in ("", "key ") for n in range(COLOURS)}


def test_a_model_whose_sessions_are_requests_has_no_plot_of_them(tmp_path):
    result = made.result(tmp_path)
    for held, said in (({}, True), (None, False)):
        for run in (result.off, result.on):
            run.steps = [Step(step.seconds, step.peak_bytes, held) for step in run.steps]
        text = " ".join(Read(page(result)).texts)
        assert ("0 bytes are left" in text) == said
        assert ("Session state" in text) == said, "where nobody can look, nothing is said"


def test_what_is_left_of_an_ended_session_is_said_and_the_verdict_is_of_outputs(tmp_path):
    result = made.result(tmp_path)
    ends = [ask for ask in result.asks if ask.ends]
    assert {ask.do for ask in ends} == {"step", "close"}
    assert result.left == tuple(ends), "these runs list both sessions after every step"
    assert result.status == EQUAL
    assert f"first session {ends[0].session}, step {ends[0].step} (close)" in "".join(result.remarks())
    assert "an ended session was still there after" in " ".join(Read(page(result)).texts)
    assert len(result.as_json()["left"]) == len(ends)
    for ask in ends:
        del result.on.steps[ask.number].sessions[f"session {ask.session}"]
    assert result.left == ()
    assert list(result.remarks()) == []
    assert "still there" not in page(result)


def test_nothing_at_all_is_a_page_too(tmp_path):
    result = made.result(tmp_path)
    result.off, result.on = (Run(flag=flag, log="a.log", outputs="a") for flag in (False, True))
    result.asks, result.comparison, result.why = (), None, "no deploy YAML"
    assert "no deploy YAML" in " ".join(Read(page(result)).texts)
    assert json.loads(json.dumps(result.as_json()))["status"] == 2


numbers = st.floats(0, 1e15, allow_nan=False)


@sized(1000)
@given(
    st.lists(st.lists(numbers, min_size=1, max_size=30), min_size=1, max_size=4),
    st.sampled_from(["bytes", "bytes from the least", "seconds"]),
)
def test_every_point_of_a_plot_is_inside_of_it(columns, kind):
    lines = [Line(f"<{n}>", tuple(enumerate(column, 1)), n) for n, column in enumerate(columns)]
    if kind == "seconds":
        plot = seconds_plot("<&>", lines, label="time")
    else:
        plot = bytes_plot("<&>", lines, label="state", from_zero=kind == "bytes")
    svg = TEMPLATES.get_template("plot.html.j2").module.figure(plot)
    assert "<&>" in Read(svg).texts
    points = [
        tuple(map(float, point.split(",")))
        for path in re.findall('points="(.*?)"', svg)
        for point in path.split()
    ]
    assert len(points) == sum(map(len, columns))
    assert all(70 <= x <= 420 and 5 <= y <= 225 for x, y in points)
    assert 2 <= svg.count('class="grid"') <= 24


def test_numbers_have_units():
    assert [bytes_text(count) for count in (0, 1023, 1536, 5 << 30)] == [
        "0 B",
        "1,023 B",
        "1.50 KiB",
        "5.00 GiB",
    ]
    assert [seconds_text(seconds) for seconds in (0.0123, 2.5, 100.0)] == ["12.3 ms", "2.5 s", "100 s"]

"""Sessions that are in several replicas: counted, and each said once, by the name that a listing shows."""

import logging
import re
import time
import tracemalloc
import urllib.request

import pytest
from desk_fakes import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_session_state.base.ids import redacted_id
from vllm_omni_session_state.manager.rows import Row
from vllm_omni_session_state.omni.admin import aggregate, metrics, stats_poller
from vllm_omni_session_state.omni.admin.stats_poller import StatsPoller
from vllm_omni_session_state.omni.worker import publisher

SECRET = "robot-0815-secret"


def rows(**replicas_of):
    return [
        {"session": name, "replicas": replicas, "agree": len(replicas) == 1}
        for name, replicas in replicas_of.items()
    ]


class Splits:
    """What a server knows of sessions in several replicas, by one listing after the other."""

    def __init__(self):
        self._figures = StatsPoller(workers=None, loop=None)

    def look(self, listed):
        self._figures.saw(listed)
        return self._figures.split


def entry(name):
    return Row(name, f"digest of {name}", "device", used=False, turn=1, nbytes={"cpu": 1})


@pytest.fixture(autouse=True)
def heard(caplog):
    """What the plugin says at WARNING: a function, since the lines are of the test's own phase."""
    caplog.set_level(logging.WARNING, logger="vllm_omni.session_state")
    return lambda: caplog.messages


@given(st.lists(st.lists(st.sampled_from("abcde"), unique=True), min_size=1, max_size=4), st.booleans())
def test_a_row_has_one_home_and_agrees_or_has_none_and_does_not(held, kv_only):
    """Over any placement of sessions in replicas of one rank."""
    answers = {
        replica: {
            "agree": True,
            "ranks": [
                {
                    "rank": 0,
                    "ok": True,
                    "rows": [] if kv_only else [entry(name) for name in names],
                    "only_kv": {f"digest of {name}": name for name in names} if kv_only else {},
                }
            ],
        }
        for replica, names in enumerate(held)
    }
    listed = aggregate.rows(answers)
    where = {name: [n for n, names in enumerate(held) if name in names] for name in "abcde"}
    assert {row["session"]: row["replicas"] for row in listed} == {k: v for k, v in where.items() if v}
    for row in listed:
        alone = len(row["replicas"]) == 1
        assert row["agree"] is alone
        assert row["home"] == (row["replicas"][0] if alone else None)
    assert [row["session"] for row in aggregate.split(listed)] == [
        row["session"] for row in listed if row["home"] is None
    ]


def test_a_session_is_said_once_at_the_second_look_that_shows_it_split(heard):
    splits = Splits()
    assert [splits.look(rows(a=[0], b=[0, 2], c=[1])) for _ in range(5)] == [0, 1, 1, 1, 1]
    (line,) = heard()
    assert line.startswith("session b is in replicas 0, 2 at once: ")
    assert splits.look(rows(a=[0, 1], b=[0, 2])) == 1
    assert splits.look(rows(a=[0, 1], b=[0, 2])) == 2
    assert len(heard()) == 2


def test_one_that_ended_here_and_began_there_between_two_answers_is_not_said(heard):
    splits = Splits()
    for _ in range(3):
        assert splits.look(rows(a=[0, 1])) == 0
        assert splits.look(rows(a=[1])) == 0
    assert heard() == []


def test_what_is_no_longer_split_is_not_remembered(heard):
    """However many there were: of all that its code has allocated, nothing of them is left."""
    splits = Splits()
    code = tracemalloc.Filter(inclusive=True, filename_pattern=stats_poller.__file__)
    tracemalloc.start()
    try:
        for number in range(100):
            listed = rows(**{f"s-{number}-{each}": [0, 1] for each in range(50)})
            splits.look(listed)
        held = tracemalloc.take_snapshot().filter_traces([code])
        splits.look([])
        left = tracemalloc.take_snapshot().filter_traces([code])
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in held.traces) > 1_000
    assert sum(trace.size for trace in left.traces) < 500
    assert heard() == []


def sample(server):
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=300) as answer:
        found = re.search(rf"^{metrics.PREFIX}split_sessions (\S+)$", answer.read().decode(), re.MULTILINE)
    return found and float(found[1])


def until(server, wanted):
    while sample(server) != wanted:
        time.sleep(0.05)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(stats_poller, "EVERY_S", 0.02)
    monkeypatch.setattr(stats_poller, "LISTED_EVERY_S", 0.0)
    yield
    for registry, collector in list(metrics._registered.items()):
        registry.unregister(collector)
        del metrics._registered[registry]


@pytest.mark.host
@pytest.mark.parametrize("show", [False, True])
def test_who_scrapes_sees_how_many_are_split_and_the_log_names_each_once(live, fast, heard, show):
    from vllm_omni_session_state.base.ids import show_in_the_clear

    engine = FakeEngine(replicas=2, options={"show_ids": show})
    server = live(engine=engine)
    show_in_the_clear(show)  # as the worker does
    engine.begin("a", SECRET, replica=0)
    engine.begin("b", replica=1)
    until(server, 0)
    assert heard() == []
    engine.begin(SECRET, replica=1)
    until(server, 1)
    time.sleep(0.3)
    (line,) = heard()
    assert line.startswith(f"session {SECRET if show else redacted_id(SECRET)} is in replicas 0, 1 at once")
    assert show or SECRET not in line
    engine.managers[0].drop_session(SECRET)
    until(server, 0)
    assert len(heard()) == 1


@pytest.mark.host
def test_with_one_replica_none_is_split(live, fast):
    server = live("a")
    until(server, 0)
    assert [method for method, _ in server.engine.calls] == ["session_state_figures"]


@pytest.mark.host
def test_a_replica_that_does_not_answer_heals_nothing(live, fast, heard):
    engine = FakeEngine(replicas=2, options={"http": True})
    server = live(engine=engine)
    engine.begin("a", replica=0)
    engine.begin("a", replica=1)
    until(server, 1)
    publisher.publisher_of(engine.workers[1], engine.managers[1], {}).close()
    assert server.http("GET", "/v1/session_state/sessions")[1]["answered"] == [0]
    time.sleep(0.5)
    assert sample(server) == 1
    assert len(heard()) == 1


@pytest.mark.host
def test_an_operators_listing_counts_as_a_look(live, fast, monkeypatch, heard):
    monkeypatch.setattr(stats_poller, "LISTED_EVERY_S", 3600.0)
    engine = FakeEngine(replicas=2, options={"http": True})
    server = live(engine=engine)
    until(server, 0)  # the one look of the figures themselves
    engine.begin("a", replica=0)
    engine.begin("a", replica=1)
    for looks in (1, 2, 3):
        server.http("GET", "/v1/session_state/sessions")
        assert len(heard()) == (looks > 1)

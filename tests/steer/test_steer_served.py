"""Robots' sessions on a real server, in one start of it: steered by the routes, and resumed after a loss.

A robot that lost its connection goes on where it names its session's id, and nobody else ever does.
"""

import threading
import time
import urllib.parse

import pytest
from omni_tiny.ways_to_end import left_in_the_end, some_id
from profiles import EXECUTOR, LONG
from prometheus_client.parser import text_string_to_metric_families

from vllm_omni_session_state.base.ids import redacted_id
from vllm_omni_session_state.omni.admin.metrics import PREFIX

pytestmark = pytest.mark.host

SESSIONS = "/v1/session_state/sessions"
KEY = "a-key-of-the-server"
NOBODY = {"sessions": [], "agree": True, "answered": [0], "age_s": 0.0}
COUNTS = ("hits", "misses", "evictions", "parks", "restores")
KEPT_S = 4.0
SILENCE_S = 20.0


@pytest.fixture(scope="module")
def server(dreamzero_checkpoint, tmp_path_factory):
    from omni_tiny.serve import Server
    from omni_tiny.ways_to_end import clear

    options = {"http": True, "host_budget": "256MiB", "resume_s": KEPT_S, "switch_ends": True}
    settings = {"session_state": options, "api_key": KEY, "idle_timeout_s": SILENCE_S, "executor": EXECUTOR}
    with Server(dreamzero_checkpoint, tmp_path_factory.mktemp("steered"), **settings) as server:
        clear(server)
        yield server
        found = left_in_the_end(server)
        assert (found.sessions, found.nbytes, found.kv_used) == (0, 0, 0), "what was kept has ended"


@pytest.fixture
def ask(server):
    """Return a function that makes a request, with the server's key unless it is told otherwise."""

    def asked(method, path="", body=None, *, headers=None):
        return server.http(method, f"{SESSIONS}{path}", body, headers=headers)

    return asked


def test_a_robots_session_goes_through_every_route_and_goes_on(server, ask):
    session = some_id()
    with server.robot(session) as robot:
        for _ in range(2):
            robot.step()
        status, found = ask("GET")
        assert status == 200
        (row,) = found["sessions"]
        assert (row["state"], row["ranks"], row["agree"], found["agree"]) == ("idle", 1, True, True)
        assert row["nbytes"]["cpu"] > 0
        for name in (row["session"], urllib.parse.quote(session, safe="")):
            status, one = ask("GET", f"/{name}")
            assert status == 200
            assert {name: one[name] for name in row} == row
            assert {"call_count", "stitched_buffer"} <= {value["name"] for value in one["values"]}
        for how, done, state in (("park", "parked", "host"), ("restore", "restored", "idle")):
            status, answer = ask("POST", f"/{row['session']}/{how}")
            assert (status, answer["done"]) == (200, done)
            assert ask("GET")[1]["sessions"][0]["state"] == state
        ask("POST", f"/{row['session']}/park")
        robot.step()  # brings it back by itself
        assert ask("GET")[1]["sessions"][0]["state"] == "idle"
        for how, done in (("reset", "reset"), ("close", "closed")):
            status, answer = ask("POST", f"/{row['session']}/{how}", {"timeout_s": 60})
            assert (status, answer["done"]) == (200, done)
            assert ask("GET") == (200, NOBODY)
            robot.step()
        assert ask("POST", "/nobody/close")[0] == 404
        assert ask("POST", f"/{row['session']}/close", {"timeout_s": 0})[0] == 422
        assert ask("POST", f"/{row['session']}/close")[0] == 200  # else it is kept


def test_a_call_during_a_long_step_is_too_slow_and_takes_effect_after_it(server, ask):
    session = some_id()
    with server.robot(session) as robot:
        robot.step()
        robot.send_step(lasts_s=3.0)
        time.sleep(0.5)  # it has reached the worker
        status, found = ask("GET", "?timeout_s=0.5")
        assert (status, found["age_s"], found["agree"]) == (200, 0, True)
        assert [row["state"] for row in found["sessions"]] == ["in_use"]
        status, answer = ask("POST", f"/{session}/close", {"timeout_s": 0.5})
        assert (status, answer["error"]["type"], answer["error"]["pending"]) == (504, "timeout", True)
        figures = answer["error"]["last_known"]["figures"]
        assert (figures["sessions"], figures["in_use"]) == (1, 1)
        assert robot.receive().shape == (8, 8)
        assert ask("GET") == (200, NOBODY)


def test_a_scrape_during_a_long_step_is_answered_before_it_and_its_figures_are_the_workers(server):
    def scrape():
        status, text = server.http("GET", "/metrics", headers={})
        assert status == 200
        return {
            sample.name.removeprefix(PREFIX): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith(PREFIX)
            and sample.labels in ({}, {"replica": "0"}, {"replica": "0", "state": "in_use"})
        }

    session = some_id()
    with server.robot(session) as robot:
        for _ in range(3):
            robot.step()
        found = scrape()
        assert (found["sessions"], found["figures_age_seconds"]) == (0, 0)
        (stats,) = server.call("session_state_stats")["ranks"]
        assert {name: found[f"{name}_total"] for name in COUNTS} == {name: stats[name] for name in COUNTS}
        robot.send_step(lasts_s=3.0)
        time.sleep(0.5)  # it has reached the worker
        answers, over = [], threading.Event()
        waiting = threading.Thread(target=lambda: (answers.append(robot.receive()), over.set()))
        waiting.start()
        assert scrape()["sessions"] == 1, "it is in use"
        assert not over.is_set()
        waiting.join()
        assert answers[0].shape == (8, 8)
        server.call("session_state_close", session)  # else it is kept


def test_without_the_servers_key_every_route_answers_401(server, ask):
    status, description = server.http("GET", "/openapi.json")
    assert status == 200
    ours = {path: item for path, item in description["paths"].items() if path.startswith(SESSIONS)}
    assert len(ours) == 6
    for path, item in ours.items():
        for method in item:
            where = path.removeprefix(SESSIONS).replace("{name}", "a")
            assert ask(method.upper(), where, headers={}) == (401, {"error": "Unauthorized"})
            assert ask(method.upper(), where, headers={"Authorization": "Bearer another"})[0] == 401


def test_the_servers_log_says_once_that_the_routes_are_on_and_shows_no_id_of_ours(server):
    lines = server.log.read_text().splitlines()
    assert len([line for line in lines if "can be seen and steered under /v1/session_state" in line]) == 1


def misses(server):
    (rank,) = server.call("session_state_stats")["ranks"]
    return rank["misses"]


def listed(server):
    (rank,) = server.call("session_state_list")["ranks"]
    return [entry["session"] for entry in rank["sessions"]]


def unbroken(server):
    """What a robot does that never loses its connection."""
    with server.robot(some_id(), seed=7) as robot:
        return [robot.step().tobytes() for _ in range(4)]


@pytest.mark.parametrize(
    "lost", ["hang_up", "vanish", "wait_until_closed", "old connection still open"] if LONG else ["vanish"]
)
def test_a_robot_that_names_its_id_goes_on_to_the_bit(server, lost):
    robot = server.robot(some_id(), seed=7)
    done = [robot.step().tobytes() for _ in range(2)]
    if lost == "wait_until_closed":
        robot.wait_until_closed(60)
    elif lost != "old connection still open":
        getattr(robot, lost)()
    robot.connect()
    done += [robot.step().tobytes() for _ in range(2)]
    robot.hang_up()
    assert done == unbroken(server)


def test_a_session_is_kept_for_its_time_and_then_ends(server):
    robot = server.robot(some_id())
    robot.step()
    begun = time.monotonic()
    robot.hang_up()
    time.sleep(KEPT_S / 2)
    there = redacted_id(robot.session) in listed(server)
    assert there or time.monotonic() - begun > KEPT_S, "it was to be kept for so long"
    while redacted_id(robot.session) in listed(server):
        time.sleep(0.1)
    assert time.monotonic() - begun > KEPT_S
    before = misses(server)
    robot.connect()
    robot.step()
    robot.hang_up()
    assert misses(server) == before + 1


@pytest.mark.parametrize("name", [None, "default", ""])
def test_a_robot_that_names_no_id_of_its_own_resumes_nobodys(server, name):
    kept = server.robot(some_id())
    kept.step()
    begun = time.monotonic()
    kept.hang_up()
    for _ in range(2):
        before = misses(server)
        with server.robot(name) as robot:
            robot.step()
        assert misses(server) == before + 1
    there = redacted_id(kept.session) in listed(server)
    assert there or time.monotonic() - begun > KEPT_S, "it was to be kept for so long"


def test_a_robot_that_asks_for_a_fresh_start_gets_one(server):
    robot = server.robot(some_id())
    robot.step()
    robot.hang_up()
    robot.connect()
    before = misses(server)
    robot.reset()
    robot.step()
    assert misses(server) == before + 1
    robot.hang_up()


def test_a_switch_ends_the_earlier_session_and_not_the_robots_connection(server):
    first, second = some_id(), some_id()
    with server.robot() as robot:
        robot.step(first)
        robot.step(second)
        while redacted_id(first) in listed(server):
            time.sleep(0.05)
        assert redacted_id(second) in listed(server)


def test_a_kept_session_that_the_worker_lost_is_said(server):
    robot = server.robot(some_id())
    robot.step()
    robot.hang_up()
    server.call("session_state_close", robot.session)
    robot.connect()
    robot.step()
    robot.hang_up()
    said = server.log.read_text()
    assert f"session {redacted_id(robot.session)} was kept and is gone: its rollout starts over" in said

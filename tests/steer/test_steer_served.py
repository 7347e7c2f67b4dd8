"""All of it on a real server: the routes and the command on robots' sessions, in one start of it."""

import time
import urllib.parse

import pytest
from omni_tiny.ways_to_end import some_id
from prometheus_client.parser import text_string_to_metric_families

from vllm_omni_session_state.omni.admin.metrics import PREFIX

pytestmark = pytest.mark.host

SESSIONS = "/v1/session_state/sessions"
KEY = "a-key-of-the-server"
NOBODY = {"sessions": [], "agree": True, "answered": [0], "age_s": 0.0}
COUNTS = ("hits", "misses", "evictions", "parks", "restores")


@pytest.fixture(scope="module")
def server(dreamzero_checkpoint, tmp_path_factory):
    from omni_tiny.serve import Server

    options = {"http": True, "host_budget": "256MiB"}
    folder = tmp_path_factory.mktemp("steered")
    with Server(dreamzero_checkpoint, folder, session_state=options, api_key=KEY) as server:
        yield server


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


def test_a_scrape_during_a_long_step_is_answered_at_once_and_its_figures_are_the_workers(server):
    def scrape():
        begun = time.monotonic()
        status, text = server.http("GET", "/metrics", headers={})
        took = time.monotonic() - begun
        assert status == 200
        found = {
            sample.name.removeprefix(PREFIX): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith(PREFIX)
            and sample.labels in ({}, {"replica": "0"}, {"replica": "0", "state": "in_use"})
        }
        return took, found

    with server.robot(some_id()) as robot:
        for _ in range(3):
            robot.step()
        found = scrape()[1]
        assert (found["sessions"], found["figures_age_seconds"]) == (0, 0)
        (stats,) = server.call("session_state_stats")["ranks"]
        assert {name: found[f"{name}_total"] for name in COUNTS} == {name: stats[name] for name in COUNTS}
        robot.send_step(lasts_s=2.0)
        time.sleep(0.3)
        scrapes = [scrape() for _ in range(10)]
        took = sorted(each for each, _ in scrapes)
        assert took[len(took) // 2] < 0.1, took
        assert {found["sessions"] for _, found in scrapes} == {1}, "it is in use"
        assert robot.receive().shape == (8, 8)


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

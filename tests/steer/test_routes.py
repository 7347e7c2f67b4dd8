"""The routes, over workers that are fakes: what they answer, what they refuse, what they never show."""

import logging
import urllib.parse

import pytest
from desk_fakes import FakeEngine, Live

from vllm_omni_session_state.base.ids import redacted_id
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.omni.admin import mount
from vllm_omni_session_state.omni.hooks import seams

pytestmark = pytest.mark.host

SESSIONS = "/v1/session_state/sessions"
ACTS = {"close": "closed", "reset": "reset", "park": "parked", "restore": "restored"}
SECRET = "robot-0815-secret"
KEY = "a-key-of-the-server"


def at(name, *more):
    return "/".join((SESSIONS, urllib.parse.quote(name, safe=""), *more))


def error_of(answer):
    """The error in its one form: its status, type and all of it."""
    status, content = answer
    assert set(content) == {"error"}
    error = content["error"]
    assert {"type", "message", "code"} <= set(error)
    assert error["code"] == status
    assert error["message"]
    return status, error["type"], error


def test_a_listing_shows_each_session_once_with_its_bytes_and_place(live):
    server = live("a", "b", "c")
    assert server.engine.managers[0].park("b")
    status, found = server.http("GET", SESSIONS)
    assert status == 200
    assert found["agree"]
    rows = {row["session"]: row for row in found["sessions"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        redacted_id("a"): "idle",
        redacted_id("b"): "host",
        redacted_id("c"): "idle",
    }
    assert rows[redacted_id("a")]["nbytes"] == rows[redacted_id("b")]["nbytes"] == {"cpu": 4096}
    assert all(row["home"] == 0 and row["replicas"] == [0] for row in rows.values())
    assert all(row["ranks"] == 1 and row["agree"] for row in rows.values())
    assert found["answered"] == [0]


def test_what_is_parked_on_the_disk_is_no_host_memory(live, tmp_path):
    server = live("a", "b")
    manager = server.engine.managers[0]
    manager.offloader.host, manager.offloader.disk = None, DiskTier(tmp_path / "disk", budget=1 << 20)
    assert manager.park("b")
    file_nbytes = manager.stats()["disk_nbytes"]
    assert file_nbytes > 4096
    rows = {row["session"]: row for row in server.http("GET", SESSIONS)[1]["sessions"]}
    for found in (rows[redacted_id("b")], server.http("GET", at("b"))[1]):
        assert found["state"] == "disk"
        assert found["nbytes"] == {"disk": file_nbytes}
    assert rows[redacted_id("a")]["nbytes"] == {"cpu": 4096}
    manager.drop_all()
    manager.offloader.disk.close()


@pytest.fixture
def halves(live):
    """A server whose session ``a`` is in both its replicas; ``b`` is in the first and ``c`` in the second."""
    engine = FakeEngine(replicas=2, options={"http": True})
    engine.begin("a", "b", replica=0)
    engine.begin("a", "c", replica=1)
    return live(engine=engine)


def test_a_session_of_several_replicas_is_one_row_with_the_bytes_of_all_and_at_home_in_none(halves):
    found = halves.http("GET", SESSIONS)[1]
    rows = {row["session"]: row for row in found["sessions"]}
    assert rows[redacted_id("a")]["nbytes"] == {"cpu": 8192}
    where = {name: (row["home"], row["replicas"], row["agree"]) for name, row in rows.items()}
    assert where == {
        redacted_id("a"): (None, [0, 1], False),
        redacted_id("b"): (0, [0], True),
        redacted_id("c"): (1, [1], True),
    }
    assert (found["agree"], found["answered"]) == (False, [0, 1])


@pytest.mark.parametrize(("name", "home"), [("a", None), ("b", 0), ("c", 1)])
def test_who_looks_at_a_session_or_acts_on_it_is_told_its_home(halves, name, home):
    for how, *path in (("GET",), ("POST", "park"), ("POST", "close")):
        status, found = halves.http(how, at(name, *path))
        assert (status, found["home"], found["agree"]) == (200, home, home is not None)
        assert found["replicas"] == ([0, 1] if home is None else [home])
    assert halves.http("GET", SESSIONS)[1]["agree"] is (home is None), "the half session is gone, or there"


def test_ranks_that_differ_are_shown_to_differ(live):
    engine = FakeEngine(options={"http": True})
    ranks = [
        {"rank": 0, "ok": True, "rows": [["s-1", "1", "device", False, 1, {"cuda:0": 5}]]},
        {"rank": 1, "ok": True, "rows": []},
    ]
    for rank in ranks:
        rank["only_kv"] = {"2": "s-2"}
    engine.replies = [[{"agree": False, "ranks": ranks}]]
    server = live(engine=engine)
    status, found = server.http("GET", SESSIONS)
    assert status == 200
    assert not found["agree"]
    assert [(row["session"], row["state"], row["agree"]) for row in found["sessions"]] == [
        ("s-1", "idle", False),
        ("s-2", "kv_only", True),
    ]


@pytest.mark.parametrize("name_of", [str, redacted_id])
def test_one_session_is_shown_with_every_value_and_no_content(live, name_of):
    status, found = live(SECRET).http("GET", at(name_of(SECRET)))
    assert status == 200
    assert found["session"] == redacted_id(SECRET)
    assert found["values"] == [
        {"name": "frames", "kind": "Tensor", "bucket": "attrs", "shape": "(4, 256)", "nbytes": {"cpu": 4096}}
    ]


@pytest.mark.parametrize("how", ACTS)
@pytest.mark.parametrize("name_of", [str, redacted_id])
def test_what_is_done_to_a_session_is_done_to_it_alone(live, how, name_of):
    server = live("a", "b")
    manager = server.engine.managers[0]
    if how == "restore":
        manager.park("a")
    status, found = server.http("POST", at(name_of("a"), how))
    assert status == 200
    where = {"home": 0, "replicas": [0], "agree": True}
    assert found == {"session": redacted_id("a"), "done": ACTS[how], **where}
    places = {entry.session: entry.place for entry in manager.listing()}
    assert places.pop(redacted_id("b")) == "device"
    assert (
        places
        == {
            "close": {},
            "reset": {},
            "park": {redacted_id("a"): "host"},
            "restore": {redacted_id("a"): "device"},
        }[how]
    )


def test_a_parked_session_that_is_restored_holds_what_it_held(live):
    server = live("a")
    session = server.engine.managers[0].peek("a")
    session.attrs["frames"].fill_(7)
    assert server.http("POST", at("a", "park"))[0] == 200
    assert session.parked
    assert server.http("POST", at("a", "restore"))[0] == 200
    assert bool((session.attrs["frames"] == 7).all())


@pytest.mark.parametrize("path", ["", *(f"/{how}" for how in ACTS)])
def test_nobody_is_unknown(live, path):
    answer = live("a").http("POST" if path else "GET", at("nobody") + path)
    assert error_of(answer)[:2] == (404, "not_found")


@pytest.mark.parametrize("how", ACTS)
def test_a_session_in_use_is_left_as_it_is(live, how):
    server = live("a")
    manager = server.engine.managers[0]
    with manager.lease("a") as session:
        assert server.http("GET", SESSIONS)[1]["sessions"][0]["state"] == "in_use"
        assert error_of(server.http("POST", at("a", how)))[:2] == (409, "in_use")
        assert session.attrs["frames"].shape == (4, 256)
    assert server.http("GET", SESSIONS)[1]["sessions"][0]["state"] == "idle"


def test_what_a_session_refuses_is_said_in_the_words_of_the_refusal(live):
    server = live("a", engine=FakeEngine(options={"http": True}, host_budget=None))
    status, kind, error = error_of(server.http("POST", at("a", "park")))
    assert (status, kind) == (409, "refused")
    assert f"session {redacted_id('a')} stays on the device: there is nowhere to park it" in error["message"]


def test_a_worker_that_fails_is_named_without_the_words_of_its_error(live, monkeypatch):
    engine = FakeEngine(options={"http": True})
    engine.begin(SECRET)
    monkeypatch.setattr(engine.managers[0], "inspect", lambda _: {}[SECRET])
    monkeypatch.setattr(engine.managers[0], "stats", lambda: {}[SECRET])
    server = live(engine=engine)
    for path in (SESSIONS, at(SECRET)):
        status, kind, error = error_of(server.http("GET", path))
        assert (status, kind) == (502, "worker_failed")
        assert "replica 0 rank 0 (KeyError)" in error["message"]


def test_a_call_that_the_host_cannot_make_is_an_error_of_the_one_form(live):
    engine = FakeEngine(options={"http": True})

    async def collective_rpc(**_):
        raise ValueError(SECRET)

    engine.collective_rpc = collective_rpc
    server = live(engine=engine)
    for path in (SESSIONS, at("a")):
        status, kind, error = error_of(server.http("GET", path))
        assert (status, kind) == (502, "worker_failed")
        assert SECRET not in error["message"]


def test_workers_without_managed_state_say_so(live):
    engine = FakeEngine(options={"http": True})
    engine.replies = [{"supported": False, "error": "no attribute 'session_state_figures'"}]
    server = live(engine=engine)
    assert error_of(server.http("GET", SESSIONS))[:2] == (502, "worker_failed")


def test_a_worker_that_is_too_slow_is_answered_for_with_the_last_known_figures(live):
    server = live("a", "b")
    assert server.http("GET", SESSIONS)[0] == 200
    server.step_runs(True)
    status, kind, error = error_of(server.http("POST", at("a", "close"), {"timeout_s": 0.2}))
    assert (status, kind, error["pending"]) == (504, "timeout", True)
    assert error["last_known"]["age_s"] >= 0
    figures = error["last_known"]["figures"]
    assert (figures["sessions"], figures["idle"], figures["nbytes:cpu"]) == (2, 2, 8192)
    # The next one waits behind it, is given up and leaves nothing behind.
    assert error_of(server.http("POST", at("b", "close"), {"timeout_s": 0.2}))[2]["pending"] is False
    server.step_runs(False)
    wait_until(lambda: "a" not in server.engine.managers[0])
    assert "b" in server.engine.managers[0]
    assert ("session_state_close", ("b",)) not in server.engine.calls


def test_figures_that_nobody_knows_yet_are_none(live):
    engine = FakeEngine(options={"http": True})
    engine.between_steps.clear()
    server = live(engine=engine)
    for path in (SESSIONS, at("a")):
        status, kind, error = error_of(server.http("GET", f"{path}?timeout_s=0.1"))
        assert (status, kind, error["last_known"]) == (504, "timeout", None)


def test_a_listing_during_a_running_step_is_answered_and_shows_what_is_in_use(live):
    server = live("a", "b")
    assert server.http("GET", SESSIONS)[0] == 200
    calls = list(server.engine.calls)
    server.step_runs(True)
    manager = server.engine.managers[0]
    with manager.lease("a"):
        for _ in range(3):
            status, found = server.http("GET", f"{SESSIONS}?timeout_s=0.1")
            assert (status, found["agree"], found["age_s"]) == (200, True, 0)
            assert [(row["session"], row["state"]) for row in found["sessions"]] == [
                (redacted_id("b"), "idle"),
                (redacted_id("a"), "in_use"),
            ]
    manager.park("b")
    rows = server.http("GET", SESSIONS)[1]["sessions"]
    assert [(row["session"], row["state"]) for row in rows] == [
        (redacted_id("b"), "host"),
        (redacted_id("a"), "idle"),
    ]
    assert server.engine.calls == calls, "no worker was asked"


def wait_until(holds):
    import time

    while not holds():
        time.sleep(0.02)


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"[]",
        b"3",
        b'{"timeout_s": 0}',
        b'{"timeout_s": NaN}',
        b'{"timeout_s": 1e999}',
        b'{"timeout_s": "soon"}',
        b'{"force": true}',
        b'{"\\ud800": 1}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_bad_body_is_refused_and_does_nothing(live, raw):
    server = live("a")
    assert error_of(server.http("POST", at("a", "close"), raw=raw))[:2] == (422, "bad_request")
    assert "a" in server.engine.managers[0]


@pytest.mark.parametrize("query", ["timeout_s=0", "timeout_s=nan", "timeout_s=", "timeout_s=%ff"])
def test_a_bad_query_is_refused(live, query):
    assert error_of(live().http("GET", f"{SESSIONS}?{query}"))[:2] == (422, "bad_request")


@pytest.mark.parametrize(
    "name",
    ["a/b", "a/close", "/", "..", "a b", "ä/€", "%2F", "?x=1#y", "a\nb", "s-0123456789ab", "\x00", "close"],
)
def test_an_id_may_hold_any_character(live, name):
    server = live(name, "other")
    assert server.http("GET", at(name))[1]["session"] == redacted_id(name)
    assert server.http("POST", at(name, "close"))[0] == 200
    assert server.engine.managers[0].keys() == ("other",)


def test_an_id_that_no_url_can_carry_is_named_as_it_is_shown(live):
    server = live("\ud800")
    assert server.http("POST", at(redacted_id("\ud800"), "close"))[0] == 200


@pytest.mark.parametrize("show", [False, True])
def test_no_answer_shows_an_id_unless_that_is_asked_for(live, show):
    from vllm_omni_session_state.base.ids import show_in_the_clear

    server = live(SECRET, show_ids=show)
    show_in_the_clear(show)  # as the worker does
    said = [server.http("GET", SESSIONS), server.http("GET", at(SECRET))]
    with server.engine.managers[0].lease(SECRET):
        said.append(server.http("POST", at(SECRET, "park")))
    said += [server.http("POST", at(SECRET, how)) for how in ("restore", "park", "restore", "reset", "close")]
    said.append(server.http("POST", at(SECRET, "close"), {SECRET: 1})) if show else None
    said.append(server.http("GET", at(SECRET)))
    shown = [answer for answer in said if SECRET in str(answer)]
    assert bool(shown) is show
    assert {status for status, _ in said} == ({200, 404, 409, 422} if show else {200, 404, 409})


def test_without_the_servers_key_every_route_answers_401_and_does_nothing(live):
    server = live("a", api_key=KEY)
    for path, methods in ours(server).items():
        for method in methods:
            where = path.replace("{name}", "a")
            assert server.http(method.upper(), where) == (401, {"error": "Unauthorized"})
            assert server.http(method.upper(), where, api_key="another")[0] == 401
    assert server.engine.calls in ([], [("session_state_figures", ())])  # the one of the server's start
    assert server.http("GET", SESSIONS, api_key=KEY)[0] == 200


def ours(server):
    """The paths of the routes, as the server's own description has them."""
    paths = server.app.openapi()["paths"]
    return {path: item for path, item in paths.items() if path.startswith("/v1/session_state")}


def test_every_route_is_described_with_what_it_answers(live):
    found = ours(live())
    assert {(path, *item) for path, item in found.items()} == {
        (SESSIONS, "get"),
        (f"{SESSIONS}/{{name}}", "get"),
        *((f"{SESSIONS}/{{name}}/{how}", "post") for how in ACTS),
    }
    names = [each["operationId"] for item in found.values() for each in item.values()]
    assert len(set(names)) == len(names) == 6
    for item in found.values():
        for each in item.values():
            assert {"200", "401", "422", "502", "504"} <= set(each["responses"])


def test_without_the_setting_there_is_no_route_and_nothing_is_said(live, caplog):
    caplog.set_level(logging.INFO, logger="vllm_omni.session_state")
    server = live("a", http=False)
    assert ours(server) == {}
    assert server.http("GET", SESSIONS)[0] == 404
    assert server.engine.calls in ([], [("session_state_figures", ())])
    assert caplog.messages == []


def test_an_application_that_was_built_in_another_way_is_left_alone_and_said_once(monkeypatch, caplog):
    from vllm_omni_session_state.base.log import forget_said

    forget_said()
    monkeypatch.setattr(mount, "note_applications", lambda module: None)
    monkeypatch.setattr(mount, "_applications", [])
    server = Live()
    try:
        assert ours(server) == {}
        (line,) = [line for line in caplog.messages if "/v1/session_state" in line]
        assert "found another way" in line
    finally:
        server.stop()


def test_the_host_builds_its_application_by_the_function_that_is_wrapped():
    from vllm_omni.entrypoints.openai import api_server

    assert callable(getattr(api_server, seams.SERVER_BUILDER))

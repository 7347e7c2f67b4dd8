"""The commands about sessions, as a user runs them, over routes whose workers are fakes."""

import json
import re
import time
from types import SimpleNamespace

import pytest
from desk_fakes import MIB, FakeEngine

from vllm_omni_session_state.base.ids import redacted_id
from vllm_omni_session_state.cli import main, sessions, tables
from vllm_omni_session_state.cli.client import Client

pytestmark = pytest.mark.host

KEY = "a-key-of-the-server"


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that runs the command; its exit status and both its outputs."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "100")

    def ran(*arguments):
        try:
            status = main.main(arguments)
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()

    return ran


def test_sessions_are_a_table_with_one_row_each_and_a_line_that_counts_them(live, run):
    server = live("a", "b", "c")
    server.engine.managers[0].park("b")
    status, out, err = run("sessions", "--url", server.url)
    assert (status, err) == (0, "")
    rows = {line.split()[0]: line.strip() for line in out.splitlines() if " s-" in line}
    assert rows.keys() == {redacted_id(key) for key in "abc"}
    assert re.fullmatch(r"s-\w+ +on host +4\.00 KiB +1", rows[redacted_id("b")])
    assert re.fullmatch(r"s-\w+ +idle +4\.00 KiB +1", rows[redacted_id("a")])
    assert "3 sessions: 2 idle, 1 on host; together 12.0 KiB on cpu" in out


def test_sessions_as_json_are_what_the_server_says_and_need_no_table(live, run, monkeypatch):
    server = live("a")
    monkeypatch.setattr(main, "_tables", None)
    status, out, _ = run("sessions", "--json", "--url", server.url)
    assert status == 0
    assert json.loads(out) == server.http("GET", "/v1/session_state/sessions")[1]


def test_no_sessions_are_said_to_be_none(live, run):
    status, out, _ = run("sessions", "--url", live().url)
    assert status == 0
    assert "No sessions." in out


@pytest.mark.parametrize("columns", [80, 120])
def test_a_table_fits_the_terminal_whatever_there_is_to_show(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    many = {f"cuda:{n}": 10**12 // 7**n for n in range(3)}
    rows = [
        {
            "session": redacted_id(str(n)),
            "state": state,
            "nbytes": many,
            "home": None if n < 2 else 1,
            "replicas": [0, 1] if n < 2 else [1],
            "ranks": 8,
            "agree": n > 2,
        }
        for n, state in enumerate(tables.STATES)
    ]
    tables.show_sessions({"sessions": rows, "agree": False, "answered": [0, 1], "age_s": 0.0})
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    for row in rows:
        (line,) = [line for line in out.splitlines() if line.strip().startswith(row["session"])]
        assert "931 GiB" in line
        assert "133 GiB" in line
        assert row["agree"] is (tables.DIFFER not in line)


def test_a_watch_shows_what_changes_and_outlives_a_server_that_is_away(live, run, monkeypatch, capsys):
    server = live("a")
    looks = []
    client = Client(server.url)

    def asleep(_):
        looks.append(capsys.readouterr().out)
        if len(looks) == 1:
            server.engine.begin("b")
        elif len(looks) == 2:
            client.url = "http://127.0.0.1:9"

    monkeypatch.setattr(sessions, "time", SimpleNamespace(sleep=asleep, strftime=time.strftime))
    assert sessions.watch(client, every_s=1, tables=tables, rounds=3) == 0
    said = "".join(looks) + capsys.readouterr().out
    assert redacted_id("b") in said
    assert "Not up to date: no answer from http://127.0.0.1:9" in said


def test_a_watch_that_is_broken_off_ends_well(live, run, monkeypatch):
    def broken_off(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sessions, "time", SimpleNamespace(sleep=broken_off, strftime=time.strftime))
    assert run("sessions", "--watch", "--url", live("a").url)[0] == 0


def test_one_session_is_shown_by_value(live, run):
    server = live("a")
    status, out, _ = run("inspect", "a", "--url", server.url)
    assert status == 0
    assert f"Session {redacted_id('a')}: idle" in out
    assert re.search(r"frames +Tensor +\(4, 256\) +4\.00 KiB", out)
    assert json.loads(run("inspect", redacted_id("a"), "--json", "--url", server.url)[1])[
        "session"
    ] == redacted_id("a")


def test_sessions_are_parked_restored_reset_and_closed_a_line_each(live, run):
    server = live("a", "b/c")
    for how, word in (("park", "parked"), ("restore", "restored"), ("reset", "reset")):
        status, out, err = run(how, "a", redacted_id("b/c"), "--url", server.url)
        assert (status, err) == (0, "")
        assert out == f"{redacted_id('a')}: {word}\n{redacted_id('b/c')}: {word}\n"
        server.engine.begin("a", "b/c")
    assert run("close", "a", "--url", server.url)[:2] == (0, f"{redacted_id('a')}: closed\n")
    assert server.engine.managers[0].keys() == ("b/c",)


def test_what_one_session_refuses_is_one_line_and_the_others_are_done(live, run):
    server = live("a", "b")
    with server.engine.managers[0].lease("a"):
        status, out, err = run("close", "a", "b", "nobody", "--url", server.url)
    assert status == 1
    assert out == f"{redacted_id('b')}: closed\n"
    first, second = err.splitlines()
    assert first.startswith("a: the session is in use")
    assert second.startswith("nobody: there is no such session")
    assert run("inspect", "nobody", "--url", server.url)[0] == 1


def test_what_cannot_be_done_is_one_clear_line_and_exit_status_2(live, run, monkeypatch):
    guarded, bare = live("a", api_key=KEY), live("a", http=False)
    busy = FakeEngine(options={"http": True})
    busy.between_steps.clear()
    slow = live(engine=busy)
    for arguments, words in (
        (("--url", "http://127.0.0.1:9"), "no answer from http://127.0.0.1:9: "),
        (("--url", "nonsense"), "--url 'nonsense' is no address of a server"),
        (("--url", guarded.url), "wants its API key, and none was given"),
        (("--url", guarded.url, "--api-key", "x"), "wants its API key, and another one was given"),
        (("--url", bare.url), "has no routes for sessions: serve with the plugin's flag on"),
        (("--url", slow.url, "--timeout", "0.2"), "answers 504: no worker answered within timeout_s=0.2"),
    ):
        status, out, err = run("sessions", *arguments)
        assert (status, out) == (2, "")
        assert err.startswith("vllm-omni-session-state: ")
        assert words in err
        assert err.count("\n") == 1
    assert run("sessions", "--url", guarded.url, "--api-key", KEY)[0] == 0
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert run("close", "a", "--url", guarded.url)[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [("close",), ("inspect",), ("sessions", "--json", "--watch"), ("sessions", "--timeout", "0"), ("watch",)],
)
def test_what_is_not_understood_is_exit_status_2(run, arguments):
    status, _, err = run(*arguments)
    assert status == 2
    assert err.startswith("usage:")


def test_sizes_are_written_with_three_digits():
    sizes = (0, 1023, 1024, 10 * 1024, MIB - 1, MIB, 603 * MIB, 1 << 30, 5 << 40)
    assert [tables.bytes_text(size) for size in sizes] == [
        *("0 B", "1023 B", "1.00 KiB", "10.0 KiB", "1.00 MiB"),
        *("1.00 MiB", "603 MiB", "1.00 GiB", "5.00 TiB"),
    ]


@pytest.fixture
def two(live):
    """A server of two replicas, and a function that begins sessions in one of them."""
    engine = FakeEngine(replicas=2, options={"http": True})
    return live(engine=engine).url, engine.begin


def test_where_there_are_several_replicas_a_session_says_its_home(two, run):
    url, begin = two
    begin("a", "b", replica=0)  # so far the second one has none
    out = run("sessions", "--url", url)[1]
    assert "home" in out
    assert "ranks" not in out
    assert re.search(rf"{redacted_id('a')} +idle +4\.00 KiB +0 *$", out, re.MULTILINE)
    assert "idle, replica 0: 4.00 KiB on cpu" in run("inspect", "a", "--url", url)[1]
    assert tables.DIFFER not in out


def test_a_session_that_is_in_several_replicas_is_marked_and_the_reader_told_what_to_do(two, run):
    url, begin = two
    begin("a", replica=0)
    begin("a", "b", replica=1)
    out = run("sessions", "--url", url)[1]
    assert re.search(rf"{redacted_id('a')} +idle +8\.00 KiB +{tables.DIFFER} 0, 1 *$", out, re.MULTILINE)
    assert re.search(rf"{redacted_id('b')} +idle +4\.00 KiB +1 *$", out, re.MULTILINE)
    one = run("inspect", "a", "--url", url)[1]
    assert "idle, replicas 0, 1: 8.00 KiB on cpu" in one
    for said in (out, one):
        assert f"{tables.DIFFER} {tables.SPLIT}" in " ".join(said.split())
    assert run("close", "a", "--url", url)[0] == 0
    assert tables.DIFFER not in run("sessions", "--url", url)[1]


def test_with_one_replica_nothing_is_said_of_homes(live, run):
    url = live("a").url
    assert "home" not in run("sessions", "--url", url)[1]
    assert "replica" not in run("inspect", "a", "--url", url)[1]

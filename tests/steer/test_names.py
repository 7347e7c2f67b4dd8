"""Names that mean harm, from an id to the terminal: each is seen, and who is named is who is meant."""

import contextlib
import re
import urllib.parse

import hostile
import pytest
from desk_fakes import FakeEngine
from hypothesis import example, given, settings
from profiles import sized
from rich.console import Console

from vllm_omni_session_state.base.ids import display_id, redacted_id, show_in_the_clear
from vllm_omni_session_state.cli import main, sessions, tables
from vllm_omni_session_state.cli.client import NotDoneError, WorkerFailedError

pytestmark = pytest.mark.host

SESSIONS = "/v1/session_state/sessions"


def at(name, *more):
    return "/".join((SESSIONS, urllib.parse.quote(name.encode("utf-8", "surrogatepass"), safe=""), *more))


def listed(server):
    status, found = server.http("GET", SESSIONS)
    assert status == 200
    return [row["session"] for row in found["sessions"]]


def is_printable(text):
    return all(sign.isprintable() or sign == "\n" for sign in text)


@pytest.mark.parametrize("clear", [True, False])
def test_every_session_can_be_closed_by_what_the_listing_shows_and_that_one_alone(live, clear):
    keys = [
        "robot-1",
        redacted_id("robot-1"),
        *hostile.NAMED,
        redacted_id(hostile.NAMED[0]),
        display_id("a\nb"),
        r"a\nb",
    ]
    keys = list(dict.fromkeys(keys))
    server = live(*keys, show_ids=clear)
    show_in_the_clear(clear)  # as the worker does
    manager = server.engine.managers[0]
    names = listed(server)
    assert len(set(names)) == len(keys)
    while names:
        key = manager.keys()[0]
        assert display_id(key) == names[0]
        status, found = server.http("POST", at(names[0], "close"))
        assert (status, found["session"]) == (200, names[0])
        assert key not in manager
        assert listed(server) == names[1:]
        names = names[1:]


@pytest.mark.parametrize("replicas", [1, 2])
def test_who_takes_anothers_hash_for_its_id_is_not_closed_for_it(live, replicas):
    """With two replicas each has one of them, and looks among its own."""
    trap = redacted_id("robot-1")
    engine = FakeEngine(replicas=replicas, options={"http": True})
    engine.begin("robot-1", replica=0)
    engine.begin(trap, replica=replicas - 1)
    server = live(engine=engine)
    assert server.http("GET", at(trap))[1]["session"] == trap
    assert server.http("POST", at(trap, "close"))[0] == 200
    assert "robot-1" not in engine.managers[0]
    assert trap in engine.managers[-1]
    assert server.http("POST", at(trap, "close"))[1]["session"] == redacted_id(trap), "now it is an id alone"
    assert server.http("POST", at(trap, "close"))[0] == 404


def test_a_plain_name_is_one_call_and_so_is_a_hash(live):
    server = live("a", "b")
    for name in ("a", redacted_id("b")):
        before = len(server.engine.calls)
        assert server.http("POST", at(name, "close"))[0] == 200
        assert [call[0] for call in server.engine.calls[before:]].count("session_state_close") == 1


def test_a_name_of_two_sessions_is_a_409_that_asks_for_the_id(live, capsys):
    trap = redacted_id("robot-1")
    server = live("robot-1", trap, show_ids=True)
    show_in_the_clear(True)
    for path, method in ((at(trap), "GET"), (at(trap, "close"), "POST"), (at(trap, "park"), "POST")):
        status, answer = server.http(method, path)
        assert (status, answer["error"]["type"]) == (409, "ambiguous")
        assert (
            "name the one that you mean by its id, as a listing with show_ids shows it"
            in (answer["error"]["message"])
        )
        assert trap not in str(answer)
    assert set(server.engine.managers[0].keys()) == {"robot-1", trap}
    assert main.main(["close", trap, "--url", server.url]) == 1
    assert "name the one that you mean by its id" in capsys.readouterr().err
    assert main.main(["close", "robot-1", display_id(trap), "--url", server.url]) == 0
    assert server.engine.managers[0].keys() == ()


def test_two_sessions_of_one_hash_are_two_rows_and_a_409(live, monkeypatch):
    monkeypatch.setattr(
        "vllm_omni_session_state.base.ids.fingerprint", lambda key: b"alike!" + key.encode().ljust(10)
    )
    server = live("a", "b")
    assert listed(server) == [redacted_id("a")] * 2
    assert server.http("POST", at(redacted_id("a"), "close"))[0] == 409
    assert server.http("POST", at("b", "close"))[0] == 200
    assert server.engine.managers[0].keys() == ("a",)


def test_a_rank_that_cannot_list_does_not_hide_what_the_others_have(live, monkeypatch):
    engine = FakeEngine(replicas=2, options={"http": True})
    engine.begin("a", replica=0)
    monkeypatch.setattr(engine.managers[1], "stats", lambda: {}["x"])
    server = live(engine=engine)
    status, found = server.http("GET", SESSIONS)
    assert (status, found["agree"]) == (200, False)
    assert [row["session"] for row in found["sessions"]] == [redacted_id("a")]


@pytest.fixture
def ids_in_the_clear():
    show_in_the_clear(True)
    yield
    show_in_the_clear(False)


@contextlib.contextmanager
def terminal(width=200):
    """What a terminal would get."""
    console = Console(
        width=width, highlight=False, force_terminal=True, color_system=None, legacy_windows=False
    )
    with console.capture() as got, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "Console", lambda **_: console)
        yield got


def row(session):
    return {
        "session": session,
        "state": "idle",
        "nbytes": {"cpu": 1},
        "home": 0,
        "replicas": [0],
        "ranks": 1,
        "agree": True,
    }


WHOLE = {"agree": True, "answered": [0], "age_s": 0.0}
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@sized(400)
@given(hostile.ids)
@example("[bold red]robot[/bold red]")
@example("robot[/]")
@example(":smile:")
def test_a_table_shows_whatever_a_server_sends_and_no_terminal_acts_on_it(name):
    """Also of a server that does not escape: a name that is printable stands there as it is."""
    value = {"name": name, "kind": name, "shape": name, "nbytes": {"cpu": 1}}
    with terminal(width=4000) as got:
        tables.show_sessions({"sessions": [row(name)], **WHOLE})
        tables.show_session({**row(name), "values": [value], **WHOLE})
        tables.show_session({**row(name), "values": [], **WHOLE})
    text = ANSI.sub("", got.get())
    assert is_printable(text)
    if name.isprintable() and name.isascii() and name == name.strip():
        assert text.count(name) >= 6


@settings(sized(200), database=None)
@given(hostile.sessions())
def test_a_table_has_one_row_for_each_session(keys):
    show_in_the_clear(True)
    try:
        with terminal(width=2000) as got:
            tables.show_sessions({"sessions": [row(display_id(key)) for key in keys], **WHOLE})
        words = [line.split() for line in ANSI.sub("", got.get()).splitlines() if " idle " in line]
        assert [first for first, *_ in words] == [display_id(key) for key in keys]
    finally:
        show_in_the_clear(False)


class Client:
    """Answers for each name as it is told."""

    def __init__(self, **answers):
        self.answers = answers

    def act(self, how, name):
        answer = self.answers.get(name, {"session": name, "done": how})
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("name", hostile.NAMED)
def test_the_lines_of_a_command_are_one_for_each_name(capsys, name):
    name = name.encode("utf-8", "replace").decode()
    client = Client(**{name: NotDoneError(f"not {name}")})
    assert sessions.act(client, "close", [name, f"{name}x"]) == 1
    out, err = capsys.readouterr()
    assert is_printable(out)
    assert is_printable(err)
    assert (out.count("\n"), err.count("\n")) == (1, 1)


def test_a_worker_that_fails_for_one_session_does_not_keep_the_others_from_it(capsys):
    client = Client(b=WorkerFailedError("answers 502: a call failed on replica 0 rank 1 (OSError)"))
    assert sessions.act(client, "close", ["a", "b", "c"]) == 2
    out, err = capsys.readouterr()
    assert out == "a: close\nc: close\n"
    assert err == "b: answers 502: a call failed on replica 0 rank 1 (OSError)\n"


def test_a_setting_is_shown_as_it_is_written(ids_in_the_clear, monkeypatch, capsys):
    from vllm_omni_session_state.cli import doctor

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("OMNI_DIFFUSION_SESSION_STATE_MANAGER_DISK_PATH", "/data/[red]x[/]\x1b[2J")
    monkeypatch.setattr(doctor.compat, "import_host", lambda: "it is not looked at")
    tables.show_doctor(doctor.examine())
    out = capsys.readouterr().out
    assert r"/data/[red]x[/]\x1b[2J" in out
    assert is_printable(ANSI.sub("", out))

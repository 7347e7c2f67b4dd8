"""A robot that lost its connection and goes on, on a real server: who does, and who never does."""

import time

import pytest
from omni_tiny.ways_to_end import left, left_in_the_end, some_id
from profiles import LONG

from vllm_omni_session_state.base.ids import redacted_id

pytestmark = pytest.mark.host

KEPT_S = 4.0
SILENCE_S = 1.0


@pytest.fixture(scope="module")
def server(serve):
    options = {"resume_s": KEPT_S, "switch_ends": True, "show_ids": True}
    with serve(session_state=options, idle_timeout_s=SILENCE_S) as server:
        yield server


@pytest.fixture(autouse=True)
def nobody_is_left(server):
    yield
    found = left_in_the_end(server)
    assert (found.sessions, found.nbytes, found.kv_used) == (0, 0, 0)


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
        robot.wait_until_closed(30)
    elif lost != "old connection still open":
        getattr(robot, lost)()
    robot.connect()
    done += [robot.step().tobytes() for _ in range(2)]
    robot.hang_up()
    assert done == unbroken(server)


def test_a_session_is_kept_for_its_time_and_then_ends(server):
    robot = server.robot(some_id())
    robot.step()
    robot.hang_up()
    time.sleep(KEPT_S / 2)
    assert left(server).sessions == 1
    time.sleep(KEPT_S / 2 + 1)
    assert left(server).sessions == 0
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
    there = kept.session in listed(server)
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


def test_a_switch_ends_the_earlier_session_at_once(server):
    first, second = some_id(), some_id()
    with server.robot() as robot:
        robot.step(first)
        robot.step(second)
        found = left_in_the_end(server, sessions=1)
        assert found.sessions == 1
        assert listed(server) == [second]


def test_listings_show_ids_where_that_is_asked_for_and_every_call_takes_both(server):
    with server.robot(some_id()) as robot:
        robot.step()
        assert listed(server) == [robot.session]
        (rank,) = server.call("session_state_inspect", robot.session)["ranks"]
        assert rank["found"]
        assert rank["session"]["session"] == robot.session
        assert redacted_id(robot.session) != robot.session


def test_a_kept_session_that_the_worker_lost_is_said(server):
    robot = server.robot(some_id())
    robot.step()
    robot.hang_up()
    server.call("session_state_close", robot.session)
    robot.connect()
    robot.step()
    robot.hang_up()
    said = server.log.read_text()
    assert f"session {robot.session} was kept and is gone: its rollout starts over" in said

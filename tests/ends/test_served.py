"""A real server and real clients: each end of a session reaches the worker once, and frees all of it."""

import functools
import threading
import time

import pytest
from omni_tiny.ways_to_end import LONG_S, PLUGINS, SLOW, STEPS, WAYS, left, left_in_the_end, some_id
from profiles import LONG

pytestmark = pytest.mark.host

CYCLES = 40 if LONG else 2
AT_ONCE = 5 if LONG else 2


def nothing(found):
    return (found.sessions, found.nbytes, found.kv_sessions, found.kv_used) == (0, 0, 0, 0)


def ends_between(before, after):
    """How many ends arrived: those that found their session, and those that found none."""
    return tuple(late - early for early, late in zip(before.ends, after.ends, strict=True))


def together(*calls):
    """Make the calls at once, each in a thread; an error of one is an error here."""
    errors, start = [], threading.Barrier(len(calls))

    def make(call):
        try:
            start.wait()
            call()
        except BaseException as error:  # noqa: BLE001 - whatever it is
            errors.append(error)

    threads = [threading.Thread(target=make, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def misses(server):
    """How many sessions the worker has begun."""
    (rank,) = server.call("session_state_stats")["ranks"]
    return rank["misses"]


@pytest.mark.parametrize("way", WAYS)
def test_a_session_that_ends_leaves_nothing_and_ends_once(server, way):
    before = left(server)
    assert nothing(before)
    if way in SLOW:  # each waits for the server's patience: some at a time
        for _ in range(CYCLES // AT_ONCE):
            together(*[functools.partial(WAYS[way], server)] * AT_ONCE)
        begun = CYCLES
    else:
        begun = sum(WAYS[way](server) for _ in range(CYCLES))
    after = left_in_the_end(server)
    assert nothing(after)
    assert ends_between(before, after) == (begun, 0)


def test_a_silent_robot_was_hung_up_on_by_the_server(server):
    """Else the slow ways above would show nothing."""
    assert f"idle timeout after {server.idle_timeout_s:.1f} seconds" in server.log.read_text()
    assert set(SLOW) < set(WAYS)


def test_a_rollout_is_freed_at_each_reset_and_goes_on(server):
    before = left(server)
    rollout = server.rollout()
    for _ in range(CYCLES):
        for _ in range(STEPS):
            assert rollout.step()[0] == 200
        rollout.reset()
        assert nothing(left_in_the_end(server))
    rollout.close()
    assert ends_between(before, left(server)) == (CYCLES, 0)


def test_a_rollout_that_many_close_and_reset_at_once_ends_once(server):
    before = left(server)
    for _ in range(CYCLES):
        rollout = server.rollout()
        rollout.step()
        ways = [f"/v1/realtime/sessions/{rollout.session}/{how}" for how in ("close", "reset")]
        together(*(functools.partial(server.http, "POST", way) for way in ways * 2))
    after = left_in_the_end(server)
    assert nothing(after)
    assert ends_between(before, after) == (CYCLES, 0)


def test_a_session_that_client_and_server_end_together_ends_once(server):
    """A robot on a rollout's id hangs up while the rollout is closed."""
    before = left(server)
    for _ in range(CYCLES):
        rollout = server.rollout()
        robot = server.robot(rollout.session)
        for _ in range(STEPS):
            robot.step()
        together(robot.hang_up, rollout.close)
    after = left_in_the_end(server)
    assert nothing(after)
    assert ends_between(before, after) == (CYCLES, 0)


def test_a_close_during_a_step_takes_effect_after_it(server):
    before = left(server)
    rollout = server.rollout()
    with server.robot(rollout.session) as robot:
        robot.step()
        robot.send_step(lasts_s=LONG_S)
        time.sleep(LONG_S / 2)
        rollout.close()
        assert robot.receive().shape == (8, 8)  # the step was not disturbed
        after = left_in_the_end(server)
        assert nothing(after)
    assert ends_between(before, left(server)) == (1, 0)


def test_an_operators_close_during_a_step_takes_effect_after_it(server):
    """vLLM-Omni runs remote calls between steps; nothing of this plugin waits here."""
    with server.robot(some_id()) as robot:
        robot.step()
        robot.send_step(lasts_s=LONG_S)
        time.sleep(LONG_S / 2)
        (rank,) = server.call("session_state_close", robot.session)["ranks"]
        assert rank["found"] == [True]
        assert robot.receive().shape == (8, 8)
        assert nothing(left(server))
    assert nothing(left_in_the_end(server))


def test_a_robot_that_comes_back_without_the_setting_starts_over(server):
    with server.robot(some_id()) as robot:
        robot.step()
        before = misses(server)
        robot.connect()
        robot.step()
        assert misses(server) == before + 1
    assert nothing(left_in_the_end(server))


def test_more_sessions_at_once_than_one_are_all_freed(server):
    before = left(server)
    robots = [server.robot(some_id()) for _ in range(3)]  # few: while one steps the others are silent
    for _ in range(STEPS):
        together(*(robot.step for robot in robots))
    assert left(server).sessions == 3
    together(*(robot.hang_up for robot in robots))
    after = left_in_the_end(server)
    assert nothing(after)
    assert ends_between(before, after) == (3, 0)


@pytest.mark.skipif(not LONG, reason="another server, of vLLM-Omni alone: part of the long run")
def test_without_the_plugin_every_one_of_these_sessions_is_left(serve):
    with serve(flag=False, environ={"VLLM_PLUGINS": PLUGINS}) as server:
        for way in ("robot hangs up", "robot resets", "rollout closed"):
            before = left(server)
            WAYS[way](server)
            found = left_in_the_end(server, within_s=2.0)
            assert found.sessions == before.sessions + 1
            assert found.kv_used > before.kv_used


def test_a_shutdown_in_order_is_one_line_for_all_sessions(server):
    """The last one of this file: it stops the server, with robots that are still connected."""
    robots = [server.robot(some_id()) for _ in range(3)]
    together(*(robot.step for robot in robots))
    begun = len(server.log.read_text())
    server.stop()
    said = [line for line in server.log.read_text()[begun:].splitlines() if "session" in line]
    assert not [line for line in said if "WARNING" in line or "ERROR" in line]
    (line,) = [line for line in said if "the server stops" in line]
    assert "INFO" in line
    assert "no ends of 3 sessions are sent" in line

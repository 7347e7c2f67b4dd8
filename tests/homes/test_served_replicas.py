"""A real server with two replicas, started once: right outputs, nobody held up, and nobody lost unsaid."""

import os
import signal
import statistics
import threading
import time

import pytest
from profiles import LONG, count
from workload import CAPACITY, CROWD, OPTIONS, close_all, counted, crowd, said, sessions

pytestmark = pytest.mark.host

LASTS_S = 0.4
"""Of a step whose wait is measured: it sleeps, so that a busy machine adds little."""


@pytest.fixture(scope="module")
def server(dreamzero_checkpoint, tmp_path_factory):
    from omni_tiny.serve import Server

    folder = tmp_path_factory.mktemp("replicas")
    settings = {"replicas": 2, "capacity": CAPACITY, "session_state": OPTIONS, "idle_timeout_s": 120.0}
    with Server(dreamzero_checkpoint, folder, **settings) as server:
        close_all(server)  # "default", which each makes for itself while it is loaded
        yield server


def ends(server):
    return [answer["ranks"][0]["ends"] for answer in server.call_all("session_state_stats")]


def test_a_crowd_in_random_order_gets_each_output_as_if_alone(server, dreamzero_checkpoint):
    before = ends(server)
    found = crowd(server)
    close_all(server)
    alone = CROWD.alone(dreamzero_checkpoint)
    wrong = [key for key, actions in found.items() if alone[key].actions.tobytes() != actions]
    print(f"two replicas: {len(wrong)} of {len(found)} outputs wrong")
    assert not wrong
    assert len(found) == CROWD.sessions * CROWD.steps
    after = ends(server)
    assert [now["absent"] - then["absent"] for then, now in zip(before, after, strict=True)] == [0, 0]
    assert (
        sum(now["close"] - then["close"] for then, now in zip(before, after, strict=True)) == CROWD.sessions
    )
    assert all(answer["ranks"][0]["parks"] for answer in server.call_all("session_state_stats"))


def pair(server, *, quiet):
    """Seconds of steps on one replica while a step runs on the other, with calls or without."""
    slow, fast, third = (server.robot(name) for name in ("slow", "fast", "third"))
    for robot in (slow, fast):
        robot.step()
    third.step("fill")  # the third session is where the first is, and the fourth with the second
    other = server.rollout()
    assert other.step()[0] == 200
    homes = sessions(server)
    assert homes["slow"] != homes["fast"]
    slow.send_step(lasts_s=6 * LASTS_S)
    time.sleep(LASTS_S / 2)
    calls = [
        threading.Thread(target=target)
        for target in (
            other.close,
            lambda: server.http("GET", "/v1/session_state/sessions?timeout_s=60"),
            lambda: server.http("GET", "/metrics"),
        )
    ]
    took = []
    for step in range(3):
        if step == 1 and not quiet:
            for call in calls:
                call.start()
            time.sleep(LASTS_S / 4)  # they are on their way
        begun = time.monotonic()
        fast.send_step(lasts_s=LASTS_S)
        fast.receive()
        took.append(time.monotonic() - begun)
    slow.receive()
    if quiet:
        other.close()
    else:
        for call in calls:
            call.join()
    for robot in (slow, fast, third):
        robot.hang_up()
    close_all(server)
    return statistics.mean(took[1:])


@pytest.mark.skipif(not LONG, reason="it waits for many steps: part of the long run")
def test_a_close_a_listing_and_a_scrape_during_a_step_of_one_replica_do_not_hold_up_the_other(server):
    ratios = [pair(server, quiet=False) / pair(server, quiet=True) for _ in range(count(20))]
    ratio = statistics.median(ratios)
    print(f"a step beside calls takes {ratio:.2f} of one without (median of {len(ratios)} pairs)")
    assert ratio <= 1.2, ratios


def test_sessions_of_a_killed_replica_are_said_to_be_lost_once_each_and_the_others_go_on(server):
    """The last one of this file: one of the two replicas is gone after it."""
    number, steps = 6, 8
    robots = {f"robot-{each}": server.robot(f"robot-{each}", seed=each) for each in range(number)}
    done = {name: [robot.step().tobytes()] for name, robot in robots.items()}
    homes = sessions(server)
    lost = [name for name in robots if homes[name] == [1]]
    assert 0 < len(lost) < number
    pids = [answer["ranks"][0]["pid"] for answer in server.call_all("session_state_stats")]
    waited, failed = [], dict.fromkeys(robots, 0)
    third = threading.Barrier(number + 1)

    def live(name):
        robot = robots[name]
        for step in range(1, steps):
            if step == 2:
                third.wait()
            begun = time.monotonic()
            try:
                done[name].append(robot.step().tobytes())
            except RuntimeError:
                failed[name] += 1
            waited.append(time.monotonic() - begun)

    threads = [threading.Thread(target=live, args=(name,)) for name in robots]
    for thread in threads:
        thread.start()
    third.wait()
    os.kill(pids[1], signal.SIGKILL)
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 60  # a last step for all, now that vLLM-Omni has seen it
    while len(server.call_all("session_state_stats")) > 1 and time.monotonic() < deadline:
        time.sleep(0.2)
    for name in lost:
        robots[name].step()
    print(f"longest wait for a step {max(waited):.1f} s, steps that failed {failed}")
    assert max(waited) <= 15.0, waited
    assert {name for name in failed if failed[name]} <= set(lost)
    lines = said(server, "is lost (replica): it was on replica 1, which is gone")
    assert sorted(name for name in robots for line in lines if f"session {name} is lost" in line) == lost
    assert len(lines) == len(lost)
    assert counted(server, "lost_total", replica="1", reason="replica") == len(lost)
    assert list(sessions(server).values()) == [[0]] * number
    for name in set(robots) - set(lost):
        seen = server.robot(f"again-{name}", seed=int(name[-1]))
        assert [seen.step().tobytes() for _ in range(steps)] == done[name], name
        seen.hang_up()
    assert server.http("GET", "/health")[0] == 200

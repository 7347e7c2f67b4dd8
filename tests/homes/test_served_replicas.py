"""A real server with two replicas, started once: right outputs, nobody held up, and nobody lost unsaid."""

import concurrent.futures
import os
import signal
import threading
import time

import numpy as np
import pytest
from profiles import EXECUTOR
from workload import CAPACITY, CROWD, OPTIONS, close_all, counted, crowd, said, sessions

from vllm_omni_session_state.base.ids import redacted_id

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def server(dreamzero_checkpoint, tmp_path_factory):
    from omni_tiny.serve import Server

    folder = tmp_path_factory.mktemp("replicas")
    options = {name: value for name, value in OPTIONS.items() if name != "host_budget"}
    options["disk"] = {"path": str(folder / "parked"), "budget": "16GiB"}
    settings = {"replicas": 2, "capacity": CAPACITY, "session_state": options, "idle_timeout_s": 120.0}
    with Server(dreamzero_checkpoint, folder, executor=EXECUTOR, **settings) as server:
        close_all(server)  # "default", which each makes for itself while it is loaded
        yield server


@pytest.fixture(scope="module")
def alone(dreamzero_checkpoint):
    return CROWD.alone(dreamzero_checkpoint)


def stats(server):
    return [answer["ranks"][0] for answer in server.call_all("session_state_stats")]


def ends(server):
    return [replica["ends"] for replica in stats(server)]


def test_a_crowd_in_random_order_gets_each_output_as_if_alone(server, alone):
    before = ends(server)
    found = crowd(server)
    close_all(server)
    wrong = [key for key, actions in found.items() if alone[key].actions.tobytes() != actions]
    print(f"two replicas: {len(wrong)} of {len(found)} outputs wrong")
    assert not wrong
    assert len(found) == CROWD.sessions * CROWD.steps
    after = ends(server)
    assert [now["absent"] - then["absent"] for then, now in zip(before, after, strict=True)] == [0, 0]
    assert (
        sum(now["close"] - then["close"] for then, now in zip(before, after, strict=True)) == CROWD.sessions
    )
    assert all(replica["parks"] for replica in stats(server))


def test_a_crowd_at_once_gets_each_output_as_if_alone_and_files_are_read_behind_other_steps(server, alone):
    from omni_tiny.served_clients import CrowdRobot

    def live(client):
        keys = [(client.number, step) for step in range(CROWD.steps)]
        return {key: np.asarray(CROWD.run(client, key)).tobytes() for key in keys}

    clients = [CrowdRobot(server, CROWD, number) for number in range(CROWD.sessions)]
    with concurrent.futures.ThreadPoolExecutor(CROWD.sessions) as pool:
        found = {key: actions for life in pool.map(live, clients) for key, actions in life.items()}
    assert found == {key: step.actions.tobytes() for key, step in alone.items()}
    for replica in stats(server):
        assert (replica["kv"]["sessions"], replica["parked_sessions"]) == (CAPACITY, 3 - CAPACITY)
        assert not [name for name in replica if name.startswith("lost:")]
    assert sum(replica["restores_ahead"] for replica in stats(server)) > 0
    for client in clients:
        client.robot.hang_up()
    close_all(server)
    for replica in stats(server):
        assert replica["sessions"] == replica["total_nbytes"] == replica["disk_nbytes"] == 0
        assert (replica["kv"]["sessions"], replica["kv"]["free"]) == (0, replica["kv"]["blocks"])


def test_listings_show_ids_where_that_is_asked_for_and_every_call_takes_both(server):
    with server.robot("mine") as robot:
        robot.step()
        assert sessions(server).keys() == {"mine"}
        for name in ("mine", redacted_id("mine")):
            found = [answer["ranks"][0] for answer in server.call_all("session_state_inspect", name)]
            (there,) = [rank["session"] for rank in found if rank["found"]]
            assert there["session"] == "mine"
    close_all(server)


def test_a_close_a_listing_and_a_scrape_during_a_step_of_one_replica_do_not_hold_up_the_other(server):
    """Its steps are over before the long one: what waits for that waits alone."""
    slow, fast, third = (server.robot(name) for name in ("slow", "fast", "third"))
    for robot in (slow, fast):
        robot.step()
    third.step("fill")  # the third session is where the first is, and the fourth with the second
    other = server.rollout()
    assert other.step()[0] == 200
    homes = sessions(server)
    assert homes["slow"] != homes["fast"]
    slow.send_step(lasts_s=5.0)
    time.sleep(0.5)  # it has reached its worker
    over = threading.Event()
    waiting = threading.Thread(target=lambda: (slow.receive(), over.set()))
    calls = [
        threading.Thread(target=target)
        for target in (
            other.close,
            lambda: server.http("GET", "/v1/session_state/sessions?timeout_s=60"),
            lambda: server.http("GET", "/metrics"),
        )
    ]
    for thread in (waiting, *calls):
        thread.start()
    for _ in range(3):
        fast.step()
    assert not over.is_set()
    for thread in (waiting, *calls):
        thread.join()
    for robot in (slow, fast, third):
        robot.hang_up()
    close_all(server)


def test_sessions_of_a_killed_replica_are_said_to_be_lost_once_each_and_the_others_go_on(server):
    """The last one of this file: one of the two replicas is gone after it."""
    number, steps = 6, 8
    robots = {f"robot-{each}": server.robot(f"robot-{each}", seed=each) for each in range(number)}
    done = {name: [robot.step().tobytes()] for name, robot in robots.items()}
    homes = sessions(server)
    lost = [name for name in robots if homes[name] == [1]]
    assert 0 < len(lost) < number
    pids = [replica["pid"] for replica in stats(server)]
    failed = dict.fromkeys(robots, 0)
    third = threading.Barrier(number + 1)

    def live(name):
        robot = robots[name]
        for step in range(1, steps):
            if step == 2:
                third.wait()
            try:
                done[name].append(robot.step().tobytes())
            except RuntimeError:
                failed[name] += 1

    threads = [threading.Thread(target=live, args=(name,)) for name in robots]
    for thread in threads:
        thread.start()
    third.wait()
    os.kill(pids[1], signal.SIGKILL)
    for thread in threads:
        thread.join()
    while len(stats(server)) > 1:  # a last step for all, once vLLM-Omni has seen it
        time.sleep(0.2)
    for name in lost:
        robots[name].step()
    print(f"steps that failed: {failed}")
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

"""What clients of every kind do at a server, whatever its replicas: equal work has equal outputs.

And what a test asks a server with several replicas: who is where, and what its log and its metrics say.
"""

from __future__ import annotations

import numpy as np
from omni_tiny.crowd import Crowd
from omni_tiny.served_clients import CrowdRobot
from profiles import LONG
from prometheus_client.parser import text_string_to_metric_families

from vllm_omni_session_state.omni.admin.metrics import PREFIX

CROWD = Crowd(sessions=6, steps=8 if LONG else 3)
"""Six sessions in random order: with two replicas three on each, whose pool has places for two."""

CAPACITY = 2
OPTIONS = {"host_budget": "1GiB", "http": True, "show_ids": True, "resume_s": 60.0}


def crowd(server):
    """The actions of each step of a crowd's robots, which come in random order."""
    clients = [CrowdRobot(server, CROWD, number) for number in range(CROWD.sessions)]
    found = {key: np.asarray(CROWD.run(clients[key[0]], key)).tobytes() for key in CROWD.order()}
    for client in clients:
        client.robot.hang_up()
    return found


def robots(server):
    """Robots that name their sessions, one of which comes back by its name, and two that name none."""
    named = [server.robot(f"named-{number}", seed=number) for number in range(3)]
    nameless = [server.robot(seed=7), server.robot(seed=8)]
    found = {}
    for step in range(4):
        if step == 2:
            named[1].connect()
        for number, robot in enumerate((*named, *nameless)):
            found[f"robot {number}", step] = robot.step().tobytes()
    for robot in (*named, *nameless):
        robot.hang_up()
    return found


def rollouts(server):
    """Roll-outs over HTTP, one of which is reset, and takes a step outside of its context."""
    found = {}
    several = [server.rollout(seed=number) for number in range(3)]
    for step in range(4):
        if step == 2:
            several[0].reset()
        for number, rollout in enumerate(several):
            in_context = (number, step) != (1, 3)
            status, answer = rollout.step(in_context=in_context)
            assert status == 200, answer
            assert answer["error"] is None, answer
            found[f"rollout {number}", step] = answer["next_observation"]["video_latent"]
    for rollout in several:
        rollout.close()
    return found


def everybody(server, *, managed=True):
    """All of these, one after the other; ``managed`` where the plugin is there to end what they leave."""
    found = {}
    for clients in (robots, rollouts, crowd):
        found |= clients(server)
        if managed:
            close_all(server)
    return found


def wrong(reference, found):
    """Of the same steps those whose outputs are not the same."""
    assert reference.keys() == found.keys()
    return [key for key in reference if reference[key] != found[key]]


def sessions(server):
    """By their ids where the sessions are: the numbers of their replicas."""
    status, answer = server.http("GET", "/v1/session_state/sessions")
    assert status == 200, answer
    return {row["session"]: row["replicas"] for row in answer["sessions"]}


def close_all(server):
    """End what is kept for somebody to resume it, and wait until everything has arrived."""
    while left := sessions(server):
        for session in left:
            server.http("POST", f"/v1/session_state/sessions/{session}/close")


def counted(server, name, **labels):
    """One figure of the plugin's metrics."""
    status, text = server.http("GET", "/metrics")
    assert status == 200
    (value,) = (
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"{PREFIX}{name}" and sample.labels == labels
    )
    return value


def said(server, words):
    """Lines of the server's log with these words."""
    return [line for line in server.log.read_text(errors="replace").splitlines() if words in line]

"""A pool for three through the real engine and a worker process, and through a real server with robots."""

import concurrent.futures

import numpy as np
import pytest
from profiles import LONG

pytestmark = [
    pytest.mark.host,
    pytest.mark.skipif(not LONG, reason="two replicas, of the homes, serve robots from a disk: long run"),
]

ROOM = 3
OPTIONS = {"host_budget": "64GiB"}


def nothing_left(answer):
    """Sessions, bytes and blocks, of every rank."""
    for rank in answer["ranks"]:
        for name in ("sessions", "parked_sessions", "total_nbytes", "staged_nbytes"):
            assert rank[name] == 0, name
        assert (rank["kv"]["sessions"], rank["kv"]["free"]) == (0, rank["kv"]["blocks"])


def served_all(answer, sessions):
    """The same of every rank: a pool for three, and nobody lost."""
    assert answer["agree"]
    for rank in answer["ranks"]:
        assert rank["kv"]["sessions"] == ROOM
        assert rank["parked_sessions"] == sessions - ROOM
        assert rank["restores"] >= sessions
        assert not [name for name in rank if name.startswith("lost:")]


def test_sessions_of_an_engine_with_a_worker_process_are_each_as_if_alone(
    crowd, alone, dreamzero_checkpoint, tmp_path
):
    from omni_tiny.crowd import differing
    from omni_tiny.omni_runs import OmniDreamZero, write_deploy

    deploy = write_deploy(
        tmp_path / "deploy.yaml", dreamzero_checkpoint, flag=True, model_config={"session_state": OPTIONS}
    )
    with OmniDreamZero(dreamzero_checkpoint, deploy, capacity=ROOM) as omni:
        outputs = {key: crowd.run(omni, key) for key in crowd.order()}
        assert differing(alone, outputs) == []
        assert len(outputs) == crowd.sessions * crowd.steps
        served_all(omni.call("session_state_stats"), crowd.sessions)
        for session in crowd.names:
            omni.close(session)
        nothing_left(omni.call("session_state_stats"))


def live(client, crowd):
    """The actions of every step, each sent as soon as the last one is answered."""
    keys = [(client.number, step) for step in range(crowd.steps)]
    return {key: np.asarray(crowd.run(client, key)) for key in keys}


def test_robots_of_a_server_are_each_as_if_alone(crowd, alone, dreamzero_checkpoint, tmp_path):
    from omni_tiny.serve import Server
    from omni_tiny.served_clients import CrowdRobot
    from omni_tiny.ways_to_end import clear, left_in_the_end

    options = {"disk": {"path": str(tmp_path / "parked"), "budget": "16GiB"}}
    settings = {"session_state": options, "capacity": ROOM, "idle_timeout_s": 120.0}
    with Server(dreamzero_checkpoint, tmp_path, **settings) as server:
        clear(server)
        clients = [CrowdRobot(server, crowd, number) for number in range(crowd.sessions)]
        with concurrent.futures.ThreadPoolExecutor(crowd.sessions) as pool:
            lives = list(pool.map(lambda client: live(client, crowd), clients))
        actions = {key: value for life in lives for key, value in life.items()}
        assert len(actions) == crowd.sessions * crowd.steps
        wrong = [key for key, found in actions.items() if alone[key].actions.tobytes() != found.tobytes()]
        assert wrong == []
        answer = server.call("session_state_stats")
        served_all(answer, crowd.sessions)
        assert all(rank["restores_ahead"] for rank in answer["ranks"]), "files are read behind other steps"
        for client in clients:
            client.robot.hang_up()
        left_in_the_end(server)
        nothing_left(server.call("session_state_stats"))

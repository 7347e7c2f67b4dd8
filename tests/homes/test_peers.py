"""vLLM-Omni's own client of a replica whose process is gone: nothing that is sent to it waits."""

import threading
import time
from types import SimpleNamespace

import pytest

from vllm_omni_session_state.omni.replicas.peers import make_careful

pytestmark = pytest.mark.host


@pytest.fixture
def client(tmp_path):
    """vLLM-Omni's client of a process that it does not have; ``lives`` says whether it is there."""
    from vllm_omni.diffusion.stage_diffusion_client import StageDiffusionClient

    names = ("stage_id", "replica_id", "final_output", "final_output_type", "model_stage")
    more = ("default_sampling_params", "prompt_transform_func", "prompt_expand_func")
    metadata = SimpleNamespace(**dict.fromkeys((*names, *more)))
    made = StageDiffusionClient(metadata, f"ipc://{tmp_path}/requests", f"ipc://{tmp_path}/responses")
    made.lives = True
    process = SimpleNamespace(is_alive=lambda: made.lives, exitcode=-9)
    made.ended, made.ends = threading.Event(), threading.Event()

    def shutdown(timeout):
        made.ends.wait(300)
        made.lives = False
        made.ended.set()

    made._proc_manager = SimpleNamespace(proc=process, shutdown=shutdown)
    yield made
    for socket in (made._request_socket, made._response_socket):
        if not socket.closed:
            socket.close(linger=0)


def test_the_farewell_to_a_dead_process_returns(client):
    make_careful(client)
    client.lives = False
    thread = threading.Thread(target=client.shutdown, daemon=True)
    thread.start()
    thread.join(300)
    assert not thread.is_alive()


@pytest.mark.parametrize("dead", [True, False])
def test_only_the_end_of_a_dead_process_is_waited_for_apart(client, tmp_path, dead):
    """Its worker has died, and the process around it takes its time."""
    import zmq

    make_careful(client)
    client._engine_dead = dead
    with zmq.Context() as context, context.socket(zmq.PULL) as peer:
        peer.connect(f"ipc://{tmp_path}/requests")
        thread = threading.Thread(target=client.shutdown, daemon=True)
        thread.start()
        thread.join(300 if dead else 0.3)
        assert thread.is_alive() != dead
        assert not client.ended.is_set()
        client.ends.set()
        assert client.ended.wait(300)
        thread.join(300)


def test_on_the_host_alone_it_waits_for_somebody_to_come(client, tmp_path):
    import zmq

    client.lives = False
    thread = threading.Thread(target=client.shutdown, daemon=True)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    with zmq.Context() as context, context.socket(zmq.PULL) as peer:
        peer.connect(f"ipc://{tmp_path}/requests")
        thread.join(300)
        assert not thread.is_alive()


def test_what_is_sent_waits_for_a_process_that_lives(client, tmp_path):
    import zmq

    make_careful(client)
    make_careful(client)  # once
    sent = threading.Thread(target=client._request_socket.send, args=(b"hello",), daemon=True)
    sent.start()
    time.sleep(0.25)
    assert sent.is_alive()
    with zmq.Context() as context, context.socket(zmq.PULL) as peer:
        peer.connect(f"ipc://{tmp_path}/requests")
        assert peer.poll(300_000)
        assert peer.recv() == b"hello"
        sent.join(300)
        assert not sent.is_alive()
        client._request_socket.send(b"again")
        assert peer.poll(300_000)


def test_a_client_without_a_process_is_left_as_it_is():
    inline = SimpleNamespace(_engine=None)
    make_careful(inline)
    assert vars(inline) == {"_engine": None}
    remote = SimpleNamespace(_request_socket=object(), _proc_manager=None)
    before = dict(vars(remote))
    make_careful(remote)
    assert vars(remote) == before

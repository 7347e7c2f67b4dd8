"""Clients of every kind on two replicas and on three, served or in one process: outputs as on one replica."""

import numpy as np
import pytest
from profiles import LONG
from workload import CAPACITY, CROWD, OPTIONS, close_all, everybody, wrong

pytestmark = [
    pytest.mark.host,
    pytest.mark.slow,
    pytest.mark.skipif(not LONG, reason="five more starts of vLLM-Omni: part of the long run"),
]

HARNESS = "omni_tiny,omni_tiny_cpu"
"""What vLLM-Omni is told to load where the plugin is to be left out."""


@pytest.fixture(scope="module")
def serve(dreamzero_checkpoint, tmp_path_factory):
    from omni_tiny.serve import Server

    def found(replicas, **settings):
        """What everybody gets of a server with so many replicas."""
        folder = tmp_path_factory.mktemp(f"replicas-{replicas}")
        settings = {"session_state": OPTIONS, "capacity": CAPACITY, "idle_timeout_s": 120.0, **settings}
        with Server(dreamzero_checkpoint, folder, replicas=replicas, **settings) as server:
            managed = settings.get("flag", True)
            if managed:
                close_all(server)
            return everybody(server, managed=managed)

    return found


@pytest.fixture(scope="module")
def one(serve):
    """What everybody gets of one replica."""
    return serve(1)


@pytest.mark.parametrize("replicas", [2, 3])
def test_robots_and_roll_outs_get_what_they_get_of_one_replica(serve, one, replicas):
    found = serve(replicas)
    print(f"{replicas} replicas: {len(wrong(one, found))} of {len(found)} outputs wrong")
    assert wrong(one, found) == []


def test_without_the_plugin_they_do_not(serve, one):
    """Else the above would show nothing. There is room for all: vLLM-Omni alone loses the others."""
    found = serve(2, flag=False, capacity=16, session_state=None, environ={"VLLM_PLUGINS": HARNESS})
    print(f"two replicas without the plugin: {len(wrong(one, found))} of {len(found)} outputs wrong")
    assert len(wrong(one, found)) > len(found) // 4


class Ticks:
    """A model whose every step goes by the tick protocol."""

    def __init__(self, omni):
        self._omni = omni
        self._steps = {}

    def step(self, session, *, rng, prompt, frames):
        from omni_tiny import robot
        from omni_tiny.inproc import Step
        from vllm_omni.experimental.ar_diffusion.tick_protocol import ARDiffusionTickRequest

        number = self._steps[session] = self._steps.get(session, -1) + 1
        seen = robot.observation(rng, session=session, prompt=prompt, frames=frames)
        parameters = robot.sampling_params(seen)
        last = number == CROWD.steps - 1
        tick = ARDiffusionTickRequest(session, f"{session}-{number}", number, close_session=last)
        parameters.extra_args.update(tick.to_extra_args())
        (output,) = self._omni.omni.generate(prompt, [parameters], use_tqdm=False)
        (video,) = output.images
        return Step(actions=np.asarray(output.multimodal_output["actions"]), video=video)


def test_generate_and_the_tick_protocol_get_each_output_as_if_alone(dreamzero_checkpoint, tmp_path):
    """In a process that is no API server; those that end by their last tick leave nothing in the table."""
    from omni_tiny.crowd import differing
    from omni_tiny.omni_runs import OmniDreamZero, write_deploy

    from vllm_omni_session_state.omni.replicas import pools

    options = {"session_state": {"host_budget": "1GiB"}}
    deploy = write_deploy(
        tmp_path / "deploy.yaml", dreamzero_checkpoint, flag=True, model_config=options, replicas=2
    )
    alone = CROWD.alone(dreamzero_checkpoint)
    with OmniDreamZero(dreamzero_checkpoint, deploy, capacity=CAPACITY) as omni:
        homes = pools.affinity_of(omni.omni.engine.stage_pools[0]).homes
        outputs = {key: CROWD.run(omni, key) for key in CROWD.order()}
        print(f"Omni.generate: {len(differing(alone, outputs))} of {len(outputs)} outputs wrong")
        assert differing(alone, outputs) == []
        assert len(homes) == CROWD.sessions
        for number, session in enumerate(CROWD.names):
            omni.step(session, rng=np.random.default_rng(number), close=True)
        settle(homes)
        ticks = Ticks(omni)
        outputs = {key: CROWD.run(ticks, key) for key in CROWD.order()}
        print(f"tick protocol: {len(differing(alone, outputs))} of {len(outputs)} outputs wrong")
        assert differing(alone, outputs) == []
        settle(homes)
        for answer in omni.omni.engine.collective_rpc("session_state_stats", timeout=60, stage_ids=[0]):
            assert answer[0]["ranks"][0]["sessions"] <= 1  # "default", which a model makes while it is loaded


def settle(homes, within_s=30.0):
    """Wait until nobody has a home."""
    import time

    deadline = time.monotonic() + within_s
    while len(homes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(homes) == 0

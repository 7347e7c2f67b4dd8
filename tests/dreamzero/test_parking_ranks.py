"""Budgets with two ranks of a real gloo group: a served DreamZero, and a fault on one of them."""

import numpy as np
import pytest
from profiles import LONG

from vllm_omni_session_state.config import ENV_FLAG

pytestmark = pytest.mark.host

SESSIONS = [f"robot-{number}" for number in range(12 if LONG else 5)]
ROUNDS = 4 if LONG else 3


def outputs(omni, order):
    """Every step's output: its observation depends on the session and the round alone."""
    out = {}
    for round_ in range(ROUNDS):
        for session in order(SESSIONS):
            rng = np.random.default_rng([SESSIONS.index(session), round_])
            out[session, round_] = omni.step(session, rng=rng, frames=1 if round_ == 0 else 4)
    return out


@pytest.fixture(scope="module")
def expected(dreamzero_checkpoint, tmp_path_factory):
    """What two ranks say on the host's own path, with room for all."""
    from omni_tiny.inproc import environment
    from omni_tiny.omni_runs import OmniDreamZero, write_deploy

    deploy = tmp_path_factory.mktemp("ranks") / "deploy.yaml"
    write_deploy(deploy, dreamzero_checkpoint, cfg_parallel_size=2)
    with (
        environment(ENV_FLAG, "0"),
        OmniDreamZero(dreamzero_checkpoint, deploy, capacity=len(SESSIONS)) as omni,
    ):
        return outputs(omni, list)


@pytest.mark.parametrize(
    "bound",
    [
        "engine's pool",
        pytest.param(
            "device budget",
            marks=pytest.mark.skipif(not LONG, reason="two more ranks: part of the long run"),
        ),
    ],
)
def test_two_ranks_of_a_served_dreamzero_park_together_and_every_output_is_equal(
    expected, dreamzero_checkpoint, tmp_path, bound
):
    """With a device budget for two sessions, or room in the engine's pool for two."""
    from omni_tiny.omni_runs import OmniDreamZero, write_deploy
    from omni_tiny.tiny import MODEL_OWNED_BYTES

    options = {"host_budget": "1GiB"}
    if bound == "device budget":
        options["device_budget"] = 2 * MODEL_OWNED_BYTES
    deploy = write_deploy(
        tmp_path / "deploy.yaml",
        dreamzero_checkpoint,
        flag=True,
        cfg_parallel_size=2,
        model_config={"session_state": options},
    )
    capacity = len(SESSIONS) if bound == "device budget" else 2
    with OmniDreamZero(dreamzero_checkpoint, deploy, capacity=capacity) as omni:
        found = outputs(omni, np.random.default_rng(0).permutation)
        answer = omni.call("session_state_stats")
        parked = omni.call("session_state_park", SESSIONS[0], "nobody")
        closed = omni.call("session_state_close", *SESSIONS)
        left = omni.call("session_state_stats")
    assert [key for key, step in expected.items() if not step.equals(found[key])] == []
    assert answer["agree"]
    for rank in answer["ranks"]:
        assert rank["parked_sessions"] == len(SESSIONS) - 2
        assert rank["kv"]["sessions"] == 2, "a session is parked whole"
        assert rank["restores"] >= ROUNDS
        assert not [name for name in rank if name.startswith("lost:")]
    assert [rank["parked"] for rank in parked["ranks"]] == [[True, False]] * 2
    assert closed["agree"]
    for rank in left["ranks"]:
        assert rank["total_nbytes"] == 0
        assert rank["kv"] == {"sessions": 0, "blocks": rank["kv"]["blocks"], "free": rank["kv"]["blocks"]}


def in_rank(rank, checkpoint):
    """Sessions of other sizes on each rank, and a tier that fails on rank 1: what each sees."""
    import torch
    from omni_tiny.cosmos3 import TinyCosmos3

    from vllm_omni_session_state.errors import SessionRestoreFailedError
    from vllm_omni_session_state.manager import SessionStateManager
    from vllm_omni_session_state.omni import ranks
    from vllm_omni_session_state.session import Declaration
    from vllm_omni_session_state.tiers.host import HostTier

    class FailsOnRankOne(HostTier):
        failing = False

        def get(self, parcel):
            if rank == 1 and self.failing:
                raise OSError(5, "Input/output error")
            return super().get(parcel)

    with TinyCosmos3(checkpoint, flag=False, cfg_parallel_size=2):  # it makes the host's groups
        tier = FailsOnRankOne(budget=10_000)
        manager = SessionStateManager(
            device_budget=2000,
            tier=tier,
            declaration=Declaration(device_nbytes=1000, host_fields=frozenset()),
            exchange=ranks.exchange(),
        )
        seen = []
        for key in "abcabc":
            with manager.lease(key) as session:
                session.attrs.setdefault("x", torch.full((4 + 90 * rank,), ord(key), dtype=torch.uint8))
        seen.append([key for key in "abc" if manager.peek(key).parked])
        tier.failing = True
        try:
            with manager.lease("a"):
                seen.append("used")
        except SessionRestoreFailedError as error:
            seen.append(str(error))
        tier.failing = False
        with manager.lease("a") as session:
            seen.append(int(session.attrs["x"][0]))
        seen.append([key for key in "abc" if manager.peek(key).parked])
        manager.check()
        torch.distributed.barrier()
    return seen, manager.stats()["total_nbytes"]


def test_a_fault_on_one_of_two_gloo_ranks_is_the_same_error_on_both_and_nobody_waits(tmp_path):
    from omni_tiny.checkpoint.cosmos3 import write_cosmos3
    from omni_tiny.ranks import run_in_ranks

    checkpoint = write_cosmos3(tmp_path / "regular", variant="regular")
    (first, first_nbytes), (second, second_nbytes) = run_in_ranks(in_rank, checkpoint, limit_s=240)
    assert first == second
    assert first_nbytes != second_nbytes, "and their own bytes are others"
    parked, error, value, parked_then = first
    assert parked == ["a"]
    assert "stays parked: rank 1: OSError: [Errno 5] Input/output error" in error
    assert value == ord("a")
    assert parked_then == ["b"]

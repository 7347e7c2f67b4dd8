"""Budgets with two ranks of a real gloo group: a served DreamZero, and a fault on one of them."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from profiles import LONG

from vllm_omni_session_state.base.ids import DEFAULT, redacted_id
from vllm_omni_session_state.base.settings import ENV_FLAG
from vllm_omni_session_state.omni.stats_file.place import WorkerFile

pytestmark = pytest.mark.host

SESSIONS = [f"robot-{number}" for number in range(12 if LONG else 5)]
STEPS = 200 if LONG else 15


def outputs(omni):
    """Every step's output: its observation depends on the session and its own step alone."""
    rng, out = np.random.default_rng(0), {}
    turns = [*rng.permutation(SESSIONS), *rng.choice(SESSIONS, STEPS - len(SESSIONS))]
    for session in map(str, turns):
        number = sum(name == session for name, _ in out)
        rng = np.random.default_rng([SESSIONS.index(session), number])
        out[session, number] = omni.step(session, rng=rng, frames=4 if number else 1)
    return out


@pytest.fixture(scope="module")
def expected(dreamzero_checkpoint, tmp_path_factory):
    """What vLLM-Omni's own path says with room for all: on two ranks, or on one in the short run."""
    from omni_tiny.inproc import TinyDreamZero, environment
    from omni_tiny.omni_runs import OmniDreamZero, write_deploy

    if not LONG:
        with TinyDreamZero(dreamzero_checkpoint, flag=False, capacity=len(SESSIONS)) as model:
            return outputs(model)
    deploy = tmp_path_factory.mktemp("ranks") / "deploy.yaml"
    write_deploy(deploy, dreamzero_checkpoint, cfg_parallel_size=2)
    with (
        environment(ENV_FLAG, "0"),
        OmniDreamZero(dreamzero_checkpoint, deploy, capacity=len(SESSIONS)) as omni,
    ):
        return outputs(omni)


@contextlib.contextmanager
def served(checkpoint, folder, *, less=0, capacity, **options):
    """Two worker processes, the second of which has so many bytes less."""
    from omni_tiny.capacity import LESS_BYTES_VARIABLE
    from omni_tiny.inproc import environment
    from omni_tiny.omni_runs import OmniDreamZero, write_deploy

    deploy = write_deploy(
        folder / "deploy.yaml",
        checkpoint,
        flag=True,
        cfg_parallel_size=2,
        model_config={"session_state": {"host_budget": "1GiB", **options}},
    )
    with (
        environment(f"{LESS_BYTES_VARIABLE}1", str(less)),
        OmniDreamZero(checkpoint, deploy, capacity=capacity) as omni,
    ):
        yield omni


@pytest.fixture(scope="module")
def omni(expected, dreamzero_checkpoint, tmp_path_factory):
    """Pools that have room for three sessions and for two; after what is expected, whose pools are equal."""
    from omni_tiny.capacity import free_bytes

    less = free_bytes(3) - free_bytes(2)
    with served(dreamzero_checkpoint, tmp_path_factory.mktemp("served"), capacity=3, less=less) as omni:
        yield omni


def park_together(omni, expected):
    """Every output is equal, and both ranks have room for two sessions at once."""
    found = outputs(omni)
    answer = omni.call("session_state_stats")
    parked = omni.call("session_state_park", SESSIONS[0], "nobody")
    closed = omni.call("session_state_close", *SESSIONS)
    left = omni.call("session_state_stats")
    assert [key for key, step in expected.items() if not step.equals(found[key])] == []
    assert answer["agree"]
    for rank in answer["ranks"]:
        assert rank["parked_sessions"] == len(SESSIONS) - 2
        assert rank["kv"]["sessions"] == 2, "a session is parked whole"
        assert rank["restores"] > STEPS // 8
        assert not [name for name in rank if name.startswith("lost:")]
    assert [rank["parked"] for rank in parked["ranks"]] == [[True, False]] * 2
    assert closed["agree"]
    for rank in left["ranks"]:
        assert rank["total_nbytes"] == 0
        assert rank["kv"] == {"sessions": 0, "blocks": rank["kv"]["blocks"], "free": rank["kv"]["blocks"]}


def test_two_ranks_of_a_served_dreamzero_with_unequal_pools_park_together(omni, expected):
    park_together(omni, expected)


@pytest.mark.skipif(not LONG, reason="two more ranks: part of the long run")
def test_two_ranks_of_a_served_dreamzero_with_a_device_budget_park_together(
    expected, dreamzero_checkpoint, tmp_path
):
    from omni_tiny.tiny import MODEL_OWNED_BYTES

    options = {"capacity": len(SESSIONS), "device_budget": 2 * MODEL_OWNED_BYTES}
    with served(dreamzero_checkpoint, tmp_path, **options) as omni:
        park_together(omni, expected)


def test_two_ranks_of_a_served_dreamzero_list_park_restore_and_close_together(omni):
    """By the engine's own remote call. The last one with this engine, which it stops."""
    rng = np.random.default_rng(0)
    for session in ("a", "b"):
        omni.step(session, rng=rng, frames=1)
    omni.call("session_state_close", DEFAULT)
    files = [WorkerFile(rank["file"]) for rank in omni.call("session_state_figures")["ranks"]]
    listed = omni.call("session_state_list")
    parked = [omni.call("session_state_park", "a"), omni.call("session_state_list")]
    restored = [omni.call("session_state_restore", "a", "b"), omni.call("session_state_list")]
    closed = omni.call("session_state_close", "a")
    omni.step("b", rng=rng)
    stats = omni.call("session_state_stats")
    assert all(file.alive for file in files)
    written = [file.read(rows=True) for file in files]
    omni.shutdown()
    assert not any(file.alive for file in files)
    assert not any(Path(file.path).exists() for file in files)
    assert listed["agree"]
    assert [len(rank["sessions"]) for rank in listed["ranks"]] == [2, 2]
    for (done, then), what, places in (
        (parked, "parked", {"host", "device"}),
        (restored, "restored", {"device"}),
    ):
        assert done["agree"]
        assert all(all(rank[what]) for rank in done["ranks"])
        assert then["agree"]
        for rank in then["ranks"]:
            assert {entry["place"] for entry in rank["sessions"]} == places
    assert closed["agree"]
    assert [rank["found"] for rank in closed["ranks"]] == [[True], [True]]
    assert stats["agree"]
    assert [rank["sessions"] for rank in stats["ranks"]] == [1, 1]
    assert [rank["kv"]["sessions"] for rank in stats["ranks"]] == [1, 1]
    assert stats["ranks"][0]["pid"] != stats["ranks"][1]["pid"]
    assert written[0].steps == written[1].steps, "what they must agree in, after each of the last steps"
    for found, rank in zip(written, stats["ranks"], strict=True):
        assert {name: found.figures[name] for name in rank.keys() - {"rank", "ok"}} == {
            name: value for name, value in rank.items() if name not in ("rank", "ok")
        }
        (row,) = found.rows
        assert (row.session, row.place, row.used) == (redacted_id("b"), "device", False)
        assert sum(row.nbytes.values()) == rank["total_nbytes"]


def in_rank(rank, checkpoint, steps):
    """The plugin's random steps, then faults of one rank: what each sees of them."""
    import torch
    from omni_tiny.inproc import TinyDreamZero
    from omni_tiny.tiny import MODEL_OWNED_BYTES
    from vllm_omni.diffusion.worker.diffusion_worker import get_world_group

    from benchmarks.two_ranks import serve, unequal_pools
    from vllm_omni_session_state.base.errors import SessionRestoreFailedError

    seen = {"served": serve(rank, checkpoint, steps)}
    options = {"session_state": {"host_budget": "1GiB", "device_budget": MODEL_OWNED_BYTES}}
    unequal_pools(3, 1)  # on rank 1 the device budget leaves too little for one session
    with TinyDreamZero(checkpoint, flag=True, capacity=3, exact=False, model_config=options) as model:
        group = get_world_group().cpu_group
        seen["timeout"] = str(group._get_backend(torch.device("cpu")).options._timeout)
        cache, manager = model.runner.kv_cache, model.pipeline._memory_manager
        seen["fallen back"] = cache.session_capacity, cache.model_owned_state_bytes_per_session > 0
        seen["agreed"] = model.capacity, manager.capacity.pool.places

        def step(session):
            try:
                return model.step(session, rng=np.random.default_rng(0), frames=1).video.sum().item()
            except SessionRestoreFailedError as error:
                return str(error)

        for session in "ab":
            step(session)
        host, exact = manager.offloader.host, manager.offloader.host.get

        def get(parcel):
            raise OSError(5, "Input/output error")

        host.get = get if rank == 1 else exact
        seen["fault"] = step("a"), manager.peek("a").parked, manager.peek("b").parked
        host.get = exact
        seen["mended"] = step("a"), manager.peek("a").parked, manager.peek("b").parked
        if rank == 1:
            model.runner._release_session("a", reset_model=False, reason="forward_exception")
        seen["lost on one"] = step("a")
        seen["there"] = sorted(manager.keys())
        seen["others"] = step("b")
        model.close("a")
        seen["anew"] = step("a")
        manager.check()
        torch.distributed.barrier()
    return seen


def test_two_gloo_ranks_with_unequal_pools_serve_alike_and_a_fault_of_one_is_the_same_error_on_both(
    dreamzero_checkpoint, capsys
):
    from omni_tiny.ranks import run_in_ranks

    from benchmarks.measure import Spread
    from benchmarks.two_ranks import shares

    steps = 200 if LONG else 16
    first, second = run_in_ranks(in_rank, str(dreamzero_checkpoint), steps, limit_s=3600)
    served = first.pop("served"), second.pop("served")
    for rank in served:
        assert rank["wrong"] == []
        assert rank["places"] == 2, "of 3 and 2"
        assert rank["stats"]["restores"] > steps // 8
    share = Spread.of([each for rank in served for each in shares(rank)])
    with capsys.disabled():
        print(
            f" a message takes {share.median:.2%} of a tiny step ({share.low:.2%} to {share.high:.2%}) ",
            end="",
        )
    assert (first.pop("fallen back"), second.pop("fallen back")) == ((3, True), (1, True)), (
        "vLLM-Omni's own plan"
    )
    assert (first.pop("there"), second.pop("there")) == (["a", "b"], ["b"]), "the other rank has it"
    assert first == second
    assert first["timeout"] == "0:30:00", "as the page on budgets says"
    assert first["agreed"] == (1, 1)
    error, *parked = first["fault"]
    assert "stays where it is: rank 1: OSError: [Errno 5] Input/output error" in error
    assert parked == [True, True], "it made its place, and came back to none"
    assert first["mended"][1:] == (False, True)
    assert (
        "(rank 0: device, rank 1: lost (forward_exception), of 1 sessions 1 are parked"
        in first["lost on one"]
    )

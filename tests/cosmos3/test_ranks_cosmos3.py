"""Two ranks of a real gloo group, started once: Cosmos3's outputs, and what workers answer by name."""

from __future__ import annotations

import pytest
import torch
from kinds import equal
from omni_tiny.cosmos3 import TinyCosmos3
from omni_tiny.ranks import run_in_ranks

from vllm_omni_session_state.base.ids import redacted_id

pytestmark = pytest.mark.host

KINDS = ("t2v", "i2v", "v2v", "t2i", "transfer")


def generate_in_rank(checkpoint):
    """Generate each kind with the flag off and on, in one rank of two."""
    outputs = {}
    for flag in (False, True):
        with TinyCosmos3(checkpoint, cfg_parallel_size=2, flag=flag) as tiny:
            outputs |= {(flag, kind): tiny.generate("a", kind=kind) for kind in KINDS}
            if flag:
                manager = tiny.pipeline._memory_manager
                manager.check()
                assert manager.stats()["misses"] > 0
                assert manager.stats()["total_nbytes"] == len(manager) == 0
                assert tiny.pipeline.transformer.cached_kv is None
    return outputs


def answer_in_rank(rank, checkpoint):
    """Two sessions on each rank of a real group; what each call answers there, and what is left."""
    with TinyCosmos3(checkpoint, flag=True, cfg_parallel_size=2) as model:
        from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker

        worker = DiffusionWorker.__new__(DiffusionWorker)
        worker.model_runner = model.runner
        manager = model.pipeline._memory_manager
        for key in ("a", "b", "c"):
            manager.get_or_create_session(key).attrs["x"] = torch.zeros(8)
        said = {"list": worker.session_state_list()}
        said["close"] = worker.session_state_close(redacted_id("a"))
        if rank == 1:
            manager.drop_session("c")
        said["one has less"] = worker.session_state_stats()
        said["one has it"] = worker.session_state_close("c")
        host = manager.drop_session
        if rank == 1:
            manager.drop_session = None  # whoever calls it fails
        said["one fails"] = worker.session_state_close("b")
        manager.drop_session = host
        for key in ("d", "e"):
            manager.get_or_create_session(key)
        if rank == 0:
            manager.drop_session = lambda key: host(key) if key != "d" else 1 / 0
        said["one fails for one"] = worker.session_state_close("d", "e")
        manager.drop_session = host
        said["left"] = list(manager.keys())
        torch.distributed.barrier()
        if rank == 1:
            return said  # and leave the group
        with pytest.raises(RuntimeError):
            worker.session_state_stats()
    return said


def in_rank(rank, checkpoint):
    """One rank of two; the second one leaves the group at the end of its answers."""
    return generate_in_rank(checkpoint), answer_in_rank(rank, checkpoint)


@pytest.fixture(scope="module")
def seen(cosmos3_checkpoint):
    """Of each rank its outputs, and the answers."""
    return run_in_ranks(in_rank, cosmos3_checkpoint("regular"))


def test_two_ranks_of_guidance_equal_one_with_the_flag_off_and_on(seen, tiny_cosmos3):
    off = tiny_cosmos3("regular")
    alone = {kind: off.generate("a", kind=kind) for kind in KINDS}
    for outputs, _ in seen:
        assert len(outputs) == 2 * len(KINDS)
        assert all(equal(output, alone[kind]) for (_, kind), output in outputs.items())


def test_two_ranks_answer_together_and_neither_waits_for_one_that_failed_or_is_gone(seen):
    first, second = (answers for _, answers in seen)
    for name in first.keys() - {"left"}:
        assert first[name] == second[name], name  # every rank has all answers
        assert [rank["rank"] for rank in first[name]["ranks"]] == [0, 1]
    listed = first["list"]
    assert listed["agree"]
    for rank in listed["ranks"]:
        assert [entry["session"] for entry in rank["sessions"]] == [redacted_id(key) for key in "abc"]
    assert first["close"]["agree"]
    assert [rank["found"] for rank in first["close"]["ranks"]] == [[True], [True]]
    assert not first["one has less"]["agree"]
    assert [rank["sessions"] for rank in first["one has less"]["ranks"]] == [2, 1]
    assert not first["one has it"]["agree"]
    assert [rank["found"] for rank in first["one has it"]["ranks"]] == [[True], [False]]
    assert not first["one fails"]["agree"]
    assert [rank["ok"] for rank in first["one fails"]["ranks"]] == [True, False]
    assert "TypeError" in first["one fails"]["ranks"][1]["error"]
    ranks = first["one fails for one"]["ranks"]
    assert [rank["found"] for rank in ranks] == [[True, True]] * 2
    assert [[wrong is not None for wrong in rank["errors"]] for rank in ranks] == [
        [True, False],
        [False, False],
    ]
    assert (first["left"], second["left"]) == (["d"], ["b"])

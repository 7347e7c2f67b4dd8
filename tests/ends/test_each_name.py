"""A call about several sessions says of each what came of it: worker calls without a host, over one rank."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from vllm_omni_session_state.base import log
from vllm_omni_session_state.base.ids import redacted_id, show_in_the_clear
from vllm_omni_session_state.manager.manager import SessionStateManager
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.omni.worker import rpc


class Runner:
    """Ends sessions by itself, as an AR-Diffusion runner does; fails for those that it is told."""

    def __init__(self, manager):
        self.pipeline = SimpleNamespace(_memory_manager=manager)
        self.fails = {}
        self.ended = []

    def close_session(self, key):
        if key in self.fails:
            raise self.fails[key]
        self.ended.append(key)

    reset_session = close_session


@pytest.fixture
def worker(monkeypatch):
    """Sessions "a", "b" and "c", of which the host tier can take the last one alone."""
    monkeypatch.setattr(rpc, "_gather", lambda mine: json.loads(json.dumps([mine])))
    log.forget_said()
    manager = SessionStateManager(tier=HostTier(budget=1000))
    for key, nbytes in (("a", 4000), ("b", 4000), ("c", 4)):
        with manager.lease(key) as session:
            session.attrs["x"] = torch.zeros(nbytes, dtype=torch.uint8)
    yield SimpleNamespace(model_runner=Runner(manager))
    log.forget_said()


def manager_of(worker):
    return worker.model_runner.pipeline._memory_manager


def only(answer):
    (rank,) = answer["ranks"]
    return rank


def test_a_rank_on_which_one_was_refused_and_one_failed_has_not_just_refused(worker, monkeypatch):
    manager = manager_of(worker)
    park = manager.park
    monkeypatch.setattr(manager, "park", lambda key: park(key) if key != "c" else 1 / 0)
    assert only(rpc.park(worker, "a", "b"))["refused"]
    assert not only(rpc.park(worker, "a", "c"))["refused"]


@pytest.mark.parametrize("how", ["close", "reset"])
def test_an_end_that_fails_is_said_of_its_session_alone(worker, caplog, how):
    worker.model_runner.fails["b"] = RuntimeError("CUDA error")
    rank = only(getattr(rpc, how)(worker, "a", "b", "c", "nobody"))
    assert not rank["ok"]
    assert rank["found"] == [True, True, True, False]
    assert rank["shown"] == [*map(redacted_id, "abc"), None]
    assert rank["errors"] == [
        None,
        {"error": "RuntimeError: CUDA error", "refused": False, "ambiguous": False},
        None,
        None,
    ]
    assert (rank["error"], rank["refused"]) == ("RuntimeError: CUDA error", False)
    assert worker.model_runner.ended == ["a", "c"]
    assert manager_of(worker).keys() == ()
    (record,) = caplog.records
    assert record.exc_info, "nobody expected it"


def test_a_session_that_is_refused_a_park_is_said_alone_and_the_others_are_parked(worker):
    rank = only(rpc.park(worker, "a", "c", "nobody", "b"))
    assert rank["parked"] == [False, True, False, False]
    assert [wrong is not None for wrong in rank["errors"]] == [True, False, False, True]
    assert "raise host_budget" in rank["errors"][0]["error"]
    assert redacted_id("a") in rank["errors"][0]["error"]
    assert redacted_id("b") not in rank["errors"][0]["error"]
    assert rank["refused"]


def test_a_hundred_rounds_of_a_full_tier_are_one_line(worker, caplog):
    for _ in range(100):
        rpc.park(worker, "a", "b", "c", only_id=True)
    (record,) = caplog.records
    assert (record.levelno, record.exc_info) == (logging.WARNING, None)
    assert record.getMessage().endswith("raise host_budget")


def test_several_sessions_are_asked_for_in_one_call(worker):
    assert only(rpc.holds(worker, "a", "nobody", "c"))["found"] == [True, False, True]
    assert only(rpc.holds(worker))["found"] == []
    assert only(rpc.holds(worker, None))["found"] == [False]


def test_what_expires_and_what_does_not_is_said_of_each(worker, monkeypatch):
    manager = manager_of(worker)
    manager.park("c")
    manager.offloader.host.budget = 10_000
    manager.park("b")
    worker.model_runner.fails["b"] = OSError("no")
    rank = only(rpc.expire(worker, "a", "b", "c", "nobody"))
    assert rank["gone"] == [False, False, True, True]
    assert [wrong is not None for wrong in rank["errors"]] == [False, True, False, False]


def test_each_name_is_looked_up_once_a_call(worker, monkeypatch):
    looked = []
    find = rpc.PerName.__init__.__globals__["Names"].find

    def counted(names, name, **how):
        looked.append(name)
        return find(names, name, **how)

    monkeypatch.setattr(rpc.PerName.__init__.__globals__["Names"], "find", counted)
    for call in (rpc.holds, rpc.park, rpc.restore, rpc.begin_restore, rpc.expire, rpc.inspect, rpc.close):
        looked.clear()
        call(worker, redacted_id("c"))
        assert looked == [redacted_id("c")], call


def test_a_client_that_takes_anothers_hash_for_its_id_does_not_get_that_one_closed_nor_itself(worker):
    trap = redacted_id("a")
    manager_of(worker).get_or_create_session(trap)
    assert only(rpc.close(worker, trap))["shown"] == [redacted_id("a")]
    assert manager_of(worker).keys() == ("b", "c", trap)
    assert only(rpc.close(worker, trap, only_shown=True))["found"] == [False]
    assert only(rpc.close(worker, redacted_id(trap)))["found"] == [True]


def test_a_name_of_two_sessions_is_refused_and_nothing_is_done(worker, caplog):
    trap = redacted_id("a")
    manager_of(worker).get_or_create_session(trap)
    show_in_the_clear(True)
    try:
        rank = only(rpc.close(worker, trap, "b"))
        looked = only(rpc.inspect(worker, trap))
    finally:
        show_in_the_clear(False)
    assert rank["found"] == [False, True]
    assert rank["errors"][0]["ambiguous"]
    assert rank["refused"]
    assert manager_of(worker).keys() == ("a", "c", trap)
    assert (looked["ok"], looked["ambiguous"]) == (False, True)
    assert not [record for record in caplog.records if record.exc_info]
    assert rpc.stats(worker)["ranks"][0]["ends"] == {"close": 1, "reset": 0, "absent": 0}


def test_a_name_that_is_no_string_is_said_of_that_one(worker):
    rank = only(rpc.park(worker, 7, "c"))
    assert "session id 7 is of type int" in rank["errors"][0]["error"]
    assert rank["parked"] == [False, True]


def listed(*workers):
    """What a server lists of replicas of one rank each."""
    from vllm_omni_session_state.manager.rows import Row
    from vllm_omni_session_state.omni.admin import aggregate

    answers = {number: rpc.publish_figures(each) for number, each in enumerate(workers)}
    for answer in answers.values():
        for rank in answer["ranks"]:
            rank["rows"] = [Row(*row) for row in rank["rows"]]
    return aggregate.rows(answers)


def test_a_listing_tells_sessions_apart_that_are_shown_alike(worker, monkeypatch):
    monkeypatch.setattr(
        "vllm_omni_session_state.base.ids.fingerprint", lambda key: b"alike!" + key.encode().ljust(10)
    )
    worker.model_runner._sessions = {"c": None, "d": None}
    rows = listed(worker)
    assert [(row["session"], row["state"]) for row in rows] == [
        *[(redacted_id("a"), "idle")] * 3,
        (redacted_id("a"), "kv_only"),
    ]
    assert all(row["agree"] for row in rows)
    elsewhere = SimpleNamespace(model_runner=Runner(SessionStateManager()))
    elsewhere.model_runner._sessions = {"b": None}
    rows = listed(worker, elsewhere)
    assert [row["replicas"] for row in rows] == [[0], [0, 1], [0], [0]], "KV is known by the session's id too"
    assert (
        only(rpc.inspect(worker, "b"))["session"]["digest"]
        != only(rpc.inspect(worker, "a"))["session"]["digest"]
    )

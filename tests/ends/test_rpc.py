"""What a worker answers by name: on the host's own worker, in one rank.

Two ranks answer in the folders of the models, which start them anyway.
"""

import json

import numpy as np
import pytest

from vllm_omni_session_state.base.ids import DEFAULT, redacted_id, show_in_the_clear
from vllm_omni_session_state.manager.consensus import Ranks
from vllm_omni_session_state.manager.losses import Reason
from vllm_omni_session_state.offload.host_tier import HostTier

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def model(dreamzero_checkpoint):
    from omni_tiny.inproc import TinyDreamZero

    with TinyDreamZero(dreamzero_checkpoint, flag=True, capacity=4) as model:
        yield model


@pytest.fixture
def worker(model):
    """The worker with no session and nothing counted."""
    for session in list(model.pipeline._memory_manager.keys()):
        model.close(session)
    vars(model.worker).pop("_session_state_ends", None)
    return model.worker


def only(answer):
    """What the one rank says, having passed through the wire's format."""
    answer = json.loads(json.dumps(answer))
    assert answer["agree"]
    (rank,) = answer["ranks"]
    assert rank["ok"]
    assert rank["rank"] == 0
    return rank


def step(model, *sessions):
    for session in sessions:
        model.step(session, rng=np.random.default_rng(0), frames=1)


def test_stats_count_sessions_bytes_blocks_and_ends(model, worker):
    before = only(worker.session_state_stats())
    assert before["sessions"] == before["total_nbytes"] == before["kv"]["sessions"] == 0
    assert before["kv"]["free"] == before["kv"]["blocks"] > 0
    step(model, "a", "b")
    during = only(worker.session_state_stats())
    assert during["sessions"] == during["kv"]["sessions"] == 2
    assert during["total_nbytes"] > 0
    assert during["kv"]["free"] < during["kv"]["blocks"]
    worker.session_state_close("a", "b", "c")
    after = only(worker.session_state_stats())
    assert after["kv"] == before["kv"]
    assert after["total_nbytes"] == 0
    assert after["ends"] == {"close": 2, "reset": 0, "absent": 1}


def test_a_listing_shows_hashes_in_order_of_use_and_refreshes_nobody(model, worker):
    step(model, "a", "b", "a")
    for _ in range(2):
        listed = only(worker.session_state_list())
        assert [entry["session"] for entry in listed["sessions"]] == [redacted_id("b"), redacted_id("a")]
        assert listed["only_kv"] == []
    assert all(entry["nbytes"]["cpu"] > 0 for entry in listed["sessions"])


def test_a_session_can_be_inspected_by_its_id_and_by_its_hash(model, worker):
    step(model, "a")
    by_id, by_hash = (only(worker.session_state_inspect(name)) for name in ("a", redacted_id("a")))
    assert by_id == by_hash
    assert {value["name"] for value in by_id["session"]["values"]} >= {"call_count", "stitched_buffer"}
    assert not only(worker.session_state_inspect("b"))["found"]
    assert not only(worker.session_state_inspect(redacted_id("a"), only_id=True))["found"]


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("name_of", [str, redacted_id])
def test_an_end_frees_the_state_and_the_kv_of_that_session_alone(model, worker, how, name_of):
    step(model, "a", "b")
    assert only(getattr(worker, f"session_state_{how}")(name_of("a")))["found"] == [True]
    assert list(model.runner._sessions) == ["b"]
    assert model.pipeline._memory_manager.keys() == ("b",)
    assert only(getattr(worker, f"session_state_{how}")(name_of("a")))["found"] == [False]
    assert only(worker.session_state_stats())["ends"][how] == 1


def test_a_session_can_be_parked_by_call_and_goes_on_to_the_bit(model, worker, dreamzero_checkpoint):
    from vllm_omni_session_state.offload.host_tier import HostTier

    def steps(key):
        return [model.step(key, rng=np.random.default_rng([7, n]), frames=4 if n else 1) for n in range(4)]

    alone = steps("a")
    model.close("a")
    room = model.pipeline._memory_manager.capacity
    offloader = room.offloader
    step(model, "b")
    answer = worker.session_state_park("b")
    assert not answer["agree"]
    assert "stays on the device: there is nowhere to park it; set host_budget" in answer["ranks"][0]["error"]
    offloader.host = HostTier(budget=1 << 30)
    try:
        outputs = []
        for n in range(4):
            outputs.append(model.step("a", rng=np.random.default_rng([7, n]), frames=4 if n else 1))
            assert only(worker.session_state_park(redacted_id("a"), "nobody"))["parked"] == [True, False]
            listed = {
                entry["session"]: entry["place"] for entry in only(worker.session_state_list())["sessions"]
            }
            assert listed == {redacted_id("a"): "host", redacted_id("b"): "device"}
        assert all(mine.equals(other) for mine, other in zip(outputs, alone, strict=True))
        worker.session_state_close("a", "b")
        assert offloader.host.nbytes == 0
    finally:
        offloader.host = None


def test_a_parked_session_can_be_restored_by_call_and_one_in_use_is_told_of(model, worker):
    from vllm_omni_session_state.offload.host_tier import HostTier

    manager = model.pipeline._memory_manager
    manager.offloader.host = HostTier(budget=1 << 30)
    try:
        step(model, "a", "b")
        assert only(worker.session_state_park("a"))["shown"] == [redacted_id("a")]
        found = only(worker.session_state_restore(redacted_id("a"), "b", "nobody"))
        assert found["restored"] == [True, True, False]
        assert found["found"] == [True, True, False]
        assert manager.offloader.host.nbytes == 0
        with manager.lease("a"):
            assert only(worker.session_state_park("a")) == {
                "ok": True,
                "rank": 0,
                "found": [True],
                "used": [True],
                "shown": [redacted_id("a")],
                "parked": [False],
                "errors": [None],
            }
            for how in ("close", "reset"):
                end = getattr(worker, f"session_state_{how}")
                assert only(end("a", only_idle=True))["used"] == [True]
            stats = only(worker.session_state_stats())
            assert (stats["sessions"], stats["used_sessions"], stats["ends"]["close"]) == (2, 1, 0)
        assert stats["bounds"] == {"host": 1 << 30, "max_parked": 4096}
        assert "a" in model.runner._sessions
        worker.session_state_close("a", "b")
    finally:
        manager.offloader.host = None


def test_sessions_are_marked_stale_by_call_and_a_step_unmarks(model, worker):
    manager = model.pipeline._memory_manager
    step(model, "a", "b")
    assert not manager.capacity.eviction.clock
    assert only(worker.session_state_mark_stale())["stale"] == []
    assert manager.capacity.eviction.clock
    assert only(worker.session_state_mark_stale("a", "nobody", "b"))["stale"] == [True, False, True]
    step(model, "b")
    stale = {key for key, entry in manager._table.entries.items() if entry.stale}
    assert stale == {"a"}
    with manager.lease("a"):
        assert only(worker.session_state_mark_stale("a"))["stale"] == [False]
    assert not manager._table.entries["a"].stale


def test_only_what_is_parked_expires_with_its_kv_and_is_counted_as_lost(model, worker):
    from vllm_omni_session_state.offload.host_tier import HostTier

    manager = model.pipeline._memory_manager
    manager.offloader.host = HostTier(budget=1 << 30)
    try:
        before = manager.stats().get("lost:expired", 0)
        step(model, "a", "b")
        worker.session_state_park("a")
        assert only(worker.session_state_expire("a", "b", "nobody"))["gone"] == [True, False, True]
        assert "a" not in manager
        assert "b" in manager
        assert "a" not in model.runner._sessions
        assert manager.stats()["lost:expired"] == before + 1
        assert manager.offloader.host.nbytes == 0
        worker.session_state_close("b")
    finally:
        manager.offloader.host = None


def test_an_end_goes_the_runners_own_way(model, worker, monkeypatch):
    step(model, "a", "b")
    reasons = []
    host = model.runner._release_session

    def release(session, **how):
        reasons.append((session, how["reason"]))
        host(session, **how)

    monkeypatch.setattr(model.runner, "_release_session", release)
    worker.session_state_close("a")
    worker.session_state_reset("b")
    assert reasons == [("a", "close"), ("b", "reset")]


def test_kv_without_state_is_listed_and_ends_too(model, worker):
    model.runner._sessions["a"] = model.runner._new_session_state("a")
    assert only(worker.session_state_list())["only_kv"] == [redacted_id("a")]
    assert only(worker.session_state_holds("a"))["found"] == [False]
    assert only(worker.session_state_close(redacted_id("a")))["found"] == [True]
    assert not model.runner._sessions


def test_an_end_that_comes_by_id_never_hits_a_session_shown_like_it(model, worker):
    step(model, "a")
    assert only(worker.session_state_close(redacted_id("a"), only_id=True))["found"] == [False]
    assert "a" in model.pipeline._memory_manager


def test_who_is_there_and_who_is_lost_is_said_of_each_that_is_named(model, worker):
    step(model, "a", "b")
    model.pipeline._memory_manager.drop_session("a")
    model.pipeline._memory_manager.mark_lost("a", Reason.COUNT)
    answer = only(worker.session_state_holds("a", "b", "c", only_id=True))
    assert (answer["found"], answer["lost"]) == ([False, True, False], [True, False, False])
    worker.session_state_holds()


def test_nobody_is_the_default_session(model, worker):
    step(model, DEFAULT)
    assert only(worker.session_state_holds(None))["found"] == [True]
    assert only(worker.session_state_close(""))["found"] == [True]


def test_ids_are_listed_in_the_clear_where_that_is_asked_for(model, worker):
    step(model, "a")
    show_in_the_clear(True)
    try:
        (entry,) = only(worker.session_state_list())["sessions"]
        assert entry["session"] == "a"
        assert only(worker.session_state_inspect(redacted_id("a")))["found"]
    finally:
        show_in_the_clear(False)


def test_one_end_that_fails_does_not_keep_the_others_from_ending(model, worker, monkeypatch):
    step(model, "a", "b")
    host = model.runner.close_session

    def close_session(session):
        if session == "a":
            raise OSError("no")
        host(session)

    monkeypatch.setattr(model.runner, "close_session", close_session)
    answer = worker.session_state_close("a", "b")
    assert not answer["agree"]
    assert answer["ranks"][0]["error"] == "OSError: no"
    assert [wrong is not None for wrong in answer["ranks"][0]["errors"]] == [True, False]
    assert model.pipeline._memory_manager.keys() == ()
    monkeypatch.undo()
    model.close("a")


def test_a_worker_whose_model_keeps_its_own_state_says_so(worker, dreamzero_checkpoint):
    from omni_tiny.inproc import TinyDreamZero

    with TinyDreamZero(dreamzero_checkpoint, flag=False, capacity=1) as bespoke:
        answer = bespoke.worker.session_state_stats()
    assert not answer["agree"]
    assert "DreamZeroPipeline keeps its own session state" in answer["ranks"][0]["error"]


def test_a_restore_meets_the_other_ranks_also_for_a_name_that_nobody_has_here(model, worker, monkeypatch):
    offloader, told = model.pipeline._memory_manager.offloader, []

    def exchange(message):
        told.append(message)
        return [message, message]

    step(model, "a")
    monkeypatch.setattr(offloader, "host", HostTier(budget=1 << 30))
    monkeypatch.setattr(offloader, "ranks", Ranks(exchange))
    assert only(worker.session_state_restore("nobody", redacted_id("a"), None))["restored"] == [
        False,
        True,
        False,
    ]
    assert len(told) == 3

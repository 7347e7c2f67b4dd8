"""Figures that workers push: what the server knows of them, step by step, and of those that cannot."""

import asyncio
import errno
import os
import time
from types import SimpleNamespace

import pytest
import torch
from desk_fakes import Runner

from vllm_omni_session_state.base.ids import redacted_id, show_in_the_clear
from vllm_omni_session_state.manager.losses import Reason
from vllm_omni_session_state.manager.manager import SessionStateManager
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.omni.admin import aggregate, stats_poller, stats_source
from vllm_omni_session_state.omni.admin.stats_poller import StatsPoller
from vllm_omni_session_state.omni.replicas.calls import Asked
from vllm_omni_session_state.omni.stats_file import layout, place
from vllm_omni_session_state.omni.worker import lifecycle, publisher


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    """A place of the test's own, where nothing stays."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(place, "BASE", str(tmp_path / "shm"))
    return tmp_path / "shm"


class Rank:
    """One rank's worker, in this process: a real manager and a real file."""

    def __init__(self):
        self.manager = SessionStateManager(tier=HostTier(budget=1 << 20))
        self.worker = SimpleNamespace(model_runner=Runner(pipeline=None))
        self.ends = {"close": 0, "reset": 0, "absent": 0}

    def answer(self, number=0):
        return {"rank": number, "ok": True, **publisher.answer(self.worker, self.manager, self.ends)}

    def step(self, *keys, nbytes=100):
        for key in keys:
            with self.manager.lease(key) as session:
                session.attrs["x"] = torch.zeros(nbytes, dtype=torch.uint8)

    @property
    def publisher(self):
        return vars(self.worker)[publisher._PUBLISHER][1]


class Workers:
    """Stands where the server's `WorkerClient` does: replicas of some ranks, each asked in turn."""

    def __init__(self, *replicas):
        self.replicas = dict(enumerate(replicas))
        self.failures = []
        self.idle = True
        self.attached = None  # as where vLLM-Omni's pools cannot be reached
        self.calls = 0
        self.asked_five_times = asyncio.Event()

    async def ask(self, method):
        assert method == "session_state_figures"
        self.calls += 1
        if self.calls == 5:
            self.asked_five_times.set()
        answers = {}
        for number, ranks in self.replicas.items():
            said = [rank.answer(place) for place, rank in enumerate(ranks)]
            answers[number] = {"agree": True, "ranks": said}
        return Asked(answers, self.failures)


def known(*replicas):
    """What a server knows of these, having asked once; its workers."""
    workers = Workers(*replicas)
    made = StatsPoller(workers, asyncio.new_event_loop())
    asyncio.run(made.ask())
    return made, workers


def states(found):
    return {
        row["session"]: (row["state"], row["ranks"], row["agree"]) for row in aggregate.rows(found.answers)
    }


def test_what_a_worker_does_is_known_at_once_without_a_call():
    rank = Rank()
    rank.step("a", "b")
    made, workers = known([rank])
    assert states(made.look(rows=True)) == {redacted_id(key): ("idle", 1, True) for key in "ab"}
    rank.step("c")
    rank.manager.park("a")
    with rank.manager.lease("b"):
        found = made.look(rows=True)
        assert [row["session"] for row in aggregate.rows(found.answers)] == [
            redacted_id(key) for key in "acb"
        ]
        assert states(found)[redacted_id("b")][0] == "in_use"
    rank.manager.drop_session("c")
    rank.manager.mark_lost("c", Reason.EXPIRED)
    found = made.look(rows=True)
    assert states(found) == {redacted_id("a"): ("host", 1, True), redacted_id("b"): ("idle", 1, True)}
    (said,) = found.answers[0]["ranks"]
    stats = rank.manager.stats()
    assert {name: said[name] for name in stats} == stats
    assert said["lost:expired"] == 1
    assert said["moves"] == rank.manager.offloader.moves.figures()
    assert (said["bounds"], said["pid"], said["kv"]) == (rank.manager.capacity.bounds(), os.getpid(), None)
    assert found.age_s == 0
    assert workers.calls == 1


def test_a_step_writes_the_row_of_its_session_alone(monkeypatch):
    rank = Rank()
    rank.step(*map(str, range(50)))
    rank.answer()
    written = []
    write = layout.StatsWriter.write

    def noted(self, figures, rows, moves, **more):
        written.append((list(rows), list(moves)))
        write(self, figures, rows, moves, **more)

    monkeypatch.setattr(layout.StatsWriter, "write", noted)
    rank.step("7")
    assert written == [(["7"], []), (["7"], [])]  # it begins, and it ends
    written.clear()
    rank.manager.park("7")
    assert written == [(["7"], ["park:host"])]


def test_two_ranks_are_compared_after_the_last_step_that_both_have_done():
    ranks = [Rank(), Rank()]
    made, _ = known(ranks)
    for rank in ranks:
        rank.step("a", "b")
    assert states(made.look(rows=True)) == {redacted_id(key): ("idle", 2, True) for key in "ab"}
    ranks[0].step("c")  # the other rank is about to
    found = made.look(rows=True)
    assert found.answers[0]["agree"]
    assert states(found)[redacted_id("c")] == ("idle", 1, True)
    with ranks[0].manager.lease("a"):
        assert states(made.look(rows=True))[redacted_id("a")] == ("in_use", 2, True)
    ranks[1].step("c", "a")
    assert made.look().answers[0]["agree"]
    for rank in ranks:
        rank.manager.park("a")
        rank.step("b", nbytes=100 + 100 * (rank is ranks[0]))
    found = made.look(rows=True)
    assert found.answers[0]["agree"], "bytes may differ"
    assert aggregate.totals(found.answers)["nbytes:cpu"] == sum(
        r.manager.stats()["total_nbytes"] for r in ranks
    )


def test_ranks_that_did_different_things_do_not_agree_and_the_row_tells():
    ranks = [Rank(), Rank()]
    made, _ = known(ranks)
    for rank in ranks:
        rank.step("a", "b", "c")
    ranks[1].manager.park("b")
    for rank in ranks:
        rank.step("a")
    found = made.look(rows=True)
    assert not found.answers[0]["agree"]
    assert {name: row[2] for name, row in states(found).items()} == {
        redacted_id("a"): True,
        redacted_id("b"): False,
        redacted_id("c"): True,
    }
    ranks[0].manager.park("b")
    for rank in ranks:
        rank.step("a")
    assert made.look(rows=True).answers[0]["agree"], "the next step is judged anew"


def test_ranks_that_used_sessions_in_another_order_do_not_agree():
    ranks = [Rank(), Rank()]
    made, _ = known(ranks)
    ranks[0].step("a", "b")
    ranks[1].step("b", "a")
    assert not made.look().answers[0]["agree"]


def test_a_rank_that_stands_still_while_another_goes_on_does_not_agree():
    ranks = [Rank(), Rank()]
    made, _ = known(ranks)
    for number in range(layout._STEPS - 1):
        ranks[0].step(str(number))
        assert made.look().answers[0]["agree"]
    ranks[0].step("one more")
    assert not made.look().answers[0]["agree"]


def test_a_worker_that_is_gone_is_said_and_the_others_are_shown():
    mine, other = Rank(), Rank()
    mine.step("a")
    other.step("b")
    made, workers = known([mine], [other])
    mine.publisher.close()
    found = made.look(rows=True)
    assert found.answers[0] == {
        "agree": False,
        "ranks": [{"rank": 0, "ok": False, "error": "WorkerGoneError: the worker process is gone"}],
    }
    assert states(found) == {redacted_id("b"): ("idle", 1, True)}
    assert aggregate.totals(found.answers)["sessions"] == 1
    del workers.replicas[0]
    asyncio.run(made.ask())
    assert not made.look().answers[0]["agree"], "one that answers no more is still said to be gone"
    workers.replicas[0] = [Rank()]
    asyncio.run(made.ask())
    assert made.look().answers[0]["agree"], "another one has taken its place"


def test_a_replica_that_joins_is_asked_once_though_steps_run():
    made, workers = known([Rank()])
    workers.idle, workers.attached = False, frozenset({0})
    workers.replicas[1] = [Rank()]
    workers.replicas[1][0].step("b")
    asyncio.run(made.fresh())
    assert workers.calls == 1
    workers.attached = frozenset({0, 1})
    for _ in range(2):
        asyncio.run(made.fresh())
        assert states(made.look(rows=True)) == {redacted_id("b"): ("idle", 1, True)}
    assert workers.calls == 2


def test_ids_are_hashed_unless_they_are_to_be_shown():
    rank = Rank()
    show_in_the_clear(True)
    try:
        rank.step("robot-1")
        made, _ = known([rank])
        assert list(states(made.look(rows=True))) == ["robot-1"]
    finally:
        show_in_the_clear(False)
    rank.step("robot-1")
    assert list(states(made.look(rows=True))) == [redacted_id("robot-1")]


def no_place(base):
    base.rmdir()


def fails(*_args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("why", ["no place", "no room"])
def test_a_worker_that_cannot_write_says_so_once_and_is_asked(why, base, monkeypatch, caplog):
    from vllm_omni_session_state.base.log import forget_said

    forget_said()
    if why == "no place":
        base.rmdir()
    else:
        monkeypatch.setattr(os, "posix_fallocate", fails)
    ranks = [Rank(), Rank()]
    ranks[0].step("a")
    made, workers = known([ranks[0]], [ranks[1]])
    ranks[0].step("b")
    assert list(states(made.look(rows=True))) == [redacted_id("a")], "as it was when it was asked"
    asyncio.run(made.fresh())
    assert list(states(made.look(rows=True))) == [redacted_id("a"), redacted_id("b")]
    assert workers.calls == 2
    workers.idle = False
    asyncio.run(made.fresh())
    assert workers.calls == 2, "a call would wait for the step, and others for the call"
    (line,) = [line for line in caplog.messages if "figures are not written" in line]
    assert ("No such file" if why == "no place" else "No space left") in line


def test_a_file_that_cannot_grow_is_written_no_more_and_serving_goes_on(monkeypatch, caplog):
    from vllm_omni_session_state.base.log import forget_said

    forget_said()
    monkeypatch.setattr(layout, "FIRST_ROWS", 2)
    rank = Rank()
    rank.step("a")
    made, workers = known([rank])
    monkeypatch.setattr(os, "posix_fallocate", fails)
    rank.step("b", "c", "d", "e")
    assert rank.manager.stats()["sessions"] == 5
    assert rank.manager._table.changed is None, "nothing is noted any more"
    assert len([line for line in caplog.messages if "No space left" in line]) == 1
    made.look()
    asyncio.run(made.fresh())
    assert workers.calls == 2
    assert len(states(made.look(rows=True))) == 5
    assert made.look(rows=True).answers[0]["agree"]
    monkeypatch.undo()


def test_a_worker_that_is_stopped_in_the_middle_of_a_writing_does_not_leave_it_half_done(monkeypatch):
    rank = Rank()
    rank.step("a")
    made, _ = known([rank])

    def stop(*_args):
        raise SystemExit

    monkeypatch.setattr(layout.StatsWriter, "_put", stop)
    with pytest.raises(SystemExit):
        rank.step("b")
    monkeypatch.undo()
    rank.step("c")
    made.look()
    asyncio.run(made.fresh())
    assert list(states(made.look(rows=True))) == [redacted_id(key) for key in "abc"]


@pytest.mark.parametrize("ends", ["shutdown", "another model", "nobody holds the model"])
def test_the_file_goes_with_the_model(ends, base):
    rank = Rank()
    made, _ = known([rank])
    (top,) = base.iterdir()
    (path,) = top.iterdir()
    if ends == "shutdown":
        lifecycle.leave_process(rank.manager)
    else:
        rank.manager = SessionStateManager()
    assert made.look().answers[0]["ranks"][0]["ok"] is False
    if ends == "another model":
        asyncio.run(made.ask())
        assert made.look().answers[0]["ranks"][0]["ok"]
        assert [each.name for each in top.iterdir()] != [path.name]
    else:
        assert list(top.iterdir()) == []
    rank.step("a")


def test_a_forked_child_writes_nothing():
    rank = Rank()
    made, _ = known([rank])
    child = os.fork()
    if not child:
        try:
            rank.step("a")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    rank.step("b")
    assert list(states(made.look(rows=True))) == [redacted_id("b")]
    assert made.look().answers[0]["agree"]


def test_a_file_that_cannot_be_read_any_more_is_given_up(monkeypatch):
    rank = Rank()
    rank.step("a")
    made, workers = known([rank])
    assert made.look().age_s == 0
    file = os.open(rank.publisher.path, os.O_RDWR)
    os.pwrite(file, b"\xff" * 64, 0)
    monkeypatch.setattr(stats_source, "STALE_S", 0.2)
    assert made.look().answers[0]["ranks"][0]["sessions"] == 1, "as it was last"
    assert made.look().age_s > 0
    time.sleep(0.3)
    made.look()
    asyncio.run(made.fresh())
    assert workers.calls == 2
    os.close(file)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hits": "many"},
        {"hits": 1 << 70},
        {"hits": None},
        {"bounds": {}},
        {"bounds": 3},
        {"kv": {"free": 1}},
        {"kv": [1]},
        {"ends": {"close": []}},
        {"only_kv": ["s"]},
        {"only_kv": {"s": 1}},
        {"other": {}},
    ],
    ids=str,
)
def test_figures_of_another_kind_are_not_taken(wrong):
    rank = Rank()
    made, _ = known([rank])
    write = rank.publisher._writer.write
    said = publisher.engine_view.figures(rank.manager, rank.worker.model_runner, rank.ends)
    write({**said, **wrong}, {}, {})
    assert made.look().age_s > 0
    write(said, {}, {})
    assert made.look().age_s == 0


@pytest.mark.parametrize("moves", [{}, 3, [], {"failed": 1}])
def test_moves_of_another_kind_are_not_taken(moves):
    rank = Rank()
    made, _ = known([rank])
    said = publisher.engine_view.figures(rank.manager, rank.worker.model_runner, rank.ends)
    rank.publisher._writer.write(said, {}, {"park:host": moves})
    assert made.look().age_s > 0


def test_who_must_be_asked_is_asked_often_while_nothing_runs_and_else_seldom(monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", fails)
    made, workers = known([Rank()])
    asked = made._asked_at
    assert not made._due(asked + stats_poller.EVERY_S / 2)
    assert made._due(asked + stats_poller.EVERY_S)
    workers.idle = False
    assert not made._due(asked + stats_poller.BUSY_EVERY_S - 1)
    assert made._due(asked + stats_poller.BUSY_EVERY_S)


def test_who_has_a_file_is_never_asked_again_and_one_that_is_gone_only_while_nothing_runs():
    rank = Rank()
    made, workers = known([rank])
    later = made._asked_at + 1000 * stats_poller.BUSY_EVERY_S
    assert not made._due(later)
    rank.publisher.close()
    made.look()
    assert made._due(later)
    assert not made._due(made._asked_at + stats_poller.EVERY_S)
    workers.idle = False
    assert not made._due(later)


def test_while_somebody_wants_to_know_who_must_be_asked_is_asked_again_and_again(monkeypatch):
    monkeypatch.setattr(stats_poller, "EVERY_S", 0.01)
    monkeypatch.setattr(os, "posix_fallocate", fails)
    workers = Workers([Rank()])

    async def running():
        made = StatsPoller(workers, asyncio.get_running_loop())
        made.want(linger_s=60)
        await asyncio.wait_for(workers.asked_five_times.wait(), 300)

    asyncio.run(running())

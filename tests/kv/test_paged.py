"""The handle without a host: an engine of plain Python behind it."""

import pytest
import torch

from vllm_omni_session_state import LatentBuffer, SessionState, SessionStateManager
from vllm_omni_session_state.accounting.allocations import Allocation, Blocks
from vllm_omni_session_state.accounting.footprint import footprint
from vllm_omni_session_state.base.errors import (
    EngineOwnedError,
    MidChunkError,
    NotAllocatedError,
    NothingStagedError,
    PoolFullError,
    SessionRestoreFailedError,
)
from vllm_omni_session_state.manager.consensus import status_of
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.state.paged_kv import PagedKV


class Arena:
    """One tensor, of which sessions have pages of 16 bytes."""

    def __init__(self, pages=8):
        self.memory = torch.arange(pages * 16, dtype=torch.uint8).view(pages, 16)
        self.free = list(range(pages))


class Engine:
    """One session in an arena."""

    def __init__(self, arena, pages=0):
        self.state = object()
        self.arena, self.mine, self.closed = arena, [arena.free.pop() for _ in range(pages)], False
        self.side = torch.zeros(4)
        self.writing, self.gathers = (), 0

    def blocks(self):
        start, device = self.arena.memory.data_ptr(), "cpu"
        return Blocks(Allocation(device, start + 16 * page, 16) for page in self.mine)

    def beside(self):
        return self.side

    def in_flight(self):
        return self.writing

    def gather(self):
        if self.writing:
            raise MidChunkError("s", branch=self.writing[0], tokens=1)
        self.gathers += 1
        return {"pages": self.arena.memory[self.mine], "side": self.side}

    def put_back(self, tree):
        wanted = len(tree["pages"])
        if wanted > len(self.arena.free):
            raise PoolFullError("blocks", wanted=wanted, room=len(self.arena.free))
        self.mine = [self.arena.free.pop() for _ in range(wanted)]
        self.arena.memory[self.mine] = tree["pages"]
        self.side, self.closed = tree["side"], False

    def reopen(self):
        self.close()
        self.closed = False

    def close(self):
        self.arena.free += self.mine
        self.mine, self.side, self.closed = [], None, True


@pytest.fixture
def arena():
    return Arena()


def test_a_page_counts_as_a_page_and_the_arena_as_nobodys(arena):
    one, two = PagedKV(Engine(arena, 3)), PagedKV(Engine(arena, 2))
    assert one.nbytes_by_device() == {"cpu": 3 * 16 + 16}
    assert footprint(one.holds(), two.holds()).nbytes == 5 * 16 + 2 * 16
    assert footprint(one.holds(), arena.memory).nbytes == 3 * 16 + 16 + 8 * 16, "the arena is another unit"
    assert footprint(one.holds(), one.holds()).nbytes == one.nbytes


def test_the_books_never_gather(arena):
    engine = Engine(arena, 3)
    manager = SessionStateManager()
    with manager.lease("a") as session:
        kv = session.put("kv", PagedKV(engine))
        session.put("latents", LatentBuffer()).replace([torch.zeros(8)])
    assert manager.stats()["total_nbytes"] == 3 * 16 + 16 + 32
    assert [(v.name, sum(v.nbytes.values())) for e in manager.listing() for v in e.values] == [
        ("kv", 64),
        ("latents", 32),
    ]
    assert session.nbytes == 96
    assert kv.evict() == 3 * 16 + 16
    assert engine.gathers == 0
    with manager.lease("a"):
        pass
    assert manager.stats()["total_nbytes"] == 32
    manager.check()


def test_evicting_counts_what_is_gone_and_not_what_somebody_holds(arena):
    engine = Engine(arena, 3)
    kv, held = PagedKV(engine), engine.side
    assert kv.evict() == 3 * 16
    assert len(arena.free) == 8
    assert held.sum() == 0
    assert kv.evict() == 0
    assert (kv.resident, kv.nbytes) == (False, 0)


def test_the_engine_stages_and_commits_and_nobody_writes_through_the_handle(arena):
    engine = Engine(arena, 1)
    kv = PagedKV(engine)
    with pytest.raises(EngineOwnedError):
        kv.append({})
    with pytest.raises(EngineOwnedError):
        kv.commit({})
    with pytest.raises(NothingStagedError):
        kv.commit()
    session = SessionState("a")
    session.put("kv", kv)
    assert not session.staging
    engine.writing = ("left",)
    assert kv.staged == (("left",),)
    assert session.staging, "a window is in progress"
    assert footprint(kv.staged).nbytes == 0
    with pytest.raises(MidChunkError):
        session.part(lambda _: True)
    kv.discard()
    assert session.staging, "the engine's own, and only the engine's"


def test_the_handle_shows_the_engines_state_while_it_is_open(arena):
    engine = Engine(arena, 1)
    kv = PagedKV(engine)
    assert kv.view() is engine.state
    assert kv.view(include_staged=False) is engine.state
    kv.reset()
    for closed in (kv.view, kv.export_payload, kv.holds):
        with pytest.raises(NotAllocatedError):
            closed()
    kv.allocate()
    assert kv.resident
    assert kv.view() is engine.state


def test_a_session_into_which_a_model_put_nothing_is_empty_although_the_engine_knows_it(arena):
    """A model's state begins in an empty session, whoever comes first: its first step or the engine's KV."""
    session = SessionState("a")
    session.put("kv", PagedKV(Engine(arena, 1)))
    assert session.empty
    session.put("latents", LatentBuffer())
    assert not session.empty
    session = SessionState("b")
    session.attrs["count"] = 0
    assert not session.empty


def test_where_ranks_must_agree_kv_that_cannot_be_taken_out_is_given_up_and_the_others_are_told(
    arena, caplog
):
    """The other ranks have parked it: if this one kept it, they would wait for it at the next step."""
    told = []

    def exchange(message):
        told.append(message)
        mine = status_of(message)
        return [message, mine._replace(failed="").packed()]

    def no_memory():
        raise MemoryError("no room for a copy")

    manager = SessionStateManager(max_sessions=1, tier=HostTier(budget=1 << 20), exchange=exchange)
    engine = Engine(arena, 6)
    with manager.lease("a") as session:
        session.put("kv", PagedKV(engine))
        session.attrs["x"] = torch.ones(8)
    engine.gather = no_memory
    with manager.lease("b"):
        pass
    assert manager.peek("a").parked
    assert len(arena.free) == 8
    assert "could not be taken out of the engine's pool: MemoryError: no room for a copy" in caplog.text
    with (
        pytest.raises(SessionRestoreFailedError, match="stays where it is: rank 0: "),
        manager.lease("a"),
    ):
        raise AssertionError("it was not brought back")
    assert len(told) == 1
    manager.check()
    assert manager.drop_session("a")
    assert manager.drop_session("b")
    manager.check()
    assert manager.stats()["total_nbytes"] == 0


def test_a_session_with_an_object_that_cannot_come_back_stays_away_whole(arena):
    engine, session = Engine(arena, 6), SessionState("a")
    first = session.put("first", LatentBuffer())
    first.replace([torch.ones(2)])
    session.put("kv", PagedKV(engine))
    last = session.put("last", LatentBuffer())
    last.replace([torch.ones(3)])
    part = session.part(lambda _: True)
    session.let_go(part)
    assert len(arena.free) == 8
    blocker = Engine(arena, 3)
    with pytest.raises(PoolFullError):
        session.put_back(part)
    assert session.parked
    assert [obj.resident for obj in (first, last)] == [False, False]
    assert len(arena.free) == 5
    blocker.close()
    session.put_back(part)
    assert not session.parked
    assert len(engine.mine) == 6
    assert first.view()[0].tolist() == [1, 1]
    session.reset()
    assert len(arena.free) == 8

"""What ranks agree on at a load, and where one of them fails: two threads, each with a runner of its own.

The runners are stand-ins, since what must fail here fails on no CPU; the real ones meet in
``tests/dreamzero/test_parking_ranks.py``.
"""

import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from vllm_omni_session_state import SessionStateManager
from vllm_omni_session_state.adapters.patches import Patches
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.omni.worker import agreement, kv_sizing, ranks

LIMIT_S = 300  # nobody waits that long but for a rank that never comes
PLACES, KV = (5, 3), (700, 900)


class Pipeline:
    _memory_manager = "its own"


class Runner:
    """What of vLLM-Omni's runner is read and set; its pool has places by its rank."""

    def __init__(self, rank, pipeline):
        self.rank, self.pipeline = rank, pipeline
        self._sessions, self._session_capacity, self.kv_cache = {}, 0, None
        self.planned = []

    def preallocate(self, *, available_bytes):
        self.planned.append(available_bytes)
        self.kv_cache, self._session_capacity = object(), PLACES[self.rank]


class Ranks:
    """Two ranks and their group: a barrier."""

    def __init__(self, monkeypatch, tmp_path, **settings):
        self.barrier, self.told, self.met = threading.Barrier(2), [None, None], [0, 0]
        self.local = threading.local()
        monkeypatch.setattr(ranks, "exchange", lambda: self.exchange)
        monkeypatch.setattr(agreement, "loads", [])
        monkeypatch.setattr(agreement, "_kv_nbytes", lambda runner: KV[runner.rank])
        monkeypatch.setattr(agreement, "_give_back", lambda: None)
        monkeypatch.setattr(kv_sizing, "preallocate", self.sized)
        self.sizes = [self.size, self.size]
        self.runners = [self.load(rank, tmp_path, **settings) for rank in range(2)]

    def load(self, rank, tmp_path, *, sizes_pool=False, tiers=True):
        pipeline = Pipeline()
        load = agreement.Load(object(), weakref.ref(pipeline), terms="as asked", sizes_pool=sizes_pool)
        manager = SessionStateManager(
            device_budget=100 if sizes_pool else None,
            tier=HostTier(budget=1 << 20) if tiers else None,
            disk=DiskTier(tmp_path / f"rank {rank}", budget=1 << 20) if tiers else None,
            exchange=self.exchange,
        )
        load.patches.set(pipeline, "_memory_manager", manager)
        load.manager = weakref.ref(manager)
        agreement.loads.append(load)
        return Runner(rank, pipeline)

    def exchange(self, message):
        rank = self.local.rank
        self.met[rank] += 1
        self.told[rank] = message
        self.barrier.wait(LIMIT_S)
        told = list(self.told)
        self.barrier.wait(LIMIT_S)
        return told

    def sized(self, runner, manager, host, available_bytes):
        return self.sizes[runner.rank](runner)

    @staticmethod
    def size(runner):
        runner.preallocate(available_bytes="what is left")
        runner._session_capacity += 10
        return 42

    def start(self):
        """Both make their pools at once; what each raised."""

        def rank(runner):
            self.local.rank = runner.rank
            try:
                agreement.preallocate(runner, runner.preallocate, None)
            except BaseException as error:  # noqa: BLE001 - compared
                return error
            return None

        with ThreadPoolExecutor(2) as pool:
            raised = list(pool.map(rank, self.runners))
        assert self.met[0] == self.met[1], "else one of them waits"
        return raised

    def managers(self):
        return [runner.pipeline._memory_manager for runner in self.runners]

    def capacities(self):
        return [runner._session_capacity for runner in self.runners]


def fails(error):
    def failing(*_args, **_more):
        raise error

    return failing


@pytest.fixture
def two(monkeypatch, tmp_path):
    forget_said()
    return lambda **settings: Ranks(monkeypatch, tmp_path, **settings)


@pytest.mark.parametrize("tiers", [True, False])
def test_the_smallest_pool_counts_on_all_ranks_with_a_tier_or_without(two, tiers):
    made = two(tiers=tiers)
    assert made.start() == [None, None]
    assert made.capacities() == [3, 3]
    for manager in made.managers():
        assert manager.capacity.pool.places == 3
        assert manager.offloader.engine_nbytes == max(KV)


@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_rank_has_no_manager_none_has(two, caplog, rank):
    made = two()
    agreement.loads[rank].failed = "RuntimeError: no such tensor"
    agreement.loads[rank].patches.undo()
    agreement.loads[rank].manager = None
    assert made.start() == [None, None]
    assert made.managers() == ["its own", "its own"]
    assert f"Pipeline keeps its own session state: rank {rank}: RuntimeError: no such tensor" in caplog.text
    assert made.capacities() == list(PLACES), "as without the plugin"


def test_where_ranks_were_asked_for_different_things_none_has_a_manager(two, caplog):
    made = two()
    agreement.loads[1].terms = "other\nbudgets"
    assert made.start() == [None, None]
    assert made.managers() == ["its own", "its own"]
    assert "rank 0: as asked; rank 1: other budgets" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_rank_has_no_disk_none_has(two, caplog, rank, tmp_path):
    made = two()
    made.managers()[rank].offloader.disk.close()
    made.managers()[rank].offloader.disk = None
    agreement.loads[rank].no_disk = "TierFaultError: cannot open the disk tier"
    assert made.start() == [None, None]
    for manager in made.managers():
        assert manager.offloader.disk is manager.offloader.spiller is None
        assert manager.offloader.host is not None
    assert f"no session is parked on the disk: rank {rank}: TierFaultError: cannot open" in caplog.text
    assert [list(folder.iterdir()) for folder in tmp_path.iterdir()] == [[], []]


def test_a_device_budget_sizes_the_pool_on_all_ranks(two):
    made = two(sizes_pool=True)
    assert made.start() == [None, None]
    assert made.capacities() == [13, 13]
    assert [runner.planned for runner in made.runners] == [["what is left"]] * 2
    assert [manager.capacity._most for manager in made.managers()] == [100, 100]


@pytest.mark.parametrize("rank", [0, 1])
def test_where_the_sizing_fails_on_one_rank_all_take_the_hosts_plan(two, caplog, rank):
    made = two(sizes_pool=True)
    made.sizes[rank] = fails(ValueError("cannot fit one session"))
    assert made.start() == [None, None]
    assert made.capacities() == [3, 3]
    assert made.runners[rank].planned == [None]
    assert made.runners[1 - rank].planned == ["what is left", None]
    assert [manager.capacity._most for manager in made.managers()] == [None, None], "nothing was given away"
    assert f"as large as without the plugin: rank {rank}: ValueError: cannot fit one session" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [ValueError("no memory for one"), SystemExit(143)], ids=["error", "exit"])
@pytest.mark.parametrize("step", ["sizing", "pool", "both"])
def test_a_rank_that_fails_tells_the_others_and_nobody_waits(two, caplog, rank, error, step):
    made = two(sizes_pool=step != "pool")
    if step != "pool":
        made.sizes[rank] = fails(error)
    if step != "sizing":
        made.runners[rank].preallocate = fails(error)
    raised = made.start()
    ends = step != "sizing" or isinstance(error, SystemExit)
    assert raised[rank] is (error if ends else None), "as it was"
    if not ends:
        return
    what = f"rank {rank}: {type(error).__name__}: {error}"
    assert f"have not agreed how many sessions the engine's KV pool holds: {what}" in caplog.text
    assert made.managers()[1 - rank].capacity.pool is None


def test_a_figure_that_cannot_be_had_on_one_rank_is_told_as_well(two, monkeypatch, caplog):
    made = two()
    figures = [fails(AttributeError("num_layers")), lambda _: 1]
    monkeypatch.setattr(agreement, "_kv_nbytes", lambda runner: figures[runner.rank](runner))
    assert made.start() == [None, None]
    assert (
        "have not agreed how many sessions the engine's KV pool holds: rank 0: AttributeError" in caplog.text
    )


def test_a_rank_that_is_gone_keeps_nobody_waiting(two, monkeypatch, caplog):
    made = two()
    monkeypatch.setattr(ranks, "exchange", lambda: fails(RuntimeError("connection closed by peer")))
    agreement.preallocate(made.runners[0], made.runners[0].preallocate, None)
    assert made.managers()[0] == "its own"
    assert "the ranks cannot be asked: connection closed by peer" in caplog.text


def test_a_pipeline_that_asks_for_nothing_is_sized_by_the_host_and_meets_nobody(two):
    made = two()
    agreement.loads.clear()
    assert made.start() == [None, None]
    assert made.met == [0, 0]
    assert made.capacities() == list(PLACES)


def test_what_was_set_on_an_object_does_not_keep_it_alive():
    pipeline, patches = Pipeline(), Patches()
    patches.set(pipeline, "state", 1)
    gone = weakref.ref(pipeline)
    del pipeline
    assert gone() is None
    patches.undo()


@pytest.mark.host
@pytest.mark.parametrize(
    ("offload", "apart"),
    [
        ({}, False),
        ({"enable_layerwise_offload": True}, False),
        ({"enable_distributed_layerwise_offload": True, "dlo_use_allgather": False}, False),
        ({"enable_distributed_layerwise_offload": True}, True),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_are_apart_where_the_host_has_them_run_different_requests(
    dreamzero_checkpoint, offload, apart, size
):
    from omni_tiny.inproc import dreamzero_config
    from vllm_omni.diffusion.data import DiffusionParallelConfig
    from vllm_omni.diffusion.diffusion_engine import _uses_dlo_dp_concurrency

    parallel = DiffusionParallelConfig(data_parallel_size=size)
    config = dreamzero_config(dreamzero_checkpoint, num_gpus=size, parallel_config=parallel, **offload)
    assert (ranks.apart(config) is not None) is (apart and size > 1) is _uses_dlo_dp_concurrency(config)


def test_a_host_that_does_not_say_has_its_ranks_apart(monkeypatch):
    assert ranks.apart(SimpleNamespace()) is None
    monkeypatch.setitem(sys.modules, "vllm_omni.diffusion.offloader.config", None)
    why = ranks.apart(SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2)))
    assert "data_parallel_size=2" in why

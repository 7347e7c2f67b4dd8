"""Sessions leave the device before the worker sleeps, and come back at their next step.

vLLM-Omni's sleep needs a GPU: its allocator is a stand-in here, all else is vLLM-Omni's own worker.
"""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_omni_session_state.base.errors import SeamMismatchError
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.manager.manager import SessionStateManager
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.omni.hooks import patching
from vllm_omni_session_state.omni.worker import rpc
from vllm_omni_session_state.omni.worker.lifecycle import hook_sleep

pytestmark = pytest.mark.host


class Allocator:
    """Stands where ``CuMemAllocator`` does; takes down where the sessions are when it is told to sleep."""

    def __init__(self, manager):
        self.manager = manager
        self.parked = None

    def get_current_usage(self):
        return 0

    def sleep(self, offload_tags):
        self.parked = self.manager.stats()["parked_sessions"]

    def wake_up(self, tags):
        pass


@pytest.fixture(scope="module")
def model(dreamzero_checkpoint):
    from omni_tiny.inproc import TinyDreamZero

    with TinyDreamZero(dreamzero_checkpoint, flag=True, capacity=4) as model:
        yield model


@pytest.fixture
def allocator(model, monkeypatch):
    from vllm_omni.diffusion.worker import diffusion_worker

    forget_said()
    allocator = Allocator(model.pipeline._memory_manager)
    monkeypatch.setattr(
        diffusion_worker,
        "_get_cumem_allocator_class",
        lambda: SimpleNamespace(get_instance=lambda: allocator),
    )
    yield allocator
    model.pipeline._memory_manager.offloader.host = None
    for session in ("a", "b"):
        model.close(session)


def steps(model, rounds):
    return [
        model.step(session, rng=np.random.default_rng([n, round_]), frames=4 if round_ else 1)
        for round_ in rounds
        for n, session in enumerate("ab")
    ]


def test_sessions_are_parked_when_the_allocator_sleeps_and_go_on_to_the_bit(model, allocator):
    manager = model.pipeline._memory_manager
    awake = steps(model, range(4))
    for session in "ab":
        model.close(session)
    manager.offloader.host = HostTier(budget=1 << 30)
    slept = steps(model, range(2))
    model.worker.sleep(level=1)
    assert allocator.parked == 2
    model.worker.wake_up()
    slept += steps(model, range(2, 4))
    assert all(mine.equals(other) for mine, other in zip(slept, awake, strict=True))


def test_a_session_in_use_stays_and_the_worker_sleeps_all_the_same(model, allocator):
    manager = model.pipeline._memory_manager
    manager.offloader.host = HostTier(budget=1 << 30)
    steps(model, range(1))
    with manager.lease("a"):
        model.worker.sleep()
    assert allocator.parked == 1


def test_without_a_tier_that_is_said_once(model, allocator, caplog):
    steps(model, range(1))
    for _ in range(2):
        model.worker.sleep()
    assert allocator.parked == 0
    said = [r for r in caplog.records if "its sessions stay on the device" in r.getMessage()]
    assert [record.levelno for record in said] == [logging.WARNING]


def test_what_cannot_be_parked_is_said_with_the_reason(model, allocator, caplog):
    model.pipeline._memory_manager.offloader.host = HostTier(budget=0)
    steps(model, range(1))
    model.worker.sleep()
    assert "2 sessions stay on the device" in caplog.text
    assert "raise host_budget" in caplog.text


def test_the_class_is_wrapped_once_and_a_worker_without_a_manager_sleeps_as_before():
    class Worker:
        def sleep(self, level=1):
            return level

    for _ in range(2):
        hook_sleep(Worker, rpc.manager_of)
    assert hasattr(Worker.sleep, patching.MARK)
    assert not hasattr(Worker.sleep.__wrapped__, patching.MARK)
    assert Worker().sleep(2) == 2


def test_another_signature_is_left_alone():
    class Worker:
        def sleep(self, level, tags):
            return level

    host = Worker.sleep
    with pytest.raises(
        SeamMismatchError, match=r"sleep: expected \(self, level=...\), found \(self, level, tags\)"
    ):
        hook_sleep(Worker, rpc.manager_of)
    assert Worker.sleep is host


def test_a_park_that_breaks_never_keeps_the_worker_awake(monkeypatch):
    class Worker:
        def sleep(self, level=1):
            return "slept"

    manager = SessionStateManager(tier=HostTier(budget=1))
    monkeypatch.setattr(manager, "keys", None)
    hook_sleep(Worker, lambda _: manager)
    assert Worker().sleep() == "slept"


def test_one_session_that_breaks_keeps_no_other_on_the_device(monkeypatch, caplog):
    class Worker:
        def sleep(self, level=1):
            return "slept"

    manager = SessionStateManager(tier=HostTier(budget=1 << 20))
    for key in "abc":
        with manager.lease(key) as session:
            session.attrs["x"] = 1
    park = manager.park
    monkeypatch.setattr(manager, "park", lambda key, **how: park(key, **how) if key != "b" else {}[key])
    hook_sleep(Worker, lambda _: manager)
    assert Worker().sleep() == "slept"
    assert manager.stats()["parked_sessions"] == 2
    assert "1 sessions stay on the device: 'b'" in caplog.text

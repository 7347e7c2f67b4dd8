"""What is said of DreamZero's bytes, against a recount from nothing on the real pipeline."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from unittest import mock

import numpy as np
import oracle
import pytest
import torch
from lockstep import broken_diffuse

from vllm_omni_session_state import SessionStateManager
from vllm_omni_session_state.accounting.footprint import footprint
from vllm_omni_session_state.adapters.dreamzero import DECLARED, HOST_MODULE, OUTSIDE
from vllm_omni_session_state.base.log import forget_said

pytestmark = pytest.mark.host

FIGURES = ("total_nbytes", "shared_nbytes", "staged_nbytes", "detached_nbytes", "detached_sessions")


class Driver:
    """One managed model and what is asked of its books."""

    def __init__(self, model):
        self.model = model
        self.pipeline = model.pipeline
        self.manager = model.pipeline._memory_manager
        self.rng = np.random.default_rng(0)

    def step(self, session, **how):
        self.model.step(session, rng=self.rng, **how)

    def steps(self, session, count):
        for number in range(count):
            self.step(session, frames=4 if number else 1)

    def held(self):
        """The values of each session of the table."""
        keys = self.manager.keys()
        return [list(oracle.values(self.manager.peek(key))) for key in keys]

    def is_exact(self):
        stats = self.manager.stats()
        total, shared = (oracle.reached((), *self.held(), times=times) for times in (1, 2))
        assert stats["total_nbytes"] == stats.get("nbytes:cpu", 0) == total
        assert stats["shared_nbytes"] == shared
        assert stats["staged_nbytes"] == 0
        assert self.manager.nbytes_by_device() == ({"cpu": total} if total else {})
        for entry, key in zip(self.manager.listing(), self.manager.keys(), strict=True):
            session = self.manager.peek(key)
            assert entry.nbytes == {"cpu": oracle.reached(oracle.values(session))}
            assert entry.device_nbytes == oracle.reached(
                oracle.values(session, without=(*oracle.ON_HOST, oracle.ENGINE))
            )
        self.manager.check()

    def is_nothing(self):
        stats = self.manager.stats()
        assert {name: stats[name] for name in FIGURES} == dict.fromkeys(FIGURES, 0)
        assert not [name for name in stats if name.startswith("nbytes:")]
        assert self.manager.nbytes_by_device() == {}
        self.manager.check()


@pytest.fixture
def driver(managed):
    """The model of this folder with no session."""
    for key in {*managed.runner._sessions, *managed.pipeline._memory_manager.keys()}:
        managed.close(key)
    forget_said()
    driver = Driver(managed)
    driver.is_nothing()
    return driver


def test_after_every_step_of_several_sessions_the_figures_are_a_recount(driver):
    """Window resets, a change of prompt, a single frame, a reset by request, a close and an eviction."""
    for round_ in range(6):
        for session in ("a", "b", "c"):
            driver.step(session, frames=4 if round_ else 1, prompt=f"task {session}")
            driver.is_exact()
    for how in ({"prompt": "another"}, {"frames": 1}, {"reset": True}, {}, {"close": True}):
        driver.step("b", **how)
        driver.is_exact()
    for session in ("d", "e", "f"):  # the runner keeps four
        driver.step(session, frames=1)
        driver.is_exact()
    assert len(driver.manager) == 4
    driver.pipeline.clear_accumulated_video_latents("f")
    driver.is_exact()


def test_the_vaes_own_copy_of_the_last_feature_map_is_outside(driver):
    driver.steps("a", 3)
    own = [entry for entry in driver.pipeline.vae._enc_feat_map if entry is not None]
    copy = oracle.reached(own)
    assert driver.manager.stats()["outside"] == copy > 100_000, OUTSIDE
    assert oracle.reached(own, *driver.held(), times=2) == 0, "the session's feature map is another one"
    driver.model.close("a")
    driver.is_nothing()
    assert driver.manager.stats()["outside"] == copy, "and it stays, whoever ends"


def test_what_the_host_declares_stands_beside_what_is_measured(driver, caplog):
    import sys

    driver.steps("a", 6)
    (entry,) = driver.manager.listing()
    assert entry.declared_nbytes == getattr(sys.modules[HOST_MODULE], DECLARED)
    assert 0 < entry.device_nbytes < entry.declared_nbytes
    assert not caplog.records


def test_a_declaration_that_is_too_small_is_said_once(dreamzero_checkpoint, driver, monkeypatch, caplog):
    import sys

    from omni_tiny.inproc import TinyDreamZero

    driver.steps("a", 3)
    too_little = driver.manager.listing()[0].device_nbytes - 1
    monkeypatch.setattr(sys.modules[HOST_MODULE], DECLARED, too_little)
    with TinyDreamZero(dreamzero_checkpoint, flag=True, capacity=1) as model:
        caplog.clear()
        small = Driver(model)
        small.steps("a", 3)
        small.steps("b", 3)
        (entry,) = small.manager.listing()
        assert entry.declared_nbytes == too_little < entry.device_nbytes
    said = [record for record in caplog.records if "declared" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.WARNING]
    assert str(too_little) in said[0].getMessage()


@pytest.mark.parametrize(
    "end", ["close", "reset", "close_by_request", "failure", "evicted_by_the_runner", "drop_all"]
)
def test_every_end_returns_every_figure_but_outside_to_nothing(driver, end):
    driver.steps("a", 3)
    assert driver.manager.stats()["total_nbytes"] > 1_000_000
    if end in {"close", "reset"}:
        getattr(driver.model, end)("a")
    elif end == "close_by_request":
        driver.step("a", close=True)
    elif end == "failure":
        with broken_diffuse(driver.pipeline), pytest.raises(ValueError, match="on purpose"):
            driver.step("a")
    elif end == "evicted_by_the_runner":
        for other in "bcde":
            driver.step(other, frames=1)
        assert "a" not in driver.manager
        for other in "bcde":
            driver.model.close(other)
    else:
        assert driver.manager.drop_all() == 1
    driver.is_nothing()
    assert driver.manager.stats()["outside"] > 0


def test_a_session_that_left_the_table_is_counted_for_as_long_as_somebody_holds_it(driver, monkeypatch):
    monkeypatch.setattr(driver.manager.capacity, "max_sessions", 1)
    driver.steps("a", 2)
    held = driver.manager.peek("a")
    driver.step("b", frames=1)
    nbytes = oracle.reached(oracle.values(held))
    stats = driver.manager.stats()
    assert (stats["detached_sessions"], stats["detached_nbytes"]) == (1, nbytes)
    driver.step("a", frames=1)
    assert driver.manager.peek("a") is not held, "the id used again is another session"
    stats = driver.manager.stats()
    assert (stats["detached_sessions"], stats["detached_nbytes"]) == (1, nbytes)
    driver.is_exact()
    del held
    assert driver.manager.stats()["detached_nbytes"] == driver.manager.stats()["detached_sessions"] == 0
    driver.manager.check()


@dataclass
class Fields:
    """As a model might write its state: with the pipeline that it belongs to."""

    pipeline: object
    encode: object
    parts: list
    latents: torch.Tensor


def test_a_value_that_holds_the_pipeline_counts_none_of_its_weights(driver, caplog):
    caplog.set_level(logging.INFO, logger="vllm_omni.session_state")
    pipeline = driver.pipeline
    weights = sum(parameter.nbytes for parameter in pipeline.parameters())
    latents = torch.zeros(10)
    value = Fields(pipeline, pipeline.forward, [pipeline.vae, {"t": pipeline.transformer}], latents)
    manager = SessionStateManager()
    for name in ("a", "b"):
        with manager.lease(name) as session:
            session.attrs["fields"] = value
            session.attrs["again"] = [pipeline, value]
    assert weights > 30_000_000
    assert manager.stats()["total_nbytes"] == 40
    kinds = {type(pipeline), type(pipeline.forward), type(pipeline.vae), type(pipeline.transformer)}
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    assert footprint(value).opaque == names
    said = [record.getMessage() for record in caplog.records if "counts as 0 bytes" in record.getMessage()]
    assert len(said) == len(names), "each kind is said once"
    assert all(any(name in line for line in said) for name in names)


def test_reading_the_figures_walks_no_value(driver):
    driver.steps("a", 2)
    with mock.patch.object(torch.Tensor, "untyped_storage", side_effect=AssertionError("a value was walked")):
        assert driver.manager.stats()["total_nbytes"] > 0
        assert driver.manager.nbytes_by_device()

"""Cosmos3 on the manager: equal to the bit, nothing left after a request, never another's K/V."""

from __future__ import annotations

import gc
import logging
from contextlib import contextmanager

import pytest
import torch
from kinds import SERVED_AS, equal
from omni_tiny.cosmos3_requests import SERVES

from vllm_omni_session_state import SessionStateManager
from vllm_omni_session_state.accounting.release import Watch
from vllm_omni_session_state.adapters.cosmos3 import BRANCHES, Cosmos3State

pytestmark = pytest.mark.host

WORDS = [{"prompt": "a red cube"}, {"prompt": "a ball in the rain", "seed": 5}]


@pytest.fixture(scope="module")
def off(tiny_cosmos3):
    return tiny_cosmos3("regular")


@pytest.fixture(scope="module")
def on(tiny_cosmos3):
    model = tiny_cosmos3("regular", flag=True)
    assert isinstance(model.pipeline._memory_manager, SessionStateManager)
    return model


@contextmanager
def captured(monkeypatch):
    """Watch the storages of everything that any session captures meanwhile."""
    watches = []
    capture = Cosmos3State.capture_from_transformer

    def capture_and_watch(self, transformer, is_negative):
        capture(self, transformer, is_negative)
        watches.append(Watch(*self._session.contents()))

    with monkeypatch.context() as patch:
        patch.setattr(Cosmos3State, "capture_from_transformer", capture_and_watch)
        yield watches


def nothing_is_left(model, watches):
    """Not in the books, not in the table, not on the transformer, and not anywhere in memory."""
    manager = model.pipeline._memory_manager
    manager.check()
    assert len(manager) == 0
    assert manager.stats()["total_nbytes"] == 0
    assert model.pipeline.transformer.cached_kv is None
    assert model.pipeline.transformer.cached_freqs_gen is None
    assert [region for watch in watches for region in watch.alive()] == []
    return True


@pytest.mark.parametrize("guidance", [4.0, 1.0])
@pytest.mark.parametrize(("variant", "kind", "dtype"), SERVED_AS)
def test_the_flag_changes_no_bit(tiny_cosmos3, monkeypatch, variant, kind, dtype, guidance):
    off, on = (tiny_cosmos3(variant, flag=flag, dtype=dtype) for flag in (False, True))
    words = {"kind": kind, "guidance": guidance, "n": 2 if kind == "t2i" else 1}
    with captured(monkeypatch) as watches:
        managed = on.generate("a", **words)
    assert equal(off.generate("a", **words), managed)
    assert bool(watches) is ("transfer" not in kind), "transfer has no session state, every other kind has"
    assert nothing_is_left(on, watches)


def test_during_a_request_both_branches_are_there_with_their_bytes(on, monkeypatch):
    seen = []
    manager = on.pipeline._memory_manager
    capture = Cosmos3State.capture_from_transformer

    def look(self, transformer, is_negative):
        capture(self, transformer, is_negative)
        seen.append(manager.listing())

    monkeypatch.setattr(Cosmos3State, "capture_from_transformer", look)
    on.generate("a")
    (entry,) = seen[-1]
    assert tuple(value.name for value in entry.values) == BRANCHES
    assert {value.kind for value in entry.values} == {"EncodeOnceKV"}
    assert entry.nbytes["cpu"] == sum(value.nbytes["cpu"] for value in entry.values) > 0
    assert len(seen[0][0].values) == 1, "the unconditional branch comes after its own forward"


@pytest.mark.parametrize("guidance", [4.0, 1.0])
@pytest.mark.parametrize("number", [1, 3])
def test_a_failing_forward_gives_the_hosts_error_and_leaves_nothing(off, on, monkeypatch, number, guidance):
    exact = off.generate("a", guidance=guidance)
    raised = []
    for model in (off, on):
        error = RuntimeError("a cosmic ray")
        with captured(monkeypatch) as watches, model.failing_forward(number, error):
            with pytest.raises(RuntimeError) as caught:
                model.generate("b", guidance=guidance)
            raised.append((caught.value is error, str(caught.value)))
            del caught, error
    assert raised == [(True, "a cosmic ray")] * 2
    assert nothing_is_left(on, watches)
    assert equal(on.generate("c", guidance=guidance), exact)


class TearingList(list):
    """A list of layers that can be read as far as the first."""

    def __iter__(self):
        yield self[0]
        raise MemoryError("between two layers")


def test_a_capture_that_fails_between_two_layers_keeps_neither(on, off, monkeypatch):
    exact = off.generate("a")
    halves = []

    def tear(state, is_negative):
        transformer = on.pipeline.transformer
        transformer.cached_kv = TearingList(transformer.cached_kv)
        halves.append(Watch(transformer.cached_kv))
        try:
            type(on.pipeline)._kv_capture_und(on.pipeline, state, is_negative)
        finally:
            resident = [obj.resident for obj in state._session.objects.values()]
            halves.append(resident)

    monkeypatch.setitem(vars(on.pipeline), "_kv_capture_und", tear)
    with pytest.raises(MemoryError, match="between two layers"):
        on.generate("b")
    monkeypatch.undo()
    gc.collect()  # the traceback's frames hold the tensors in a cycle
    watch, resident = halves
    assert resident == [False]
    assert nothing_is_left(on, [watch])
    assert equal(on.generate("c"), exact)


@pytest.mark.parametrize("guidance", [4.0, 1.0])
@pytest.mark.parametrize("head_start", [0, 1, 2])
@pytest.mark.parametrize("ids", [("one", "two"), ("same", "same")])
def test_two_step_interleaved_generations_are_both_exact(off, on, monkeypatch, ids, head_start, guidance):
    alone = [off.diffuse(off.diffuse_call("alone", guidance=guidance, **word)) for word in WORDS]
    pairs = zip(ids, WORDS, strict=True)
    calls = [on.diffuse_call(name, guidance=guidance, **word) for name, word in pairs]
    with captured(monkeypatch) as watches:
        together = on.interleave(calls, head_start=head_start)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(alone, together, strict=True))
    assert nothing_is_left(on, watches)


def test_interleaved_with_a_failing_one_the_other_is_exact(off, on):
    (alone,) = off.diffuse(off.diffuse_call("alone"))
    calls = [on.diffuse_call("same"), on.diffuse_call("same", prompt="another")]
    error = RuntimeError("a cosmic ray")
    with on.failing_forward(4, error):  # the second's unconditional branch of its first step
        good, bad = on.interleave(calls)
    assert bad is error
    assert torch.equal(good[0], alone)
    del error, bad
    gc.collect()
    assert nothing_is_left(on, [])


def test_a_cap_of_one_takes_nothing_from_a_request_under_way(off, on, monkeypatch):
    monkeypatch.setattr(on.pipeline._memory_manager.capacity, "max_sessions", 1)
    alone = [off.diffuse(off.diffuse_call("alone", **word)) for word in WORDS]
    calls = [on.diffuse_call(f"id{n}", **word) for n, word in enumerate(WORDS)]
    with captured(monkeypatch) as watches:
        together = on.interleave(calls)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(alone, together, strict=True))
    assert nothing_is_left(on, watches)


def test_sixty_mixed_requests_leave_no_tensor_alive(on, monkeypatch):
    kinds = [kind for kind in SERVES["regular"] if kind != "long_transfer"]
    with captured(monkeypatch) as watches:
        for number in range(60):
            kind, fails = kinds[number % len(kinds)], number % 7 == 3
            words = {
                "kind": kind,
                "guidance": (4.0, 1.0)[number % 2],
                "seed": number,
                "prompt": f"thing {number}",
            }
            if not fails:
                on.generate(f"request-{number}", **words)
                continue
            with (
                on.failing_forward(1 + number % 3, ValueError("broken")),
                pytest.raises(ValueError, match="broken"),
            ):
                on.generate(f"request-{number}", **words)
    gc.collect()
    assert len(watches) > 60
    assert nothing_is_left(on, watches)


def test_a_reset_cache_that_fails_does_not_cost_the_request(on, monkeypatch, caplog):
    monkeypatch.setattr(type(on.pipeline.transformer), "reset_cache", None)
    call = on.diffuse_call
    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"), pytest.raises(TypeError):
        on.diffuse(call("a"))  # vLLM-Omni's own call at the start of the loop fails first
    monkeypatch.undo()
    assert [record for record in caplog.records if "reset_cache() failed" in record.getMessage()]
    on.pipeline.transformer.reset_cache()
    assert nothing_is_left(on, [])

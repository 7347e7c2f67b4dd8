"""The manager against a list of keys in order of use, after every step."""

import gc
import logging
import threading
import weakref

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_omni_session_state import LatentBuffer, SessionStateManager
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.state.session import Declaration

IDS = st.sampled_from([None, "", "default", "a", "b", "c", "d", "e", "f"])


class LruMachine(RuleBasedStateMachine):
    """The table as a plain list, oldest first; every holder keeps what it holds."""

    @initialize(cap=st.integers(1, 4))
    def start(self, cap):
        self.manager = SessionStateManager(max_sessions=cap)
        self.cap = cap
        self.model = []  # (key, content) oldest first
        self.held = []  # (session, content) of sessions that somebody still holds
        self.count = self.hits = self.misses = self.evictions = 0

    @rule(session_id=IDS, hold=st.booleans())
    def use(self, session_id, hold):
        key = session_id or "default"
        session = self.manager.get_or_create_session(session_id)
        known = [entry for entry in self.model if entry[0] == key]
        if known:
            self.hits += 1
            content = known[0][1]
            self.model.remove(known[0])
        else:
            self.misses += 1
            self.count += 1
            content = self.count
            assert session.empty, "a new session reads as new"
            session.attrs["content"] = content
            while len(self.model) >= self.cap:
                self.model.pop(0)
                self.evictions += 1
        self.model.append((key, content))
        if hold:
            self.held.append((session, content))

    @rule(session_id=IDS)
    def drop(self, session_id):
        key = session_id or "default"
        known = [entry for entry in self.model if entry[0] == key]
        assert self.manager.drop_session(session_id) is bool(known)
        for entry in known:
            self.model.remove(entry)
            self.held = [(session, content) for session, content in self.held if content != entry[1]]

    @rule(session_id=IDS)
    def look(self, session_id):
        key = session_id or "default"
        known = [content for k, content in self.model if k == key]
        session = self.manager.peek(session_id)
        assert ([session.attrs["content"]] if session else []) == known
        assert (session_id in self.manager) is bool(known)
        self.manager.listing()
        self.manager.stats()

    @rule()
    def drop_everything(self):
        assert self.manager.drop_all() == len(self.model)
        ended = [content for _, content in self.model]
        self.held = [(session, content) for session, content in self.held if content not in ended]
        self.model = []

    @invariant()
    def equals_the_list(self):
        self.manager.check()
        assert [entry.session for entry in self.manager.listing()] == [
            display_id(key) for key, _ in self.model
        ]
        assert len(self.manager) == len(self.model)
        stats = self.manager.stats()
        assert {
            name: stats[name] for name in ("sessions", "max_sessions", "hits", "misses", "evictions")
        } == {
            "sessions": len(self.model),
            "max_sessions": self.cap,
            "hits": self.hits,
            "misses": self.misses,
            "evictions": self.evictions,
        }
        for session, content in self.held:
            assert session.attrs["content"] == content, "a holder keeps what it holds"


TestLruMachine = LruMachine.TestCase


@pytest.mark.parametrize("cap", [0, -3, 1.5, True, "8", None])
def test_a_cap_that_keeps_nobody_is_refused_with_its_setting(cap):
    with pytest.raises(ValueError, match="MAX_SESSIONS"):
        SessionStateManager(max_sessions=cap)


@pytest.mark.parametrize("call", ["get_or_create_session", "drop_session", "peek", "__contains__"])
def test_an_id_that_is_no_string_is_refused(call):
    with pytest.raises(TypeError, match="int"):
        getattr(SessionStateManager(), call)(0)


def test_an_empty_manager_is_true():
    assert SessionStateManager()
    assert len(SessionStateManager()) == 0


def test_an_eviction_is_said_with_the_shown_id_and_the_setting(caplog):
    manager = SessionStateManager(max_sessions=1)
    manager.get_or_create_session("robot-secret")
    with caplog.at_level(logging.WARNING):
        manager.get_or_create_session("robot-other")
    (record,) = caplog.records
    assert display_id("robot-secret") in record.getMessage()
    assert "OMNI_DIFFUSION_SESSION_STATE_MANAGER_MAX_SESSIONS" in record.getMessage()
    assert "robot-secret" not in record.getMessage()


def test_drop_frees_every_storage_though_the_session_is_still_held():
    manager = SessionStateManager()
    session = manager.get_or_create_session("a")
    tensor = torch.ones(4)
    storage = weakref.ref(tensor)
    buffer = session.put("latents", LatentBuffer())
    buffer.replace([tensor])
    buffer.stage(tensor)
    session.attrs["embeds"] = tensor
    del tensor
    assert manager.drop_session("a")
    assert storage() is None
    assert session.empty or not any(obj.resident for obj in session.objects.values())


def test_a_late_write_does_not_bring_a_dropped_session_back():
    manager = SessionStateManager()
    session = manager.get_or_create_session("a")
    manager.drop_session("a")
    session.attrs["late"] = torch.ones(4)
    assert "a" not in manager
    assert manager.stats()["total_nbytes"] == 0
    assert manager.get_or_create_session("a").empty


def test_an_evicted_session_that_nobody_holds_is_freed_without_the_garbage_collector():
    manager = SessionStateManager(max_sessions=1)
    gc.disable()
    try:
        manager.get_or_create_session("a").attrs["x"] = tensor = torch.ones(4)
        alive = weakref.ref(tensor)
        del tensor
        manager.get_or_create_session("b")
        assert alive() is None
    finally:
        gc.enable()


def test_stats_have_the_seeds_keys_and_count_a_shared_storage_once():
    manager = SessionStateManager()
    shared = torch.zeros(100, dtype=torch.uint8)
    with manager.lease("a") as session:
        session.attrs["x"] = shared[:1]
    with manager.lease("b") as session:
        session.attrs["x"] = shared
        session.put("ring", LatentBuffer()).replace([shared[50:]])
    stats = manager.stats()
    assert stats["total_nbytes"] == stats["nbytes:cpu"] == stats["shared_nbytes"] == 100
    assert manager.nbytes_by_device() == {"cpu": 100}


def test_the_listing_names_kind_bucket_bytes_and_shape_of_each_value():
    manager = SessionStateManager()
    session = manager.get_or_create_session("a")
    session.put("latents", LatentBuffer()).replace([torch.zeros(2, 3), torch.zeros(2, 3)])
    session.attrs["count"] = 7
    session.attrs["embeds"] = torch.zeros(5, dtype=torch.uint8)
    (entry,) = manager.listing()
    rows = {value.name: (value.kind, value.bucket, value.nbytes, value.shape) for value in entry.values}
    assert rows == {
        "latents": ("LatentBuffer", "object", {"cpu": 48}, "2 x (2, 3)"),
        "count": ("int", "attrs", {}, ""),
        "embeds": ("Tensor", "attrs", {"cpu": 5}, "(5,)"),
    }
    assert entry.nbytes == {"cpu": 53}


def test_figures_are_those_of_the_last_settlement_and_no_reader_walks():
    manager = SessionStateManager()
    with manager.lease("a") as session:
        session.attrs["x"] = torch.zeros(10, dtype=torch.uint8)
    session.attrs["x"] = torch.zeros(30, dtype=torch.uint8)
    assert manager.stats()["total_nbytes"] == 10
    manager.settle(session)
    assert manager.stats()["total_nbytes"] == 30


def test_the_use_is_settled_also_when_it_fails():
    manager = SessionStateManager()

    def fail():
        with manager.lease("a") as session:
            session.attrs["x"] = torch.zeros(10, dtype=torch.uint8)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert manager.stats()["total_nbytes"] == 10


def test_a_session_that_holds_more_than_its_model_declared_is_said_once(caplog):
    forget_said()
    declaration = Declaration(device_nbytes=10, host_fields=frozenset({"frames"}))
    manager = SessionStateManager(declaration=declaration)
    with caplog.at_level(logging.WARNING):
        with manager.lease("a") as session:
            session.attrs["frames"] = torch.zeros(1000, dtype=torch.uint8)
            session.attrs["x"] = torch.zeros(10, dtype=torch.uint8)
        assert caplog.records == []
        for name in ("a", "b"):
            with manager.lease(name) as session:
                session.attrs["x"] = torch.zeros(11, dtype=torch.uint8)
    (record,) = caplog.records
    assert "holds 11 bytes on the device and its model declared 10" in record.getMessage()
    entry = manager.listing()[0]
    assert (entry.device_nbytes, entry.declared_nbytes) == (11, 10)


def test_what_the_host_keeps_outside_stands_apart():
    manager = SessionStateManager()
    kept = [torch.zeros(7, dtype=torch.uint8), None]
    manager.charge_outside("vae", kept)
    assert manager.stats()["outside"] == 7
    assert manager.stats()["total_nbytes"] == 0
    manager.charge_outside("vae")
    assert manager.stats()["outside"] == 0


def test_many_threads_leave_a_sound_table():
    manager = SessionStateManager(max_sessions=3)
    failures = []

    def work(seed):
        try:
            for step in range(300):
                name = f"s{(seed * 7 + step) % 6}"
                if step % 5 == 0:
                    manager.drop_session(name)
                else:
                    with manager.lease(name) as session:
                        session.attrs["n"] = torch.zeros(step)
                manager.stats()
        except Exception as error:  # noqa: BLE001 - carried to the asserting thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    manager.check()


def test_a_list_that_holds_itself_can_be_listed():
    manager = SessionStateManager()
    with manager.lease("s") as session:
        knot = session.attrs["x"] = [torch.ones(1)]
        knot.append(knot)
    assert manager.listing()[0].values[0].nbytes == {"cpu": 4}

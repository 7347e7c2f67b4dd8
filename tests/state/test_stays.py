"""What a park does with values that are more than their bytes, or share them: by name what users met."""

from __future__ import annotations

import collections
import gc
import logging
import weakref

import numpy as np
import pytest
import torch
from odd_values import MyDict, Record, Stranger, Wrapper
from test_odd_values import no_collector

from vllm_omni_session_state import LatentBuffer, SessionStateManager
from vllm_omni_session_state.accounting import reach
from vllm_omni_session_state.base.errors import CannotParkError
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.offload.registered import register_kind, registered
from vllm_omni_session_state.state.session import Declaration

LARGE = 3 << 20
DECLARATION = Declaration(device_nbytes=1 << 30, host_fields=frozenset({"kept"}))


@pytest.fixture
def disk(tmp_path):
    tier = DiskTier(tmp_path, budget=1 << 30)
    yield tier
    tier.check()
    tier.close()


def on_host(**more):
    return SessionStateManager(tier=HostTier(budget=1 << 30), declaration=DECLARATION, **more)


def on_disk(disk):
    return SessionStateManager(disk=disk, declaration=DECLARATION)


def trip(manager, attrs):
    """Park a session with these attributes, which are let go of; what it has when it is back."""
    with manager.lease("s") as session:
        session.attrs.update(attrs)
    attrs.clear()
    del session
    assert manager.park("s")
    manager.check()
    others = [torch.full((100_000,), -7) for _ in range(8)]  # what was freed is others', with other bits
    del others
    with manager.lease("s") as session:
        return session.attrs


def refused(manager, make):
    """Why a park of what ``make`` makes is refused; afterwards all is as if nobody had asked."""
    attrs = make()  # no argument: pytest shows those, and an emptied tensor kills who shows it
    with manager.lease("s") as session:
        session.attrs.update(attrs)
    with pytest.raises(CannotParkError) as caught:
        manager.park("s")
    manager.check()
    assert manager.stats()["disk_nbytes"] == 0
    with manager.lease("s") as session:
        assert all(session.attrs[name] is value for name, value in attrs.items())
    return str(caught.value)


@pytest.mark.parametrize("order", [("head", "whole"), ("whole", "head")])
@pytest.mark.parametrize("part", [slice(0, 10), slice(5, 10)])
def test_two_storages_in_one_memory_are_two(order, part):
    whole = torch.arange(100_000)
    head = torch.from_numpy(whole.numpy()[part])
    wanted, values = whole.clone(), {"whole": whole, "head": head}
    del whole, head
    attrs = trip(on_host(), {name: values.pop(name) for name in order})
    assert torch.equal(attrs["whole"], wanted)
    attrs["head"][0] = 99
    assert attrs["whole"][part.start] == 99


@pytest.mark.parametrize("order", [("head", "whole"), ("whole", "head")])
def test_a_file_is_refused_when_it_is_written_and_not_when_it_is_read(disk, order):
    whole = torch.arange(100)
    values = {"whole": whole, "head": torch.from_numpy(whole.numpy()[:10])}
    assert "attrs.head" in refused(on_disk(disk), lambda: {name: values[name] for name in order})


def test_a_tensor_whose_storage_was_emptied_is_refused_by_a_file_and_stays_elsewhere(disk):
    def emptied():
        tensor = torch.ones(8)
        tensor.untyped_storage().resize_(0)
        return {"x": tensor}

    assert "its storage was cut to 0 bytes" in refused(on_disk(disk), emptied)
    held = emptied()
    tensor = held["x"]
    assert trip(on_host(), held)["x"] is tensor


@pytest.mark.parametrize("over", [torch.from_numpy, torch.from_dlpack])
def test_an_array_and_a_tensor_over_it_stay_one(over):
    array = np.zeros(4, np.float32)
    attrs = trip(on_host(), {"array": array, "tensor": over(array)})
    del array
    attrs["tensor"][0] = 7
    assert attrs["array"][0] == 7


def test_a_bytearray_and_a_tensor_over_it_stay_one():
    buffer = bytearray(8)
    attrs = trip(on_host(), {"tensor": torch.frombuffer(buffer, dtype=torch.uint8)})
    buffer[3] = 9
    assert attrs["tensor"][3] == 9


@pytest.mark.parametrize(
    "hold", [lambda shared: collections.defaultdict(list, k=shared), Record, Stranger, Wrapper]
)
def test_what_a_value_that_stays_refers_to_stays(hold):
    shared = torch.ones(1) if hold is Wrapper else [torch.ones(1)]
    held = hold(shared)
    attrs = trip(on_host(), {"shared": shared, "held": held})
    assert attrs["shared"] is shared
    assert attrs["held"] is held


def test_a_list_under_a_name_of_the_device_and_one_of_host_memory_is_one_list(disk):
    both = SessionStateManager(tier=HostTier(budget=1 << 30), disk=disk, declaration=DECLARATION)
    for manager in (on_host(), on_disk(disk), both):
        shared = [torch.ones(1)]
        with manager.lease("s") as session:
            session.attrs.update(moved=shared, kept=shared, also=[shared[0]])
        del shared
        manager.park("s")
        manager.offloader.flush_to_disk()
        with manager.lease("s") as session:
            assert session.attrs["moved"] is session.attrs["kept"]
            assert session.attrs["also"][0] is session.attrs["kept"][0]
        manager.check()


@pytest.mark.parametrize("maxlen", [None, 3])
def test_a_buffers_own_container_under_another_name_stays_its_own(disk, maxlen):
    for manager in (on_host(), on_disk(disk)):
        with manager.lease("s") as session:
            session.put("buffer", LatentBuffer()).replace([torch.ones(1)], maxlen=maxlen)
            session.attrs["alias"] = session.get("buffer").container
        if manager.offloader.disk is None:
            manager.park("s")
        else:
            with pytest.raises(CannotParkError, match=r"objects\.buffer"):
                manager.park("s")
        with manager.lease("s") as session:
            assert session.attrs["alias"] is session.get("buffer").container
        manager.check()


def test_a_buffer_that_stays_is_counted_where_it_is():
    manager = on_host()
    with manager.lease("s") as session:
        session.put("buffer", LatentBuffer()).replace([torch.ones(100)])
        session.attrs["odd"] = Stranger(session.get("buffer").container)
    assert manager.park("s")
    stats = manager.stats()
    assert (
        stats["total_nbytes"],
        stats["host_parked_nbytes"],
        stats.get("tier_nbytes:host:live:cpu", 0),
    ) == (400, 0, 0)


def test_hooks_of_a_leaf_stay():
    leaf = torch.ones(4, requires_grad=True)
    leaf.register_hook(lambda grad: grad * 10)
    attrs = trip(on_host(), {"leaf": leaf})
    attrs["leaf"].sum().backward()
    assert attrs["leaf"].grad.tolist() == [10] * 4


def test_gradients_of_a_graph_that_stays_go_to_its_leaf():
    leaf = torch.ones(4, requires_grad=True)
    attrs = trip(on_host(), {"graph": leaf * 2, "leaf": leaf})
    del leaf
    attrs["graph"].sum().backward()
    assert attrs["leaf"].grad.tolist() == [2] * 4


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda: np.ones(1000), "numpy.ndarray"),
        (lambda: Record(torch.ones(1000)), "odd_values.Record"),
        (lambda: MyDict(last=torch.ones(1000)), "odd_values.MyDict"),
        (lambda: torch.ones(500, dtype=torch.complex64).conj(), "torch.Tensor"),
        (lambda: torch.ones(1000).to_sparse(), "torch.Tensor"),
    ],
)
def test_a_park_that_frees_nothing_says_so_once_by_value_and_kind(caplog, value, kind):
    forget_said()
    manager = on_host()
    for key in "ab":
        with manager.lease(key) as session:
            session.attrs.update(odd=value(), number=3)
    before = manager.stats()["total_nbytes"]
    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        assert manager.park("a")
        assert manager.park("b")
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"leaves {before // 2} bytes of its odd where they are" in said
    assert kind in said
    assert manager.stats()["total_nbytes"] == before
    assert manager.stats()["host_parked_nbytes"] == 0


def test_an_array_that_somebody_else_holds_comes_back_over_the_same_memory(disk):
    outside = np.arange(12).reshape(3, 4)
    attrs = trip(on_disk(disk), {"kept": outside[1:], "moved": outside.T})
    outside[1, 1] = 77
    assert attrs["kept"][0, 1] == 77
    assert attrs["moved"][1, 1] == 77


def test_an_array_that_somebody_else_holds_is_named(disk, caplog):
    forget_said()
    outside = np.arange(12)
    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        trip(on_disk(disk), {"kept": outside[1:], "own": np.ones(3)})
    named = [record.getMessage() for record in caplog.records]
    assert [line for line in named if "does not free its kept" in line]
    assert not [line for line in named if "does not free its own" in line]


def test_an_array_that_somebody_else_holds_is_counted_where_its_model_keeps_it(disk):
    manager, outside, device = on_disk(disk), np.ones(100), np.ones(10)
    with manager.lease("s") as session:
        session.attrs.update(kept=outside, moved=device)
    del session
    manager.park("s")
    stats = manager.stats()
    assert (stats["total_nbytes"], stats.get("tier_nbytes:host:live:cpu", 0)) == (880, 800)
    manager.drop_session("s")
    assert manager.stats()["total_nbytes"] == 0


def test_what_was_in_a_file_can_go_into_one_again(disk):
    """Arrays have memory of their own again, and storages can be resized, the large ones too."""
    manager = on_disk(disk)
    with manager.lease("s") as session:
        session.attrs.update(small=torch.ones(3), large=torch.ones(LARGE, dtype=torch.uint8))
        session.attrs.update(kept=[np.ones(3), np.ones(LARGE, np.uint8)])
    for _ in range(3):
        assert manager.park("s")
        with manager.lease("s") as session:
            assert all(session.attrs[name].untyped_storage().resizable() for name in ("small", "large"))
            assert all(array.flags.owndata for array in session.attrs["kept"])
    session.attrs["large"].untyped_storage().resize_(0)
    session.attrs["kept"][1].resize(10, refcheck=False)


def test_a_refused_park_leaves_no_trace_on_a_tensor(tmp_path):
    full, tensor = DiskTier(tmp_path, budget=10), torch.ones(8)
    for odd in (None, object()):
        refused(on_disk(full), lambda odd=odd: {"x": tensor, "array": np.ones(2), "odd": odd})
        tensor.untyped_storage().resize_(64)
    full.close()


def test_what_numpy_has_seen_is_still_torchs_own(disk):
    """A storage that numpy() has shown cannot be resized any more; that is no reason to leave it."""
    for manager in (on_host(), on_disk(disk)):
        tensor = torch.ones(8)
        tensor.numpy()
        (back,) = trip(manager, {"x": tensor}).values()
        assert back is not tensor
        assert not back.untyped_storage().resizable()


@pytest.mark.parametrize("kind", ["array", "registered", "nested", "chunks"])
def test_what_a_park_to_the_disk_lets_go_of_dies_without_the_garbage_collector(disk, kind):
    register_kind(Record, "test.record", to_tree=vars, from_tree=lambda tree: Record(**tree))
    manager, array = on_disk(disk), np.ones(1 << 20, np.uint8)
    gone = weakref.ref(array)
    gc.collect()
    try:
        with no_collector():
            with manager.lease("s") as session:
                if kind == "chunks":
                    session.put("kept", LatentBuffer()).replace([array] * 30)
                else:
                    held = {"array": array, "registered": Record([array]), "nested": [({"a": array},)]}
                    session.attrs["x"] = held.pop(kind)
                    held.clear()
            del array, session
            assert manager.park("s")
            assert gone() is None
            assert manager.stats()["total_nbytes"] == 0
    finally:
        registered.clear()


def test_a_value_that_refers_to_half_of_the_process_leaves_all_where_it_is(caplog, monkeypatch):
    monkeypatch.setattr(reach, "MOST", 50)
    forget_said()
    half, mine = [[number] for number in range(100)], [torch.ones(3)]
    with caplog.at_level(logging.WARNING, logger="vllm_omni.session_state"):
        attrs = trip(on_host(), {"odd": Stranger(half), "x": mine, "last": [half[-1]]})
    assert attrs["x"] is mine
    assert attrs["last"][0] is attrs["odd"].held[-1]
    assert "refers to more than can be looked through" in caplog.text


def test_a_content_that_cannot_be_put_together_again_is_refused_when_it_is_written(disk):
    """The reader itself says so: whatever it would refuse, no session is parked with."""

    def fails(tree):
        raise KeyError(tree)

    register_kind(Record, "test.record", to_tree=vars, from_tree=fails)
    try:
        assert "could not be read again" in refused(on_disk(disk), lambda: {"x": Record(1)})
    finally:
        registered.clear()


def test_the_trial_changes_nothing_of_a_content_that_its_adapter_would_own(tmp_path):
    def from_tree(tree):
        return Record(tree["held"].fill_(0))

    register_kind(Record, "test.record", to_tree=vars, from_tree=from_tree)
    full = DiskTier(tmp_path, budget=10)
    record = Record(torch.ones(3))
    try:
        assert "disk.budget" in refused(on_disk(full), lambda: {"x": record})
        assert record.held.tolist() == [1, 1, 1]
    finally:
        registered.clear()
        full.close()


@pytest.mark.parametrize("maxlen", [True, np.int64(3)])
def test_a_ring_may_be_bounded_by_any_whole_number(disk, maxlen):
    manager = on_disk(disk)
    with manager.lease("s") as session:
        session.put("ring", LatentBuffer()).replace([torch.ones(1)], maxlen=maxlen)
    assert manager.park("s")
    with manager.lease("s") as session:
        assert session.get("ring").container.maxlen == int(maxlen)

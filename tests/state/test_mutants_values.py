"""The suite can fail: each mistake that parking could make with odd values is caught by a test."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from types import SimpleNamespace
from unittest import mock

import pytest
import test_odd_values as odd
import test_stays as stays
import torch

from vllm_omni_session_state.accounting.reach import Reach
from vllm_omni_session_state.base.errors import SessionStateError
from vllm_omni_session_state.offload import copy as offload_copy
from vllm_omni_session_state.offload import memory, pack, parking, retained, survey, unpack
from vllm_omni_session_state.offload.disk_tier import DiskTier


class Twice(dict):
    """Weights of tuples, and those that were made first."""

    def __init__(self, weights, first):
        super().__init__(weights)
        self.first = first


def in_a_folder(check):
    def checked():
        with tempfile.TemporaryDirectory() as folder:
            check(folder)

    checked.__name__ = check.__name__
    return checked


def on_a_disk(check, *args):
    def with_disk(folder):
        disk = DiskTier(folder, budget=1 << 30)
        try:
            check(disk, *args)
        finally:
            disk.close()

    with_disk.__name__ = " ".join([check.__name__, *args])
    return in_a_folder(with_disk)


def trips(name):
    return on_a_disk(odd.check_value, name)


def books(name):
    def check(disk):
        with odd.no_collector():
            odd.check_books(disk, name)

    check.__name__ = f"books of {name}"
    return on_a_disk(check)


def both(*names):
    """Pairs of values, by each route and in each arrangement."""

    def check(disk):
        for route in odd.ROUTES:
            for arrange in odd.ARRANGEMENTS:
                odd.check_trip(disk, route, arrange, names)

    check.__name__ = " and ".join(names)
    return on_a_disk(check)


def said_of_a_park_that_frees_nothing():
    manager = stays.on_host()
    with manager.lease("s") as session:
        session.attrs["odd"] = stays.Record(torch.ones(3))
    with mock.patch.object(retained, "log_once") as said:
        manager.park("s")
    assert said.call_count == 1


def forgets(reason):
    """Nobody is told that a tensor is more than its bytes, where that is why."""

    def mutant():
        def forgetful(value):
            why = memory.more_than_bytes(value)
            return "" if reason in why and value.grad_fn is None else why

        stack = contextlib.ExitStack()
        for module in (survey, pack):
            stack.enter_context(mock.patch.object(module, "more_than_bytes", forgetful))
        return stack

    mutant.__name__ = f"nobody is told where {reason}"
    return mutant


def a_storage_is_long_enough_for_any_tensor():
    return mock.patch.object(memory, "elements_end", return_value=0)


def memory_of_others_is_taken():
    def is_own(_):  # here and below no mock: it would hold what it is asked about
        return True

    return mock.patch.object(memory, "is_own", is_own)


def what_numpy_has_seen_is_taken_for_anothers():
    return mock.patch.object(memory, "is_own", lambda storage: storage.resizable())


def what_overlaps_is_taken():
    return mock.patch.object(survey, "entangled", return_value=set())


def what_stays_refers_to_nothing():
    def reach(_):
        return Reach({}, (), complete=True)

    return mock.patch.object(survey, "reach", reach)


def what_stays_refers_to_what_is_counted_only():
    real = survey.reach
    return mock.patch.object(
        survey, "reach", lambda values: real(value for value in values if type(value) is not stays.Stranger)
    )


@contextlib.contextmanager
def without(argument):
    def forgetful(real):
        def call(tree, **more):
            more.pop(argument, None)
            return real(tree, **more)

        return call

    with (
        mock.patch.object(parking, "pack", forgetful(parking.pack)),
        mock.patch.object(parking, "pack_whole", forgetful(parking.pack_whole)),
    ):
        yield


def host_memory_refers_to_nothing():
    return without("beside")


def an_alias_between_the_parts_is_not_known_to_a_file():
    real = parking.pack_whole

    def apart(tree, **more):
        kept = {"kept", "kept buffer"}
        torn = {
            bucket: {name: copy.deepcopy(value) if name in kept else value for name, value in values.items()}
            for bucket, values in tree.items()
        }
        return real(torn, **more)

    return mock.patch.object(parking, "pack_whole", apart)


def a_buffers_container_is_not_looked_for():
    return without("live")


def a_tuple_that_holds_itself_becomes_two():
    def build(nodes, built):
        real(nodes, built)
        first = list(built)
        weights = real(nodes, built)
        return Twice(weights, first)

    def fill(shell, node, built, weights):
        fills(shell, node, built if isinstance(shell, dict) else weights.first, weights)

    real, fills = unpack._build_tuples, unpack._fill
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(unpack, "_build_tuples", build))
    stack.enter_context(mock.patch.object(unpack, "_fill", fill))
    return stack


def what_stays_is_not_counted():
    real = parking.Parked.in_place

    def in_place(self, session):
        device, host = real(self, session)
        return device[1:], host

    return mock.patch.object(parking.Parked, "in_place", in_place)


def an_object_that_stays_is_counted_as_host_memory():
    def in_place(self, session):
        device, _ = real(self, session)
        stays = session.values(self.stayed.__contains__)
        return device[: len(device) - len(stays)], session.values(lambda _: True)

    real = parking.Parked.in_place

    return mock.patch.object(parking.Parked, "in_place", in_place)


def what_is_alive_of_host_memory_counts_as_the_devices():
    real = parking.Parked

    def forgetful(*args, **more):
        return real(*args[:4], **more)

    return mock.patch.object(parking, "Parked", mock.Mock(side_effect=forgetful))


def what_stays_is_not_said():
    return mock.patch.object(parking, "say_what_stays")


def an_array_is_let_go_whoever_holds_it():
    nobody = mock.Mock(return_value=None)
    return mock.patch.object(memory, "weakref", SimpleNamespace(ref=lambda _: nobody))


def the_writer_refers_to_itself():
    real = parking.pack_whole

    def write(*args, **more):
        packed = real(*args, **more)
        cycle = [list(packed.memory)]
        cycle.append(cycle)
        return packed

    return mock.patch.object(parking, "pack_whole", write)


def the_writer_does_not_ask_the_reader():
    return mock.patch.object(parking, "prove")


def the_trial_uses_what_is_the_sessions():
    return mock.patch.object(unpack.copy, "deepcopy", lambda tree: tree)


def no_array_has_memory_of_its_own():
    def has_own(_):
        return False

    return mock.patch.object(pack, "has_own", has_own)


def a_file_is_read_into_memory_that_is_not_torchs_own():
    def host_memory(nbytes):
        return torch.frombuffer(bytearray(max(1, nbytes)), dtype=torch.uint8)[:nbytes]

    return mock.patch.object(offload_copy, "host_memory", host_memory)


def a_file_is_written_through_numpy():
    def memory_of(owner):
        if isinstance(owner, torch.UntypedStorage):
            return torch.empty(0, dtype=torch.uint8).set_(owner).numpy()
        return real(owner)

    real = memory.memory_of
    return mock.patch.object(memory, "memory_of", memory_of)


CAUGHT_BY = {
    forgets("a graph or a gradient"): trips("leaf with a gradient"),
    forgets("its bytes are not its elements"): trips("negated"),
    forgets("has attributes"): trips("with attributes"),
    forgets("has hooks"): trips("leaf with a hook"),
    a_storage_is_long_enough_for_any_tensor: on_a_disk(
        stays.test_a_tensor_whose_storage_was_emptied_is_refused_by_a_file_and_stays_elsewhere
    ),
    forgets("gradients are of another type"): trips("leaf with gradients of another type"),
    memory_of_others_is_taken: stays.test_a_bytearray_and_a_tensor_over_it_stay_one,
    what_numpy_has_seen_is_taken_for_anothers: on_a_disk(stays.test_what_numpy_has_seen_is_still_torchs_own),
    what_overlaps_is_taken: both("view", "array over the tensor"),
    what_stays_refers_to_nothing: both("list", "named tuple"),
    what_stays_refers_to_what_is_counted_only: both("list", "stranger with the list"),
    host_memory_refers_to_nothing: trips("list"),
    an_alias_between_the_parts_is_not_known_to_a_file: trips("tensor"),
    a_buffers_container_is_not_looked_for: trips("tensor"),
    a_tuple_that_holds_itself_becomes_two: trips("tuple that holds itself"),
    what_stays_is_not_counted: books("named tuple"),
    an_object_that_stays_is_counted_as_host_memory: stays.test_a_buffer_that_stays_is_counted_where_it_is,
    what_is_alive_of_host_memory_counts_as_the_devices: on_a_disk(
        stays.test_an_array_that_somebody_else_holds_is_counted_where_its_model_keeps_it
    ),
    what_stays_is_not_said: said_of_a_park_that_frees_nothing,
    an_array_is_let_go_whoever_holds_it: on_a_disk(
        stays.test_an_array_that_somebody_else_holds_comes_back_over_the_same_memory
    ),
    the_trial_uses_what_is_the_sessions: in_a_folder(
        stays.test_the_trial_changes_nothing_of_a_content_that_its_adapter_would_own
    ),
    the_writer_refers_to_itself: books("array"),
    the_writer_does_not_ask_the_reader: on_a_disk(
        stays.test_a_content_that_cannot_be_put_together_again_is_refused_when_it_is_written
    ),
    no_array_has_memory_of_its_own: trips("array"),
    a_file_is_read_into_memory_that_is_not_torchs_own: on_a_disk(
        stays.test_what_was_in_a_file_can_go_into_one_again
    ),
    a_file_is_written_through_numpy: in_a_folder(stays.test_a_refused_park_leaves_no_trace_on_a_tensor),
}


@pytest.fixture(autouse=True)
def quiet(caplog):
    """What stays is said at WARNING; here there is much of it."""
    caplog.set_level("CRITICAL", logger="vllm_omni.session_state")


@pytest.mark.parametrize("check", dict.fromkeys(CAUGHT_BY.values()), ids=lambda check: check.__name__)
def test_without_a_mistake_the_check_passes(check):
    check()


@pytest.mark.parametrize("mutant", CAUGHT_BY, ids=lambda mutant: mutant.__name__)
def test_the_mutant_is_caught(mutant):
    wrong = (AssertionError, SessionStateError, RuntimeError, pytest.fail.Exception)
    with mutant(), pytest.raises(wrong):
        CAUGHT_BY[mutant]()

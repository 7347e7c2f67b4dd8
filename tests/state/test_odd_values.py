"""Whatever a session holds, alone and in pairs: what comes back is what left, and every byte is counted."""

from __future__ import annotations

import gc
import itertools
import random
from collections import deque
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from odd_values import ARRAYS, ATOMS, CONTAINERS, OPAQUE, TENSORS, Pair, Stranger
from picture import of_session
from profiles import count, sized
from world import World

from vllm_omni_session_state import LatentBuffer, SessionStateManager
from vllm_omni_session_state.base.errors import CannotParkError
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.state.session import Declaration

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.quantize")

COUNTED = TENSORS | ARRAYS | CONTAINERS
ODD = COUNTED | OPAQUE | ATOMS
ROUTES = ("host", "disk", "host then disk")
DECLARATION = Declaration(device_nbytes=1 << 30, host_fields=frozenset({"kept", "kept buffer"}))

NOT_TOLD = {
    "graph": "what it keeps of others cannot be seen",
    "over a part of the array": "whose memory it is cannot be seen, so its own part of it counts",
    "over a part beside it": "the same",
    "over a part of the buffer": "the same",
    "over the tensor's head": "the same",
    "array over bytes": "of bytes nobody can tell whether they are gone",
    "array in a file": "the world did not make it",
}
"""Values of which the books count something else than the world knows, and why."""

CYCLES = {"holds itself", "tuple that holds itself"}
"""Values that only the garbage collector ends."""


def alone(session, u, v):
    session.attrs.update(u=u, v=v)


def nested(session, u, v):
    session.attrs.update(u=[u, (v,)], v=v, again={"u": u, "v": [v]})


def on_both_sides(session, u, v):
    session.attrs.update(u=u, kept=[v, u], v=[v])


def in_buffers(session, u, v):
    session.put("buffer", LatentBuffer()).replace([u, v])
    session.put("ring", LatentBuffer()).replace([v, u], maxlen=4)
    session.put("kept buffer", LatentBuffer()).replace([u])
    session.attrs["u"] = u


def with_aliases_of_buffers(session, u, v):
    in_buffers(session, u, v)
    session.attrs.update(alias=session.get("ring").container, kept=[session.get("buffer").container])


ARRANGEMENTS = (alone, nested, on_both_sides, in_buffers, with_aliases_of_buffers)


class Case:
    """One session with two values of a world that nobody else holds."""

    def __init__(self, disk, route, arrange, names):
        self.route, self.world = route, World()
        self.manager = SessionStateManager(
            tier=None if route == "disk" else HostTier(budget=1 << 30),
            disk=None if route == "host" else disk,
            declaration=DECLARATION,
        )
        with self.manager.lease("s") as session:
            arrange(session, *(ODD[name](self.world) for name in names))
            self.before = of_session(session)
        self.world.let_go()

    def park(self):
        try:
            self.manager.park("s")
        except CannotParkError:
            assert self.route == "disk"
        if self.route == "host then disk":
            self.manager.offloader.flush_to_disk()
        self.manager.check()

    @property
    def places(self):
        return [entry.place for entry in self.manager.listing()]

    def nbytes(self):
        """What the books say that is in memory of the session, without what was copied to host memory."""
        stats = self.manager.stats()
        return stats["total_nbytes"] - stats["host_parked_nbytes"]

    def end(self):
        """What the session is now."""
        with self.manager.lease("s") as session:
            after = of_session(session)
        self.manager.check()
        self.manager.drop_all()
        return after


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    tier = DiskTier(tmp_path_factory.mktemp("odd"), budget=1 << 30)
    yield tier
    tier.check()
    tier.close()


@contextmanager
def no_collector():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@st.composite
def nests(draw):
    """A way to arrange some odd values of one world: in containers that names of both sides share."""
    names = draw(st.lists(st.sampled_from(sorted(ODD)), min_size=1, max_size=4))
    makers = {
        "list": list,
        "tuple": tuple,
        "ring": deque,
        "dict": lambda items: dict(enumerate(items)),
        "pair": lambda items: Pair(items[0], items[-1]),
        "stranger": Stranger,
    }
    plans = [
        (draw(st.sampled_from(sorted(makers))), draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
        for _ in range(draw(st.integers(0, 5)))
    ]
    places = draw(st.dictionaries(st.sampled_from(["a", "b", "c", "kept"]), st.integers(0, 9), min_size=1))
    buffered = draw(st.lists(st.integers(0, 9), max_size=3))

    def arrange(session, *values):
        made = list(values)
        for kind, items in plans:
            made.append(makers[kind]([made[item % len(made)] for item in items]))
        session.put("buffer", LatentBuffer()).replace([made[item % len(made)] for item in buffered])
        session.attrs.update((name, made[place % len(made)]) for name, place in places.items())

    return names, arrange


def check_trip(disk, route, arrange, names):
    case = Case(disk, route, arrange, names)
    case.park()
    assert case.end() == case.before, (route, arrange.__name__, names)


def check_value(disk, name):
    """One value, in each way that it can stand in a session, by each route."""
    for route, arrange in itertools.product(ROUTES, ARRANGEMENTS):
        check_trip(disk, route, arrange, (name, "None"))
        check_trip(disk, route, arrange, (name, name))


def check_books(disk, name):
    """The books of one value against a walk of what is alive."""
    for route, arrange in itertools.product(ROUTES, ARRANGEMENTS):
        case = Case(disk, route, arrange, (name, "None"))
        before = case.nbytes()
        told = before if name in NOT_TOLD else case.world.alive()
        assert before == told, (route, arrange.__name__)
        case.park()
        told = before if name in NOT_TOLD and "disk" not in case.places else case.world.alive()
        assert case.nbytes() == told, (route, arrange.__name__)
        (entry,) = case.manager.listing()
        if entry.place != "device":
            assert sum(entry.nbytes.values()) == case.nbytes(), "an operator sees the same"
        if entry.place == "disk" and name not in CYCLES:
            assert case.nbytes() == 0, "nobody else holds it"
        case.end()


@pytest.mark.parametrize("name", ODD)
def test_what_comes_back_is_what_left(disk, name):
    with no_collector():
        check_value(disk, name)


@pytest.mark.parametrize("name", COUNTED)
def test_what_stays_is_counted_and_what_goes_dies_without_the_garbage_collector(disk, name):
    with no_collector():
        check_books(disk, name)


@given(nests(), st.sampled_from(ROUTES))
@sized(3000)
def test_any_nest_of_them_comes_back_as_it_was(disk, nest, route):
    names, arrange = nest
    check_trip(disk, route, arrange, names)


def test_what_two_values_share_they_share_again(disk):
    pairs = list(itertools.combinations(ODD, 2))
    random.Random(0).shuffle(pairs)
    for number, names in enumerate(pairs[: count(len(pairs))]):
        for place, route in enumerate(ROUTES):
            arrange = ARRANGEMENTS[(number + place) % len(ARRANGEMENTS)]
            check_trip(disk, route, arrange, names if number % 2 else names[::-1])

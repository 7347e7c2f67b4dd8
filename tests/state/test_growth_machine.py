"""Append buffers that share memory, changed in every way that a list allows: the books are a recount."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from profiles import sized
from test_growth import allocated

from vllm_omni_session_state import LatentBuffer, SessionStateManager
from vllm_omni_session_state.accounting import append_list
from vllm_omni_session_state.accounting.footprint import footprint
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.state.session import Declaration

KEYS = st.sampled_from(["a", "b"])
BUFFERS = st.sampled_from(["film", "score", "latents"])
ON_HOST = frozenset({"film", "score", "note"})
ITEMS = st.integers(0, 11)
PLACES = st.integers(-3, 3)
SLICES = st.builds(slice, st.none() | PLACES, st.none() | PLACES, st.sampled_from([None, 1, 2, -1]))


class GrowthMachine(RuleBasedStateMachine):
    """Two sessions whose append buffers share memory in every way; each change is settled and recounted."""

    @initialize()
    def start(self):
        self.manager = SessionStateManager(
            tier=HostTier(budget=1 << 20), declaration=Declaration(device_nbytes=1 << 20, host_fields=ON_HOST)
        )
        self.array = np.zeros(60, np.uint8)
        plain = [torch.zeros(5 + n, dtype=torch.uint8) for n in range(3)]
        within = [torch.from_numpy(self.array[start : start + 20]) for start in (0, 10, 20, 40)]
        self.items = [*plain, *within, plain[0][2:], [plain[1]], None, self.array, {"k": plain[2]}]

    def fresh(self, item):
        """One of the shared values; for the last two indices also memory of its own."""
        return torch.zeros(3, dtype=torch.uint8) if item >= 10 else self.items[item]

    def use(self, key, name, change):
        with self.manager.lease(key) as session:
            buffer = session.get_or_create(name, allocated, LatentBuffer)
            change(buffer)

    def write(self, key, name, change):
        self.use(key, name, lambda buffer: change(buffer.container))

    @rule(key=KEYS, name=BUFFERS, items=st.lists(ITEMS, max_size=3), how=st.sampled_from("aei"))
    def put_behind(self, key, name, items, how):
        def change(chunks):
            values = [self.fresh(item) for item in items]
            if how == "a":
                for value in values:
                    chunks.append(value)
            elif how == "e":
                chunks.extend(values)
            else:
                chunks += values

        self.write(key, name, change)

    @rule(key=KEYS, name=BUFFERS, item=ITEMS, at=PLACES)
    def insert(self, key, name, item, at):
        self.write(key, name, lambda chunks: chunks.insert(at, self.fresh(item)))

    @rule(key=KEYS, name=BUFFERS, item=ITEMS, at=PLACES, how=st.sampled_from(["set", "del", "pop"]))
    def change_one(self, key, name, item, at, how):
        def change(chunks):
            if -len(chunks) <= at < len(chunks):
                if how == "set":
                    chunks[at] = self.fresh(item)
                elif how == "del":
                    del chunks[at]
                else:
                    chunks.pop(at)

        self.write(key, name, change)

    @rule(key=KEYS, name=BUFFERS, items=st.lists(ITEMS, max_size=3), where=SLICES, gone=st.booleans())
    def change_a_slice(self, key, name, items, where, gone):
        def change(chunks):
            if gone:
                del chunks[where]
            elif where.step in (None, 1):
                chunks[where] = [self.fresh(item) for item in items]
            else:
                chunks[where] = [self.fresh(item) for item, _ in zip([*items, 0] * 9, chunks[where])]  # noqa: B905

        self.write(key, name, change)

    @rule(key=KEYS, name=BUFFERS, how=st.sampled_from(["clear", "reverse", "sort", "double", "none", "init"]))
    def change_all(self, key, name, how):
        def change(chunks):
            if how == "sort":
                chunks.sort(key=id)
            elif how == "double":
                chunks *= 2
                del chunks[8:]
            elif how == "none":
                chunks *= 0
            elif how == "init":
                chunks.__init__(chunks[:2])
            else:
                getattr(chunks, how)()

        self.write(key, name, change)

    @rule(key=KEYS, name=BUFFERS)
    def remove_the_first_none(self, key, name):
        self.write(key, name, lambda chunks: chunks.remove(None) if chunks and chunks[0] is None else None)

    @rule(key=KEYS, name=BUFFERS)
    def a_sort_that_fails(self, key, name):
        def change(chunks):
            with pytest.raises(ZeroDivisionError):
                chunks.sort(key=lambda _: 1 // 0)

        self.write(key, name, lambda chunks: change(chunks) if chunks else None)

    @rule(key=KEYS, name=BUFFERS, item=ITEMS, start=st.integers(0, 2))
    def assign_a_copy_and_write_to_both(self, key, name, item, start):
        def change(buffer):
            old = buffer.container
            buffer.replace(old[start:])
            buffer.container.append(self.fresh(item))
            old.clear()

        self.use(key, name, change)

    @rule(key=KEYS, name=BUFFERS, item=ITEMS, commit=st.booleans())
    def stage(self, key, name, item, commit):
        def change(buffer):
            buffer.stage(self.fresh(item))
            if commit:
                buffer.commit()

        self.use(key, name, change)

    @rule(key=KEYS, name=BUFFERS, how=st.sampled_from(["evict", "reset"]))
    def release(self, key, name, how):
        self.use(key, name, lambda buffer: getattr(buffer, how)())

    @rule(key=KEYS, name=st.sampled_from(["x", "note"]), item=ITEMS)
    def assign(self, key, name, item):
        with self.manager.lease(key) as session:
            session.attrs[name] = self.fresh(item)

    @rule(key=KEYS, name=BUFFERS)
    def carry_the_list_itself(self, key, name):
        with self.manager.lease(key) as session:
            session.attrs["x"] = session.get_or_create(name, allocated, LatentBuffer).container

    @rule(key=KEYS, item=ITEMS)
    def settle_inside_of_a_use(self, key, item):
        with self.manager.lease(key) as session:
            for name in ("film", "latents"):
                session.get_or_create(name, allocated, LatentBuffer).container.append(self.fresh(item))
                self.manager.settle(session)

    @rule(key=KEYS)
    def park_and_restore(self, key):
        session = self.manager.peek(key)
        if session is not None and not session.staging:
            assert self.manager.park(key)
            self.manager.check()
            self.manager.prepare(key)
            with self.manager.lease(key):
                pass

    @rule(key=KEYS)
    def drop(self, key):
        self.manager.drop_session(key)

    @invariant()
    def figures_are_a_recount(self):
        self.manager.check()
        stats = self.manager.stats()
        held = [session for session in map(self.manager.peek, "ab") if session is not None]
        everything = [footprint(*session.contents()) for session in held]
        total = {each for found in everything for each in found.allocations}
        both = sum(found.nbytes for found in everything) - nbytes(total)
        assert stats["total_nbytes"] == stats.get("nbytes:cpu", 0) == nbytes(total)
        assert stats["shared_nbytes"] == both, "two sessions"
        assert (
            stats["staged_nbytes"] == footprint(*[o.staged for s in held for o in s.objects.values()]).nbytes
        )
        accounts = self.manager._table.accounts
        assert accounts.host_nbytes() == footprint(*[s.contents(only=ON_HOST) for s in held]).nbytes
        assert accounts.idle_nbytes() == footprint(*[s.contents(without=ON_HOST) for s in held]).nbytes

    def teardown(self):
        if hasattr(self, "manager"):
            self.manager.drop_all()
            assert self.manager.stats()["total_nbytes"] == 0
            assert self.manager._table.accounts.host_nbytes() == 0
            self.manager.check()


def nbytes(allocations):
    return sum(each.nbytes for each in allocations)


@pytest.fixture(autouse=True, params=[0, 2], ids="short {}".format)
def a_few_chunks_are_many(request, monkeypatch):
    monkeypatch.setattr(append_list, "SHORT", request.param)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="vllm_omni.session_state")


def test_after_any_change_to_any_list_the_figures_are_a_recount():
    run_state_machine_as_test(GrowthMachine, settings=sized(1000, stateful_step_count=30))

"""Footprints of random nests over shared memory, against an oracle that knows every allocation."""

from __future__ import annotations

import pytest
import torch
from byte_oracle import Box, apart, per_device, pinned_starts, reach, worlds
from hypothesis import given
from hypothesis import strategies as st
from profiles import sized

from vllm_omni_session_state.accounting.footprint import footprint, register_children

register_children(Box, lambda box: (box.held,))


@pytest.fixture(scope="module", autouse=True)
def pretended_pinned_memory():
    """Take the storages that the oracle names for page-locked, on a machine that can lock none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_pinned", lambda t: t.untyped_storage().data_ptr() in pinned_starts)
        patch.setattr(torch.UntypedStorage, "is_pinned", lambda s: s.data_ptr() in pinned_starts)
        yield


@sized(10_000)
@given(st.data())
def test_a_footprint_is_exactly_the_allocations_that_the_values_keep_alive(data):
    nodes = data.draw(worlds())
    roots = data.draw(st.lists(st.sampled_from(nodes), max_size=3))
    found = footprint(*(root.value for root in roots))
    expected = reach(roots)
    assert found.allocations == tuple(sorted(expected))
    assert found.nbytes_by_device() == per_device(expected)
    assert found.nbytes == sum(per_device(expected).values())


@sized(1_000)
@given(st.data())
def test_a_footprint_changes_nothing_and_comes_out_the_same_again(data):
    nodes = data.draw(worlds())
    values = [node.value for node in nodes]
    first = footprint(*values)
    assert footprint(*values) == first
    assert footprint(*reversed(values)) == first
    assert footprint(values, *values).allocations == first.allocations


@sized(1_000)
@given(st.data())
def test_a_value_reached_twice_counts_once(data):
    nodes = data.draw(worlds())
    split = data.draw(st.integers(0, len(nodes)))
    halves = [footprint(*(node.value for node in half)) for half in (nodes[:split], nodes[split:])]
    together = footprint(*(node.value for node in nodes))
    assert set(together.allocations) == apart({each for half in halves for each in half.allocations})

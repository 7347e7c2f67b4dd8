"""What the in-tree accounting of vLLM-Omni gets wrong about bytes, row by row, as it must be.

The rows of `benchmarks.in_tree_faults` are run on our manager and on the host's; below, the same of the walk
and the ledger alone.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.in_tree_faults import ROWS, in_tree, ours
from vllm_omni_session_state.accounting.footprint import footprint, register_children
from vllm_omni_session_state.accounting.ledger import Ledger


@dataclass
class Frame:
    pixels: object


CASES = {
    "array from a tensor": (lambda: torch.zeros(10).numpy(), 40),
    "array over a buffer": (lambda: np.frombuffer(bytearray(64), np.uint8)[10:20], 64),
    "tensor in a set": (lambda: {torch.zeros(10)}, 40),
    "tensor in a dataclass": (lambda: Frame(torch.zeros(10)), 40),
    "tensor as a key": (lambda: {torch.zeros(10): 1}, 40),
    "sparse tensor": (lambda: torch.eye(3).to_sparse(), 3 * 16 + 3 * 4),
    "view of a view": (lambda: np.zeros(100, np.uint8).view(np.matrix)[:, :10].view(np.ndarray), 100),
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_our_manager_gets_the_row_right(row):
    assert row.run(ours) == row.right


@pytest.mark.host
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_in_tree_manager_gets_the_row_wrong(row):
    """Else the row is no fault any more and leaves the table."""
    assert row.figure(in_tree) != row.right


@pytest.mark.parametrize("name", CASES)
def test_it_is_counted(name):
    make, nbytes = CASES[name]
    assert footprint([make()]).nbytes_by_device() == {"cpu": nbytes}


def test_a_tensor_in_an_object_is_reported_and_counted_once_its_type_is_registered():
    class Holder:
        held = None

    holder = Holder()
    holder.held = torch.zeros(10)
    assert footprint(holder).nbytes == 0
    assert footprint(holder).opaque == {f"{__name__}.{Holder.__qualname__}"}
    register_children(Holder, lambda value: (value.held,))
    assert footprint(holder).nbytes == 40
    assert not footprint(holder).opaque


def test_a_list_that_contains_itself_is_walked_once():
    knot = [torch.zeros(10)]
    knot.append(knot)
    assert footprint(knot).nbytes == 40


def test_two_meta_tensors_are_nothing_and_not_one():
    assert footprint(torch.zeros(4, device="meta"), torch.zeros(8, device="meta")).nbytes == 0


def test_a_staged_payload_is_charged_to_its_own_ledger():
    table, staged = Ledger(), Ledger()
    content, payload = torch.zeros(4), torch.zeros(8)
    table.charge("session", footprint(content).allocations)
    staged.charge("session", footprint(payload).allocations)
    assert (table.nbytes_by_device(), staged.nbytes_by_device()) == ({"cpu": 16}, {"cpu": 32})


def test_a_held_session_that_left_the_table_is_still_counted():
    table, detached = Ledger(), Ledger()
    held = footprint(torch.zeros(4)).allocations
    table.charge(("id", 1), held)
    detached.charge(("id", 1), held)
    table.charge(("id", 1), ())
    table.charge(("id", 2), footprint(torch.zeros(8)).allocations)  # the same id, used again
    assert detached.nbytes_by_device() == {"cpu": 16}
    assert table.nbytes_by_device() == {"cpu": 32}


def test_evicting_one_alias_frees_nothing_and_the_books_say_so():
    shared, own = torch.zeros(100), torch.zeros(10)
    books = Ledger()
    books.charge("a", footprint(shared[:10], own).allocations)
    books.charge("b", footprint(OrderedDict(view=shared.view(10, 10))).allocations)
    assert books.freed_without(["a"]) == {"cpu": 40}
    books.charge("a", ())
    assert books.nbytes_by_device() == {"cpu": 400}


def test_what_is_freed_is_never_negative_and_sums_to_what_was_charged():
    books, kept = Ledger(), [torch.zeros(n) for n in range(1, 20)]
    for name in range(10):
        books.charge(name, footprint(kept[name : name + 10]).allocations)
    left = [books.nbytes_by_device()["cpu"]]
    for name in (3, 9, 0, 1, 8, 2, 7, 4, 5, 6):
        freed = books.freed_without([name]).get("cpu", 0)
        books.charge(name, ())
        left.append(books.nbytes_by_device().get("cpu", 0))
        assert 0 <= freed == left[-2] - left[-1]
    assert left[-1] == 0


def test_a_budget_counts_the_bytes_of_its_own_pool():
    books = Ledger()
    books.charge("a", footprint(torch.zeros(4), np.zeros(4)).allocations)
    assert set(books.nbytes_by_device()) == {"cpu"}
    assert books.freed_without(["a"]).get("cuda:0", 0) == 0

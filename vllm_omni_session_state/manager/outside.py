"""What vLLM-Omni keeps of sessions outside of them: charged by name, and walked only where it is another."""

from __future__ import annotations

import weakref
from operator import is_
from typing import Any

import torch

from vllm_omni_session_state.accounting.append_list import is_plain
from vllm_omni_session_state.accounting.footprint import footprint
from vllm_omni_session_state.manager.table import Table

_address = torch.Tensor.data_ptr
_Seen = tuple[list["weakref.ref[torch.Tensor]"], list[int]]


class Outside:
    """What is kept outside of one manager's sessions.

    Args:
        table: With the accounts.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        # The tensors of the last charge and where they were. A weak reference keeps nothing alive, and never
        # mistakes another tensor at a recycled address for the one that was there.
        self._seen: dict[str, _Seen] = {}

    def charge(self, name: str, *values: object) -> None:
        """Say what is kept under a name; no values: nothing any more.

        Tensors, or lists of tensors, that are the same as the last time are not walked again.
        """
        items: list[Any] = []
        for value in values:
            items += value if type(value) is list else (value,)
        items = [item for item in items if item is not None]
        if name in self._seen:
            tensors, addresses = self._seen[name]
            same = len(items) == len(tensors) and all(map(is_, [tensor() for tensor in tensors], items))
            if same and list(map(_address, items)) == addresses:
                return
        allocations = footprint(*values).allocations
        with self._table.lock:
            self._table.accounts.charge_outside(name, allocations)
            self._seen.pop(name, None)
            if all(map(is_plain, items)):
                self._seen[name] = list(map(weakref.ref, items)), list(map(_address, items))

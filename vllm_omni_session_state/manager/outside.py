"""What vLLM-Omni keeps of sessions outside of them: charged by name, and walked only where it is another."""

from __future__ import annotations

from vllm_omni_session_state.accounting.footprint import footprint
from vllm_omni_session_state.accounting.identity_cache import UnchangedTensors, is_plain, items_of
from vllm_omni_session_state.manager.table import Table


class Outside:
    """What is kept outside of one manager's sessions.

    Args:
        table: With the accounts.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._glances: dict[str, UnchangedTensors | None] = {}

    def charge(self, name: str, *values: object) -> None:
        """Say what is kept under a name; no values: nothing any more.

        Tensors, or lists of tensors, that are the same as the last time are not walked again.
        """
        items = items_of(values)
        last = self._glances.get(name)
        if last is not None and last.same(items):
            return
        regions = footprint(*values).regions
        glance = UnchangedTensors(items) if all(map(is_plain, items)) else None
        with self._table.lock:
            self._table.accounts.charge_outside(name, regions)
            self._glances[name] = glance

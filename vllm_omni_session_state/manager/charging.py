"""A settlement: a session is charged for what it holds now, each kind of value where it lives.

It costs as much as what changes: of a list that is only appended to, what came since the last time.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from vllm_omni_session_state.accounting.accounts import Accounts, Held
from vllm_omni_session_state.accounting.append_list import Appended, scan_appended
from vllm_omni_session_state.accounting.footprint import NOTHING, footprint
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.manager.table import Table
from vllm_omni_session_state.offload.host_tier import HostAllocation
from vllm_omni_session_state.offload.parking import Parked
from vllm_omni_session_state.state.session import Declaration, SessionState, host_fields


class Charge(NamedTuple):
    """What a session holds, and what of it came to its growing lists; see ``settle()``."""

    held: Held
    appended: Appended | None = None

    def settle(self, accounts: Accounts, session: SessionState) -> None:
        """Tell the accounts. Lock held."""
        if self.appended is not None:
            self.appended.join()
            session.log = self.appended.log
        accounts.settle(session.serial, self.held)


def charge_session(session: SessionState, table: Table, declaration: Declaration | None) -> None:
    """Charge a session for what it holds now; the table's lock is taken. Never raises, see ``measure()``."""
    charge = measure(session, declaration)
    with table.lock:
        charge.settle(table.accounts, session)
        table.note(session.key)


def measure(session: SessionState, declaration: Declaration | None) -> Charge:
    """What a session holds now. Never raises: it runs after a forward's own body."""
    device, host, engine, staged = session.parts(host_fields(declaration))
    # One role's lists may grow; lists of the other one beside them are walked as any value is.
    growing, still = (host, device) if host.lists else (device, host)
    still.values.extend(still.lists)
    last, session.log = session.log, None  # the process may be stopped, and leave half of what it should be
    appended = None
    if growing.lists:
        appended = scan_appended(growing.lists, last)
        growing.values.extend(appended.rest)
    on_device = footprint(*device.values)
    on_host = footprint(*host.values) if host.values else NOTHING
    in_pool = footprint(*engine) if engine else NOTHING
    in_window = footprint(*staged) if staged else NOTHING
    for kind in on_device.opaque | on_host.opaque | in_pool.opaque | in_window.opaque:
        log_once(
            logging.WARNING,
            ("opaque", kind),
            "a session holds a %s: what is inside it cannot be seen and counts as 0 bytes; "
            "footprint.register_children() opens a type",
            kind,
        )
    if declaration is not None:
        nbytes = on_device.nbytes
        if appended is not None and growing is device:
            nbytes = sum(appended.log.nbytes_with((*on_device.allocations, *appended.found)).values())
        if nbytes > declaration.device_nbytes:
            log_once(
                logging.WARNING,
                ("declared",),
                "session %s holds %d bytes on the device and its model declared %d: vLLM-Omni reserves too "
                "little, and a full pool can run out of memory",
                display_id(session.key),
                nbytes,
                declaration.device_nbytes,
            )
    held = Held(
        device=on_device.allocations,
        host=on_host.allocations,
        engine=in_pool.allocations,
        staged=in_window.allocations,
        log=None if appended is None else appended.log,
        log_on_host=growing is host,
    )
    return Charge(held, appended)


def charge_of(session: SessionState, parked: Parked) -> Charge:
    """What a session holds that is parked like that."""
    slab = parked.held.slab if isinstance(parked.held, HostAllocation) else None
    device, host = (footprint(*values).allocations for values in parked.in_place(session))
    return Charge(Held(device, host, parcel=footprint(slab).allocations))

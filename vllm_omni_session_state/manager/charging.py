"""A settlement: a session is charged for what it holds now, each kind of value where it lives.

It costs as much as what changes: of a list that is only appended to, what came since the last time.
"""

from __future__ import annotations

import logging

from vllm_omni_session_state.accounting.accounts import Held
from vllm_omni_session_state.accounting.append_list import scan_appended
from vllm_omni_session_state.accounting.footprint import NOTHING, footprint
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.manager.table import Table
from vllm_omni_session_state.offload.host_tier import HostAllocation
from vllm_omni_session_state.offload.parking import Parked
from vllm_omni_session_state.state.session import Declaration, SessionState

_NONE: frozenset[str] = frozenset()


def charge_session(session: SessionState, table: Table, declaration: Declaration | None) -> None:
    """Charge a session. Never raises: it runs after a forward's own body.

    Args:
        session: Whose.
        table: With the accounts; its lock is taken.
        declaration: What the model declared of one session.
    """
    device, host, engine, staged = session.roles(_NONE if declaration is None else declaration.host_fields)
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
    with table.lock:
        if appended is not None:
            appended.join()
            session.log = appended.log
        held = Held(
            device=on_device.allocations,
            host=on_host.allocations,
            engine=in_pool.allocations,
            staged=in_window.allocations,
            log=session.log,
            log_on_host=growing is host,
        )
        table.accounts.settle(session.serial, held)
        table.note(session.key)
    for kind in on_device.opaque | on_host.opaque | in_pool.opaque | in_window.opaque:
        log_once(
            logging.WARNING,
            ("opaque", kind),
            "a session holds a %s: what is inside it cannot be seen and counts as 0 bytes; "
            "footprint.register_children() opens a type",
            kind,
        )
    if held.log is None or held.log_on_host:
        nbytes = on_device.nbytes
    else:
        nbytes = sum(held.log.nbytes_with(held.device).values())
    if declaration is not None and nbytes > declaration.device_nbytes:
        log_once(
            logging.WARNING,
            ("declared",),
            "session %s holds %d bytes on the device and its model declared %d: vLLM-Omni reserves too "
            "little, and a full pool can run out of memory",
            display_id(session.key),
            nbytes,
            declaration.device_nbytes,
        )


def charge_of(session: SessionState, parked: Parked) -> Held:
    """What a session holds that is parked like that."""
    slab = parked.held.slab if isinstance(parked.held, HostAllocation) else None
    device, host = parked.in_place(session)
    return Held(
        *(footprint(*device).allocations, footprint(*host).allocations), parcel=footprint(slab).allocations
    )

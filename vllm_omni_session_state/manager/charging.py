"""A settlement: a session is charged for what it holds now, each kind of value where it lives.

It costs as much as what changes: of a list that is only appended to, what came since the last time.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from vllm_omni_session_state.accounting.accounts import Accounts
from vllm_omni_session_state.accounting.append_tracking import Appended, scan_appended
from vllm_omni_session_state.accounting.footprint import NOTHING, footprint
from vllm_omni_session_state.accounting.regions import Region
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.manager.table import Table
from vllm_omni_session_state.offload.host_tier import HostAllocation
from vllm_omni_session_state.offload.parking import Parked
from vllm_omni_session_state.state.session import Declaration, SessionState, host_fields


class Charge(NamedTuple):
    """What a session holds: on the device, in host memory by its model, parked there; see ``settle()``."""

    device: tuple[Region, ...]
    host: tuple[Region, ...]
    parcel: tuple[Region, ...] = ()
    engine: tuple[Region, ...] = ()
    staged: tuple[Region, ...] = ()
    growth: Appended | None = None
    growth_on_host: bool = False

    def settle(self, accounts: Accounts, session: SessionState) -> None:
        """Tell the accounts. Lock held."""
        try:
            accounts.settle(session.serial, **self._asdict())
        except BaseException:  # the process is stopped, and the pile may be half of what it should be
            session.pile = None
            raise


def charge_session(session: SessionState, table: Table, declaration: Declaration | None) -> None:
    """Charge a session for what it holds now; the table's lock is taken. Never raises, see ``measure()``."""
    charge = measure(session, declaration)
    with table.lock:
        charge.settle(table.accounts, session)
        table.note(session.key)


def measure(session: SessionState, declaration: Declaration | None) -> Charge:
    """What a session holds now. Never raises: it runs after a forward's own body."""
    try:
        return _measure(session, declaration)
    except BaseException:  # the process is stopped, and the pile may be half of what it should be
        session.pile = None
        raise


def _measure(session: SessionState, declaration: Declaration | None) -> Charge:
    on_device, on_host, engine = session.parts(host_fields(declaration))
    # One role's lists may grow; lists of the other one beside them are walked as any value is.
    growing, still = (on_host, on_device) if on_host.lists else (on_device, on_host)
    still.values.extend(still.lists)
    growth: Appended | None = None
    if growing.lists:
        growth = scan_appended(growing.lists, session.pile)
        growing.values.extend(growth.rest)
    session.pile = None if growth is None else growth.pile
    pile = None if growing is on_host else session.pile
    device = footprint(*on_device.values)
    host = footprint(*on_host.values) if on_host.values else NOTHING
    owned = footprint(*engine.values) if engine.values else NOTHING
    staged = session.staged_footprint()
    found = NOTHING if growth is None else growth.found
    for kind in device.opaque | host.opaque | owned.opaque | staged.opaque | found.opaque:
        log_once(
            logging.WARNING,
            ("opaque", kind),
            "a session holds a %s: what is inside it cannot be seen and counts as 0 bytes; "
            "footprint.register_children() opens a type",
            kind,
        )
    if declaration is not None:
        nbytes = device.nbytes if pile is None else pile.nbytes_with((*device.regions, *found.regions))
        _compare(session, nbytes, declaration.device_nbytes)
    return Charge(
        device=device.regions,
        host=host.regions,
        engine=owned.regions,
        staged=staged.regions,
        growth=growth,
        growth_on_host=growing is on_host,
    )


def _compare(session: SessionState, nbytes: int, declared: int) -> None:
    if nbytes > declared:
        log_once(
            logging.WARNING,
            ("declared",),
            "session %s holds %d bytes on the device and its model declared %d: vLLM-Omni reserves too "
            "little, and a full pool can run out of memory",
            display_id(session.key),
            nbytes,
            declared,
        )


def charge_of(session: SessionState, parked: Parked) -> Charge:
    """What a session holds that is parked like that."""
    slab = parked.held.slab if isinstance(parked.held, HostAllocation) else None
    device, host = parked.in_place(session)
    return Charge(footprint(*device).regions, footprint(*host).regions, footprint(slab).regions)

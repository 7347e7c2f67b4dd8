"""Parking: one session's content goes to a tier and comes back, or nothing has happened.

Decide, then move, then settle: whoever calls has decided that nobody uses the session, and settles its
charge afterwards. The tier holds the bytes before the session lets go of them.

What is freed is judged afterwards. Memory that something outside the session still holds lives on, so it is
taken back: the session finds the very same memory again, and nothing of it counts as freed.

Host memory takes what the model keeps on the device; of it what cannot be taken apart stays where it is. A
file takes all of the session, also what the model keeps in host memory itself, or is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from vllm_omni_session_state.accounting.footprint import footprint
from vllm_omni_session_state.base.ids import display_id, fingerprint
from vllm_omni_session_state.base.log import LOGGER
from vllm_omni_session_state.offload import copy
from vllm_omni_session_state.offload.disk_tier import DiskTier, FileAllocation
from vllm_omni_session_state.offload.host_tier import HostAllocation, HostTier, allocation_of
from vllm_omni_session_state.offload.memory import Array, Memory
from vllm_omni_session_state.offload.pack import Kept, Packed, pack, pack_whole
from vllm_omni_session_state.offload.retained import names_of, say_what_stays, still_there
from vllm_omni_session_state.offload.schema import Stay, Tree
from vllm_omni_session_state.offload.unpack import prove, unpack
from vllm_omni_session_state.state.session import SessionState

Part = dict[str, dict[str, object]]
"""Some of a session's content, as ``SessionState.part()`` hands it out."""


class Level(Enum):
    """A tier below the device."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class DiskLocation:
    """A session in a file, skeleton included.

    Attributes:
        ticket: The file's.
        devices: Where each of its storages goes back to.
    """

    ticket: FileAllocation
    devices: tuple[torch.device, ...]


@dataclass(frozen=True, slots=True)
class Parked:
    """What is needed to bring a session back.

    Attributes:
        level: The tier that it counts in, the same on all ranks.
        tree: What left without the bytes, and what stayed as it is; ``None`` where the file has it.
        held: The bytes; ``None`` where all of them stayed in place.
        alive: Memory that is still in place, by the index of its storage; it is held here.
        on_host: Of these indices, those of values that the model keeps in host memory.
        stayed: Names of objects that the session did not let go of, beside those in host memory.
    """

    level: Level
    tree: Tree | None
    held: HostAllocation | DiskLocation | None
    alive: dict[int, Memory]
    on_host: frozenset[int] = frozenset()
    stayed: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in its tier."""
        if isinstance(self.held, HostAllocation):
            return len(self.held.slab)
        return 0 if self.held is None else self.held.ticket.nbytes

    @property
    def nbytes_by_device(self) -> dict[str, int]:
        """The same, by the device on which they lie; a file's as of a device ``disk``."""
        if isinstance(self.held, HostAllocation):
            return footprint(self.held.slab).nbytes_by_device()
        return {} if self.held is None else {Level.DISK.value: self.nbytes}

    def in_place(self, session: SessionState) -> tuple[list[object], list[object]]:
        """What of the session stayed where it was: of its device part, and in host memory."""
        nodes: list[Any] = [] if self.tree is None else self.tree.nodes
        device = [node.kept for node in nodes if type(node) is Stay]
        device += session.values(self.stayed.__contains__)
        host = session.values(lambda name: name not in self.stayed)
        for index, memory in list(self.alive.items()):  # a look may come while it is moved on
            (host if index in self.on_host else device).append(memory)
        return device, host


def park(session: SessionState, tier: HostTier, *, on_host: AbstractSet[str], live_nbytes: int) -> Parked:
    """Move a session's device part to host memory. Afterwards every touch of the session raises.

    Args:
        session: Nobody uses it.
        tier: Where to.
        on_host: Names of the values that are in host memory already and stay.
        live_nbytes: Bytes that sessions hold in host memory, which share the tier's budget.

    Raises:
        TierFullError: If the tier has no room.
        MemoryError: If the machine has none. After either, the session is as it was.
    """
    part = session.part(lambda name: name not in on_host)
    packed, stayed = _apart(session, part, on_host)
    parcel = tier.put(packed.storages, live_nbytes=live_nbytes)
    try:
        say_what_stays(packed.kept)
        packed.kept.clear()
        names = names_of(packed.tree)
        watched = dict(enumerate(packed.memory))
        packed.memory.clear()
        parked = Parked(Level.HOST, packed.tree, parcel, watched, stayed=stayed)
        session.let_go(part, parked)
        part.clear()
    except BaseException:
        if not session.parked:
            tier.drop(parcel)
        raise
    watched.update(still_there(watched, names))
    return parked


def park_in_place(session: SessionState, level: Level, *, on_host: AbstractSet[str]) -> Parked:
    """Park a session without moving a byte: where several ranks park and this one cannot move its part.

    What lies in an engine's pool must leave it all the same, or this rank's pool is fuller than the others'.
    If it cannot be taken out, for want of memory, it is given up: to bring the session back then fails, on
    all ranks, until it is closed. A session that has left, before something failed, stays where it went.
    """
    if isinstance(session.gone_to, Parked):
        return session.gone_to
    try:
        part = session.part(lambda name: name not in on_host)
    except Exception as error:  # noqa: BLE001 - of whatever kind: the other ranks have parked theirs by now
        engine = session.engine_names
        part = session.part(lambda name: name not in on_host | engine)
        part["objects"].update(dict.fromkeys(engine))
        LOGGER.error(
            "session %s cannot go on: its KV could not be taken out of the engine's pool: %s: %s; close it",
            display_id(session.key),
            type(error).__name__,
            error,
        )
    packed, stayed = _apart(session, part, on_host)
    parked = Parked(level, packed.tree, None, dict(enumerate(packed.memory)), stayed=stayed)
    session.let_go(part, parked)
    return parked


def overdraft_of(swap: Parked | None, level: Level) -> int:
    """Bytes of a tier that a session gives back when it comes up in exchange for one that goes down."""
    return swap.nbytes if swap is not None and swap.level is level else 0


def park_on_disk(
    session: SessionState, disk: DiskTier, *, on_host: AbstractSet[str], overdraft: int
) -> Parked:
    """Move all of a session to the disk; meanwhile what is on an accelerator takes host memory too.

    Args:
        session: Nobody uses it.
        disk: Where to.
        on_host: Names of the values that are in host memory already.
        overdraft: See ``DiskTier.put()``.

    Raises:
        TierFullError: If the tier has no room.
        TierFaultError: If the file cannot be written.
        NotWritableError: If a value cannot be written to any file.
        MemoryError: If the machine has no room. After any, the session is as it was.
    """
    gone = Parked(Level.DISK, None, None, {})
    return _file(session, gone, session.part(lambda _: True), disk, on_host=on_host, overdraft=overdraft)


def demote(
    session: SessionState, parked: Parked, disk: DiskTier, *, on_host: AbstractSet[str], overdraft: int
) -> Parked:
    """Move a session from host memory on to the disk; its parcel is the caller's to drop.

    Args:
        session: Parked.
        parked: Where.
        disk: Where to.
        on_host: Names of the values that its model keeps in host memory.
        overdraft: See ``DiskTier.put()``.

    Returns:
        Where it is now. What stays in place on this rank stays, and counts there.

    Raises:
        As ``park_on_disk()``, after which it is parked as it was.
    """
    if not isinstance(parked.held, HostAllocation):
        return count_on_disk(session, parked)
    here = session.part(lambda name: name in on_host or name in parked.stayed)
    return _file(session, parked, here, disk, on_host=on_host, overdraft=overdraft)


def count_on_disk(session: SessionState, parked: Parked) -> Parked:
    """Have a session that is parked in host memory count as one on the disk; what it holds stays."""
    moved = dataclasses.replace(parked, level=Level.DISK)
    session.let_go({"attrs": {}, "objects": {}}, moved)
    return moved


def _file(
    session: SessionState,
    gone: Parked,
    here: Part,
    disk: DiskTier,
    *,
    on_host: AbstractSet[str],
    overdraft: int,
) -> Parked:
    """Write a session's file, and let go of all of it; then ``gone`` is empty.

    Args:
        session: Whose.
        gone: What the session has let go of already: its values, and their bytes, if there are any.
        here: What it still holds.
        disk: Where to.
        on_host: Names of the values that the model keeps in host memory.
        overdraft: See ``DiskTier.put()``.
    """
    parcel = gone.held if isinstance(gone.held, HostAllocation) else None
    parts, devices = ([], ()) if parcel is None else (parcel.parts(), parcel.devices)
    packed = pack_whole(here, live=session.live(lambda _: True), base=gone.tree, first=len(parts))
    prove(packed, len(parts))
    pieces = [*parts, *_readable(packed.memory)]
    ticket = disk.put(packed.tree, pieces, session=fingerprint(session.key).hex(), overdraft=overdraft)
    parked: Parked | None = None
    try:
        filed = DiskLocation(ticket, (*devices, *_devices_of(packed.memory)))
        names = names_of(packed.tree)
        watched = {**gone.alive, **dict(enumerate(packed.memory, len(parts)))}
        host = frozenset(index for index in watched if names[index] <= on_host)
        parked = Parked(Level.DISK, None, filed, watched, host)
        session.let_go(here, parked)
    except BaseException:
        if session.gone_to is not parked:
            disk.drop(ticket)
        raise
    session.log = None  # its lists will be others
    for holder in (here, gone.alive, pieces, packed.memory):
        holder.clear()
    if gone.tree is not None:
        gone.tree.nodes.clear()
    watched.update(still_there(watched, names))
    return parked


def _apart(session: SessionState, part: Part, on_host: AbstractSet[str]) -> tuple[Packed, frozenset[str]]:
    """Take a session's device part apart.

    Returns:
        It, and the names of the objects that stay as they are, as something beside them refers to their own
        container; they are taken out of ``part``.
    """
    stayed: frozenset[str] = frozenset()
    while True:
        beside = session.values((on_host | stayed).__contains__)
        live = session.live(lambda name: name not in on_host | stayed)  # noqa: B023 - called at once
        packed = pack(part, beside=beside, live=live)
        if not packed.met:
            break
        stayed |= {live[each] for each in packed.met}
        for name in stayed:
            part["objects"].pop(name, None)
    why = "something else in the session refers to its container"
    for name in stayed:
        packed.kept.extend(Kept(name, value, why) for value in session.values({name}.__contains__))
    return packed, stayed


def restore(parked: Parked, host: HostTier | None, disk: DiskTier | None) -> Part:
    """A parked session's content as ``SessionState.put_back()`` takes it; the session stays parked.

    Raises:
        MemoryError: If the device or the machine has no room.
        TierFaultError: If its file cannot be read, or a bit of it is not as it was written.
    """
    alive, owners = dict[int, torch.UntypedStorage](), dict[int, Array]()
    for index, memory in parked.alive.items():
        if isinstance(memory, torch.UntypedStorage):
            alive[index] = memory
        else:
            owners[index] = memory
    tree, storages = parked.tree, dict(alive)
    if isinstance(parked.held, HostAllocation):
        assert host is not None, "it is in host memory"
        storages = dict(enumerate(host.get(parked.held))) | alive
    elif isinstance(parked.held, DiskLocation):
        assert disk is not None, "it is on the disk"
        contents = disk.get(parked.held.ticket)
        tree = contents.tree
        storages = dict(enumerate(copy.from_host(contents.storages, parked.held.devices))) | alive
    assert tree is not None, "it is not in a file"
    part: Part = unpack(tree, storages, owners=owners)
    return part


def _devices_of(memory: Sequence[Memory]) -> list[torch.device]:
    host = torch.device("cpu")
    return [each.device if isinstance(each, torch.UntypedStorage) else host for each in memory]


def _readable(memory: Sequence[Memory]) -> list[Memory | torch.Tensor]:
    """Memory that a file can be written from; what is not in host memory is copied there."""
    away = [each for each in memory if isinstance(each, torch.UntypedStorage) and each.device.type != "cpu"]
    copies = iter(allocation_of(away).parts() if away else ())
    return [
        each if device.type == "cpu" else next(copies)
        for each, device in zip(memory, _devices_of(memory), strict=True)
    ]

"""Parking: one session's content goes to a tier and comes back, or nothing has happened.

Decide, then move, then settle: whoever calls has decided that nobody uses the session, and settles its
charge afterwards. The tier holds the bytes before the session lets go of them.

What is freed is judged afterwards. A storage that something outside the session still holds lives on, so
it is taken back: the session finds the very same storage again, and nothing of it counts as freed.

Host memory takes what the model keeps on the device. A file takes all of the session, also what the model
keeps in host memory itself.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from vllm_omni_session_state import rebuild, skeleton, transfer
from vllm_omni_session_state.events import LOGGER, say_once
from vllm_omni_session_state.ids import fingerprint, shown
from vllm_omni_session_state.pack import TensorSlot, pack, unpack
from vllm_omni_session_state.session import SessionState
from vllm_omni_session_state.tiers.disk import DiskTier, Ticket
from vllm_omni_session_state.tiers.host import HostTier, Parcel, parcel_of

Part = dict[str, dict[str, object]]
"""Some of a session's content, as ``SessionState.part()`` hands it out."""


class Level(Enum):
    """A tier below the device."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Filed:
    """A session in a file, skeleton included.

    Attributes:
        ticket: The file's.
        devices: Where each of its storages goes back to.
    """

    ticket: Ticket
    devices: tuple[torch.device, ...]


@dataclass(frozen=True, slots=True)
class Parked:
    """What is needed to bring a session back.

    Attributes:
        level: The tier that it counts in, the same on all ranks.
        skeleton: What left without the bytes; ``None`` where the file has it.
        held: The bytes; ``None`` where all of them stayed in place.
        alive: Storages that are still in place, by their index; they are held here.
    """

    level: Level
    skeleton: Any
    held: Parcel | Filed | None
    alive: dict[int, torch.UntypedStorage]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in its tier."""
        if isinstance(self.held, Parcel):
            return len(self.held.slab)
        return 0 if self.held is None else self.held.ticket.nbytes


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
    packed = pack(part)
    parcel = tier.put(packed.storages, live_nbytes=live_nbytes)
    storages = dict(enumerate(packed.storages))
    packed.storages.clear()
    session.let_go(part)
    del part
    return Parked(Level.HOST, packed.skeleton, parcel, _still_there(storages, packed.skeleton))


def park_in_place(session: SessionState, level: Level, *, on_host: AbstractSet[str]) -> Parked:
    """Park a session without moving a byte: where several ranks park and this one cannot move its part.

    What lies in an engine's pool must leave it all the same, or this rank's pool is fuller than the others'.
    If it cannot be taken out, for want of memory, it is given up: to bring the session back then fails, on
    all ranks, until it is closed.
    """
    try:
        part = session.part(lambda name: name not in on_host)
    except Exception as error:  # noqa: BLE001 - of whatever kind: the other ranks have parked theirs by now
        engine = session.engine_names
        part = session.part(lambda name: name not in on_host | engine)
        part["objects"].update(dict.fromkeys(engine))
        LOGGER.error(
            "session %s cannot go on: its KV could not be taken out of the engine's pool: %s: %s; close it",
            shown(session.key),
            type(error).__name__,
            error,
        )
    packed = pack(part)
    session.let_go(part)
    return Parked(level, packed.skeleton, None, dict(enumerate(packed.storages)))


def lent_by(swap: Parked | None, level: Level) -> int:
    """Bytes of a tier that a session gives back when it comes up in exchange for one that goes down."""
    return swap.nbytes if swap is not None and swap.level is level else 0


def park_on_disk(
    session: SessionState, disk: DiskTier, *, on_host: AbstractSet[str], lent: int = 0
) -> Parked:
    """Move all of a session to the disk; meanwhile its device part takes host memory too.

    Args:
        session: Nobody uses it.
        disk: Where to.
        on_host: Names of the values that are in host memory already.
        lent: See ``DiskTier.put()``.

    Raises:
        TierFullError: If the tier has no room.
        TierFaultError: If the file cannot be written.
        NotWritableError: If a value cannot be written to any file.
        MemoryError: If the machine has no room. After any, the session is as it was.
    """
    part = session.part(lambda name: name not in on_host)
    packed = pack(part)
    storages = dict(enumerate(packed.storages))
    packed.storages.clear()
    ours = [*storages.values()]
    going = _Going(packed.skeleton, ours, storages, part)
    return _file(session, going, disk, on_host=on_host, lent=lent, parcel=lambda: parcel_of(ours))


def sink(
    session: SessionState, parked: Parked, disk: DiskTier, *, on_host: AbstractSet[str], lent: int = 0
) -> Parked:
    """Move a session from host memory on to the disk; its parcel is the caller's to drop.

    Args:
        session: Parked.
        parked: Where.
        disk: Where to.
        on_host: Names of the values that its model keeps in host memory.
        lent: See ``DiskTier.put()``.

    Returns:
        Where it is now. What stays in place on this rank stays, and counts there.

    Raises:
        As ``park_on_disk()``, after which it is parked as it was.
    """
    parcel = parked.held
    if not isinstance(parcel, Parcel):
        return dataclasses.replace(parked, level=Level.DISK)
    ours = [parked.alive.get(index, part.untyped_storage()) for index, part in enumerate(parcel.parts())]
    going = _Going(parked.skeleton, ours, parked.alive, {"attrs": {}, "objects": {}})
    return _file(session, going, disk, on_host=on_host, lent=lent, parcel=lambda: parcel)


@dataclass(frozen=True, slots=True)
class _Going:
    """What of a session is written to a file beside its host values.

    Attributes:
        bones: The skeleton of what is, or was, on the device.
        ours: Its storages.
        in_place: Those of them that are still where they were, by index.
        part: What is still on the device and to be let go of.
    """

    bones: Any
    ours: list[torch.UntypedStorage]
    in_place: dict[int, torch.UntypedStorage]
    part: Part


def _file(
    session: SessionState,
    going: _Going,
    disk: DiskTier,
    *,
    on_host: AbstractSet[str],
    lent: int,
    parcel: Callable[[], Parcel],
) -> Parked:
    """Write a session's file, and let go of all of it; what ``going`` holds is emptied.

    Args:
        session: Whose.
        going: What goes.
        disk: Where to.
        on_host: Names of the values in host memory, which go too.
        lent: See ``DiskTier.put()``.
        parcel: Hands out the bytes of ``going``, once it is known that all of the session can be written.
    """
    bones, first = going.bones, len(going.ours)
    rest = session.part(on_host.__contains__)
    packed = pack(rest, first=first, known=going.in_place)
    whole = {bucket: {**bones[bucket], **packed.skeleton[bucket]} for bucket in bones}
    written = skeleton.write(whole, [*going.ours, *packed.storages])
    held = parcel()
    storages = [*held.parts(), *map(_readable, packed.storages), *written.extra]
    ticket = disk.put(written.document, storages, session=fingerprint(session.key).hex(), lent=lent)
    filed = Filed(ticket, (*held.devices, *(storage.device for storage in packed.storages)))
    freed = {**going.in_place, **dict(enumerate(packed.storages, start=first))}
    session.let_go(going.part)
    session.let_go(rest)
    session.pile = None  # its lists will be others
    del written
    for holder in (going.part, going.ours, going.in_place, rest, storages, packed.storages):
        holder.clear()
    return Parked(Level.DISK, None, filed, _still_there(freed, whole))


def fetch(parked: Parked, host: HostTier | None, disk: DiskTier | None) -> Part:
    """A parked session's content as ``SessionState.put_back()`` takes it; the session stays parked.

    Raises:
        MemoryError: If the device or the machine has no room.
        TierFaultError: If its file cannot be read, or a bit of it is not as it was written.
    """
    bones, storages = parked.skeleton, dict[int, torch.UntypedStorage]()
    if isinstance(parked.held, Parcel):
        assert host is not None, "it is in host memory"
        storages = dict(enumerate(host.get(parked.held)))
    elif isinstance(parked.held, Filed):
        assert disk is not None, "it is on the disk"
        contents = disk.get(parked.held.ticket)
        bones = rebuild.read(contents.document, contents.storages)
        storages = dict(enumerate(transfer.from_host(contents.storages, parked.held.devices)))
    storages.update(parked.alive)
    part: Part = unpack(bones, storages)
    return part


def _readable(storage: torch.UntypedStorage) -> torch.UntypedStorage | torch.Tensor:
    """A storage that a file can be written from; one that is not in host memory is copied there."""
    return storage if storage.device.type == "cpu" else parcel_of([storage]).parts()[0]


def _still_there(storages: dict[int, torch.UntypedStorage], bones: Any) -> dict[int, torch.UntypedStorage]:
    """Let go of storages and take back those that are still there."""
    references = {
        index: StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        for index, storage in storages.items()
    }
    storages.clear()
    alive: dict[int, torch.UntypedStorage] = {}
    for index, reference in references.items():
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # noqa: SLF001
        if storage is not None:
            alive[index] = storage
    for name in sorted(_names_of(bones, set(alive))):
        say_once(
            logging.WARNING,
            ("outside", name),
            "parking a session does not free its %s: something outside the session holds it too",
            name,
        )
    return alive


def _names_of(bones: Any, indices: set[int]) -> set[str]:
    """Names of the values of which a tensor lies in one of these storages."""
    found: set[str] = set()
    for values in bones.values() if indices else ():
        for name, value in values.items():
            stack, seen = [value], set[int]()
            while stack:
                item = stack.pop()
                if isinstance(item, TensorSlot):
                    if item.storage in indices:
                        found.add(name)
                elif id(item) not in seen:
                    seen.add(id(item))
                    if isinstance(item, dict):
                        stack.extend(item.values())
                    elif isinstance(item, list | tuple) or hasattr(item, "maxlen"):
                        stack.extend(item)
    return found

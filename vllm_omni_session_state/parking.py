"""Parking: one session's device part goes to a tier and comes back, or nothing has happened.

Decide, then move, then settle: whoever calls has decided that nobody uses the session, and settles its
charge afterwards. The tier holds the bytes before the session lets go of them.

What is freed is judged afterwards. A storage that something outside the session still holds lives on, so
it is taken back: the session finds the very same storage again, and nothing of it counts as freed.
"""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from vllm_omni_session_state.events import say_once
from vllm_omni_session_state.pack import Packed, TensorSlot, pack, unpack
from vllm_omni_session_state.session import SessionState
from vllm_omni_session_state.tiers.host import HostTier, Parcel


@dataclass(frozen=True, slots=True)
class Parked:
    """What is needed to bring a session back.

    Attributes:
        skeleton: Its device part without the bytes.
        parcel: The bytes, in the tier; ``None`` where all of them stayed on the device.
        alive: Storages that are still on the device, by their index; they are held here.
        nbytes: Bytes that left the device.
    """

    skeleton: Any
    parcel: Parcel | None
    alive: dict[int, torch.UntypedStorage]
    nbytes: int


def park(session: SessionState, tier: HostTier, *, on_host: AbstractSet[str], live_nbytes: int) -> Parked:
    """Move a session's device part to a tier. Afterwards every touch of the session raises.

    Args:
        session: Nobody uses it.
        tier: Where to.
        on_host: Names of the values that are in host memory already and stay.
        live_nbytes: Bytes that sessions hold in host memory, which share the tier's budget.

    Raises:
        TierFullError: If the tier has no room.
        MemoryError: If the machine has none. After either, the session is as it was.
    """
    part = session.part(without=on_host)
    packed = pack(part, take=lambda _: True)
    parcel = tier.put(packed.storages, live_nbytes=live_nbytes)
    session.let_go(part)
    del part
    return _judge(packed, parcel)


def park_in_place(session: SessionState, *, on_host: AbstractSet[str]) -> Parked:
    """Park a session without moving a byte: where several ranks park and this one cannot move its part."""
    part = session.part(without=on_host)
    packed = pack(part, take=lambda _: True)
    session.let_go(part)
    return Parked(packed.skeleton, None, dict(enumerate(packed.storages)), 0)


def fetch(parked: Parked, tier: HostTier) -> dict[str, dict[str, object]]:
    """A parked session's device part as ``SessionState.put_back()`` takes it; the session stays parked.

    Raises:
        MemoryError: If the device has no room.
    """
    storages = {} if parked.parcel is None else dict(enumerate(tier.get(parked.parcel)))
    storages.update(parked.alive)
    part: dict[str, dict[str, object]] = unpack(parked.skeleton, storages)
    return part


def _judge(packed: Packed, parcel: Parcel) -> Parked:
    """Let go of the storages and see which are still there."""
    references = [StorageWeakRef(storage) for storage in packed.storages]  # type: ignore[no-untyped-call]
    packed.storages.clear()
    alive: dict[int, torch.UntypedStorage] = {}
    for index, reference in enumerate(references):
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # noqa: SLF001
        if storage is not None:
            alive[index] = storage
    for name in sorted(_names_of(packed.skeleton, set(alive))):
        say_once(
            logging.WARNING,
            ("outside", name),
            "parking a session does not free its %s: something outside the session holds it too",
            name,
        )
    gone = sum(size for index, size in enumerate(parcel.sizes) if index not in alive)
    return Parked(packed.skeleton, parcel, alive, gone)


def _names_of(skeleton: Any, indices: set[int]) -> set[str]:
    """Names of the values of which a tensor lies in one of these storages."""
    found: set[str] = set()
    for values in skeleton.values() if indices else ():
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

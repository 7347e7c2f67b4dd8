"""Sessions that are told apart by a number, under a manager with tiers; see ``test_offloader.py``."""

from collections import deque
from pathlib import Path

import numpy as np
import torch

from vllm_omni_session_state import LatentBuffer, SessionStateManager
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.state.session import Declaration

SIZE = 1000
LIVE = 650  # above what one session's host values take
HOSTED = 1024 + LIVE  # above what one session takes in host memory: a slab and its host values
FILE = 8192  # above what one session's file takes
DECLARATION = Declaration(device_nbytes=10 * SIZE, host_fields=frozenset({"frames", "chunks"}))


def manager_of(disk, *, host=None, device=0, **bounds):
    return SessionStateManager(
        device_budget=device,
        tier=None if host is None else HostTier(budget=host),
        disk=disk,
        declaration=DECLARATION,
        **bounds,
    )


def fill(session, number):
    base = torch.full((SIZE,), number % 251, dtype=torch.uint8)
    session.attrs["number"] = number
    session.attrs["base"] = base
    session.attrs["ring"] = deque([base[:7], base[3:]], maxlen=5)
    session.attrs["frames"] = np.full((4, 5), number)
    session.attrs["alias"] = [base[10:]]
    with torch.inference_mode():
        session.put("chunks", LatentBuffer()).replace([torch.full((3,), number + i) for i in range(20)])


def holds(session, number):
    base, chunks = session.attrs["base"], session.get("chunks").container
    aliases = [*session.attrs["ring"], *session.attrs["alias"]]
    return (
        session.attrs["number"] == number
        and base.tolist() == [number % 251] * SIZE
        and [each.data_ptr() - base.data_ptr() for each in aliases] == [0, 3, 10]
        and session.attrs["ring"].maxlen == 5
        and (session.attrs["frames"] == number).all()
        and [int(chunk[0]) for chunk in chunks] == [number + i for i in range(20)]
        and all(chunk.is_inference() for chunk in chunks)
        and not base.is_inference()
    )


def begin(manager, *names):
    for name in names:
        with manager.lease(name) as session:
            fill(session, ord(name[0]))


def all_hold(manager, *names):
    for name in names:
        with manager.lease(name) as session:
            assert holds(session, ord(name[0])), name
        manager.check()


def places(manager):
    return dict(zip(manager.keys(), (entry.place for entry in manager.listing()), strict=True))


def files(disk):
    return sorted(path.name for path in Path(disk.folder).iterdir())

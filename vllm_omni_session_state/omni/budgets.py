"""Budgets in bytes, from what the operator wrote and what this machine has."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from vllm_omni_session_state.config import Settings
from vllm_omni_session_state.events import say_once


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is enforced in this worker process.

    Attributes:
        device: Bytes on the device of sessions that nobody uses; ``None``: any.
        host: Bytes in host memory, live and parked; ``None``: nothing is parked.
    """

    device: int | None
    host: int | None

    def __str__(self) -> str:
        if self.host is None:
            return "none is parked"
        device = "any number of" if self.device is None else f"{self.device}"
        return f"idle ones hold {device} bytes on the device and all of them {self.host} in host memory"


def bounds_of(settings: Settings, *, several_ranks: bool) -> Bounds:
    """The budgets in bytes, or none where they cannot be kept; what is ignored is said once at WARNING.

    Args:
        settings: What the operator wrote.
        several_ranks: Whether this process is one of several ranks, which must have the same budgets.
    """
    import torch  # noqa: PLC0415 - only a process whose flag is on pays for it

    device, host = settings.device_budget, settings.host_budget
    if device is None and host is None:
        return Bounds(None, None)
    why = None
    if host is None:
        why = "device_budget alone has nowhere to park a session; set host_budget too"
    elif several_ranks and (host.relative or (device is not None and device.relative)):
        why = "several ranks must have the same budgets and may not have the same memory; write bytes, not %"
    if why is not None:
        say_once(logging.WARNING, ("budgets",), "%s. Budgets are ignored and nothing is parked", why)
        return Bounds(None, None)
    assert host is not None, "as just asked"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    on_device = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else memory
    return Bounds(None if device is None else device.of(on_device), host.of(memory))

"""Budgets in bytes, from what the operator wrote and what this machine has."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_omni_session_state.base.errors import error_text
from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.base.settings import Complaint, Settings

if TYPE_CHECKING:
    from vllm_omni_session_state.manager.manager import SessionStateManager
    from vllm_omni_session_state.offload.disk_tier import DiskTier


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is enforced in this worker process, in bytes.

    Attributes:
        device: Of idle sessions on the device; ``None``: any.
        host: In host memory, live and parked; ``None``: nothing is parked there.
        disk: Of files in ``folder``; ``None``: nothing is parked there.
    """

    device: int | None = None
    host: int | None = None
    disk: int | None = None
    folder: str = ""

    def __str__(self) -> str:
        if self.host is None and self.disk is None:
            return "none is parked"
        device = "any number of" if self.device is None else f"{self.device}"
        below = [] if self.host is None else [f"all of them {self.host} in host memory"]
        below += [] if self.disk is None else [f"parked ones {self.disk} on the disk in {self.folder}"]
        return " and ".join([f"idle ones hold {device} bytes on the device", *below])


def bounds_of(
    settings: Settings, *, several_ranks: bool, apart: str | None = None
) -> tuple[Bounds, tuple[Complaint, ...]]:
    """The budgets in bytes, or none where they cannot be kept, and what is ignored.

    Args:
        settings: What the operator wrote.
        several_ranks: Whether this process is one of several ranks, which must have the same budgets.
        apart: Why ranks cannot tell each other of a session before each of its steps, if they cannot.
    """
    device, host, disk = settings.device_budget, settings.host_budget, settings.disk_budget
    complaints: list[Complaint] = []

    def ignore(key: str, value: object, why: str) -> None:
        complaints.append(Complaint(key, str(value), "none", why))

    if (disk is None) is not (settings.disk_path is None):
        have, need = ("disk.path", "disk.budget") if disk is None else ("disk.budget", "disk.path")
        why = f"{have} alone parks nothing on the disk; set {need} too. It is ignored"
        ignore(have, disk or settings.disk_path, why)
        disk = None
    if settings.keep_on_exit and disk is None:
        ignore("keep_on_exit", True, "keep_on_exit alone keeps nothing; set disk.path and disk.budget too")
    if settings.idle_park_s and not settings.has_tier:
        why = "alone has nowhere to park a session; set host_budget or disk.path. It is ignored"
        ignore("idle_park_s", settings.idle_park_s, f"idle_park_s={settings.idle_park_s:g} {why}")
    budgets, why = [size for size in (device, host, disk) if size is not None], ""
    if budgets == [device]:
        why = "device_budget alone has nowhere to park a session; set host_budget or disk.path too"
    elif budgets and apart is not None:
        why = apart
    elif several_ranks and any(size.relative for size in budgets):
        why = "several ranks must have the same budgets and may not have the same memory; write bytes, not %"
    if why:
        ignore("budgets", ", ".join(map(str, budgets)), f"{why}. Budgets are ignored and nothing is parked")
    if why or not budgets:
        return Bounds(), tuple(complaints)
    import torch  # noqa: PLC0415 - only a process whose flag is on pays for it

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    on_device = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else memory
    folder = Path(settings.disk_path or "").expanduser().absolute()
    bounds = Bounds(
        device=None if device is None else device.of(on_device),
        host=None if host is None else host.of(memory),
        disk=None if disk is None else disk.of(_file_system_nbytes(folder) if disk.relative else 0),
        folder="" if disk is None else str(folder),
    )
    return bounds, tuple(complaints)


def disk_tier(bounds: Bounds, *, keep: bool) -> tuple[DiskTier | None, str]:
    """The disk tier, and why it is not there although there should be one, ``""`` where nothing failed.

    What is parked there stays when the worker is shut down, if ``keep``.
    """
    from vllm_omni_session_state.offload.disk_tier import DiskTier  # noqa: PLC0415 - as above

    if bounds.disk is None:
        return None, ""
    try:
        return DiskTier(bounds.folder, budget=bounds.disk, keep=keep), ""
    except Exception as error:  # noqa: BLE001 - serving goes on without it
        return None, error_text(error)


def no_disk(why: str) -> Complaint:
    """That there is no disk tier although one is asked for."""
    return Complaint("disk", "", "none", f"no session is parked on the disk: {why}")


def too_small(manager: SessionStateManager) -> list[Complaint]:
    """Each tier that has no room for one session, as its model declares it."""
    return [
        Complaint(
            setting,
            str(budget),
            "none",
            f"{setting}={budget} has room for no session: a model of this kind declares {wanted} bytes of "
            f"one. Few or none are parked there; raise {setting} to a multiple of that",
        )
        for setting, budget, wanted in manager.too_small()
    ]


def say(complaints: Iterable[Complaint]) -> None:
    """Log complaints, each once in this process at WARNING."""
    for complaint in complaints:
        log_once(logging.WARNING, ("complaint", complaint.setting, complaint.value), "%s", complaint)


def _file_system_nbytes(folder: Path) -> int:
    """Size of the file system on which a folder is or will be."""
    status = os.statvfs(next(each for each in (folder, *folder.parents) if each.exists()))
    return status.f_frsize * status.f_blocks

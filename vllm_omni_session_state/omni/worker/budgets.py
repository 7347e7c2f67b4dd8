"""Budgets in bytes, from what the operator wrote and what this machine has."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_omni_session_state.base.log import log_once
from vllm_omni_session_state.base.settings import Settings

if TYPE_CHECKING:
    from vllm_omni_session_state.manager.manager import SessionStateManager
    from vllm_omni_session_state.offload.disk_tier import DiskTier


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is enforced in this worker process.

    Attributes:
        device: Bytes on the device of sessions that nobody uses; ``None``: any.
        host: Bytes in host memory, live and parked; ``None``: nothing is parked there.
        disk: Bytes of files; ``None``: nothing is parked there.
        folder: Where the files are.
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


def bounds_of(settings: Settings, *, several_ranks: bool, apart: str | None = None) -> Bounds:
    """The budgets in bytes, or none where they cannot be kept; what is ignored is said once at WARNING.

    Args:
        settings: What the operator wrote.
        several_ranks: Whether this process is one of several ranks, which must have the same budgets.
        apart: Why ranks cannot tell each other of a session before each of its steps, if they cannot.
    """
    device, host, disk = settings.device_budget, settings.host_budget, settings.disk_budget
    if (disk is None) is not (settings.disk_path is None):
        have, need = ("disk.path", "disk.budget") if disk is None else ("disk.budget", "disk.path")
        _ignored(have, f"{have} alone parks nothing on the disk; set {need} too. It is ignored")
        disk = None
    if settings.keep_on_exit and disk is None:
        _ignored("keep_on_exit", "keep_on_exit alone keeps nothing; set disk.path and disk.budget too")
    if host is None and disk is None:
        if device is not None:
            what = "device_budget alone has nowhere to park a session; set host_budget or disk.path too"
            _ignored("budgets", f"{what}. Budgets are ignored and nothing is parked")
        return Bounds()
    if apart is not None:
        _ignored("budgets", f"{apart}. Budgets are ignored and nothing is parked")
        return Bounds()
    if several_ranks and any(size is not None and size.relative for size in (device, host, disk)):
        what = "several ranks must have the same budgets and may not have the same memory; write bytes, not %"
        _ignored("budgets", f"{what}. Budgets are ignored and nothing is parked")
        return Bounds()
    import torch  # noqa: PLC0415 - only a process whose flag is on pays for it

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    on_device = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else memory
    folder = Path(settings.disk_path or "").expanduser().absolute()
    return Bounds(
        device=None if device is None else device.of(on_device),
        host=None if host is None else host.of(memory),
        disk=None if disk is None else disk.of(_file_system_nbytes(folder) if disk.relative else 0),
        folder="" if disk is None else str(folder),
    )


def disk_tier(bounds: Bounds, *, keep: bool) -> tuple[DiskTier | None, str]:
    """The disk tier, and why it is not there although there should be one, ``""`` where nothing failed.

    Args:
        bounds: Where and how large.
        keep: Whether what is parked there stays when the worker is shut down.
    """
    from vllm_omni_session_state.offload.disk_tier import DiskTier  # noqa: PLC0415 - as above

    if bounds.disk is None:
        return None, ""
    try:
        return DiskTier(bounds.folder, budget=bounds.disk, keep=keep), ""
    except Exception as error:  # noqa: BLE001 - serving goes on without it
        return None, f"{type(error).__name__}: {error}"


def say_no_disk(why: str) -> None:
    """Say that there is no disk tier although one is asked for."""
    _ignored("disk tier", f"no session is parked on the disk: {why}")


def say_too_small(manager: SessionStateManager) -> None:
    """Say of each tier that has no room for one session, as its model declares it, once at WARNING."""
    for setting, budget, wanted in manager.too_small():
        log_once(
            logging.WARNING,
            ("too small", setting),
            "%s=%d has room for no session: a model of this kind declares %d bytes of one. Few or none are "
            "parked there; raise %s to a multiple of that",
            setting,
            budget,
            wanted,
            setting,
        )


def _file_system_nbytes(folder: Path) -> int:
    """Size of the file system on which a folder is or will be."""
    status = os.statvfs(next(each for each in (folder, *folder.parents) if each.exists()))
    return status.f_frsize * status.f_blocks


def _ignored(what: str, why: str) -> None:
    log_once(logging.WARNING, (what,), "%s", why)

"""The process group that vLLM-Omni's layers ask for: gloo, and this process as one rank of it.

Covers forming it for the first Cosmos3 of the process and taking it down with the last. Does not start
processes: ``ranks`` does.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True)
class World:
    """This process's place among the ranks, and how many models stand on the group.

    vLLM-Omni keeps its groups in module globals, so all models of one process share them. They are formed
    and destroyed through the worker module's own names: where something counts users there, this is one.
    """

    rank: int = 0
    size: int = 1
    meeting_place: str | None = None
    models: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)
    folder: tempfile.TemporaryDirectory[str] | None = None

    def take_rank(self, rank: int, *, size: int, meeting_place: str) -> None:
        """Say which rank this process is; before the first model of the process.

        Args:
            rank: From 0.
            size: Number of ranks.
            meeting_place: An empty folder that all ranks see.

        Raises:
            RuntimeError: A model is alive, so the group has its ranks already.
        """
        if self.models:
            raise RuntimeError(f"rank={rank} taken with {self.models} models alive: close them first")
        self.rank, self.size, self.meeting_place = rank, size, meeting_place

    def place(self) -> str:
        """Where the ranks meet for their next group, as torch wants it.

        A file of its own for each: through the last one's, ranks would find dead addresses.
        """
        if self.meeting_place is None:
            self.folder = tempfile.TemporaryDirectory(prefix="tiny-world-")
            self.meeting_place = self.folder.name
        return (Path(self.meeting_place) / f"world-{next(self.numbers)}").as_uri()

    def enter(self, *, cfg_parallel_size: int = 1) -> None:
        """Count one more model, and form the groups with the first.

        Must run inside vLLM-Omni's forward context and current vLLM config.

        Args:
            cfg_parallel_size: Ranks that share the branches of guidance; of the first model's, for all.
        """
        import torch
        from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized
        from vllm_omni.diffusion.distributed.parallel_state import model_parallel_is_initialized
        from vllm_omni.diffusion.worker import diffusion_worker as host

        if self.models == 0:
            host.init_distributed_environment(
                world_size=self.size,
                rank=self.rank,
                local_rank=self.rank,
                distributed_init_method=self.place(),
            )
            if not model_parallel_is_initialized():
                host.initialize_model_parallel(cfg_parallel_size=cfg_parallel_size)
            if not is_workspace_manager_initialized():
                init_workspace_manager(torch.device("cpu"))
        self.models += 1

    def leave(self) -> None:
        """Count one model less, and give the groups back with the last."""
        from vllm_omni.diffusion.worker import diffusion_worker as host

        self.models -= 1
        if self.models == 0:
            host.destroy_distributed_env()


WORLD = World()

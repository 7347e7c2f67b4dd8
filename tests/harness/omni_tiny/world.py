"""The process group that the host's layers ask for: gloo, and this process as one rank of it.

Covers forming it for the first Cosmos3 of the process and taking it down with the last. Does not start
processes: ``ranks`` does.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass


def free_port() -> int:
    """Return a port of the loopback that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(slots=True)
class World:
    """This process's place among the ranks, and how many models stand on the group.

    The host keeps its groups in module globals, so all models of one process share them. They are formed
    and destroyed through the worker module's own names: where something counts users there, this is one.
    """

    rank: int = 0
    size: int = 1
    port: int | None = None
    models: int = 0

    def take_rank(self, rank: int, *, size: int, port: int) -> None:
        """Say which rank this process is; before the first model of the process.

        Raises:
            RuntimeError: A model is alive, so the group has its ranks already.
        """
        if self.models:
            raise RuntimeError(f"rank={rank} taken with {self.models} models alive: close them first")
        self.rank, self.size, self.port = rank, size, port

    def enter(self, *, cfg_parallel_size: int = 1) -> None:
        """Count one more model, and form the groups with the first.

        Must run inside the host's forward context and current vLLM config.

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
                distributed_init_method=f"tcp://127.0.0.1:{self.port or free_port()}",
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

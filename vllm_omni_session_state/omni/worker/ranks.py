"""The ranks of one worker's model: how they tell each other what must be the same on all of them.

In vLLM-Omni every rank runs every request, but for one way to run: data parallel with a layer-wise offload
that gathers weights. So the group of one request is the world, for which vLLM-Omni has a group over the CPU.
"""

from __future__ import annotations

import importlib
from typing import Any

from vllm_omni_session_state.manager.consensus import AllGather
from vllm_omni_session_state.omni.hooks import seams


def exchange() -> AllGather | None:
    """How this rank tells all ranks of its model, over the CPU group; ``None`` where it is alone.

    Raises:
        SeamMismatchError: If vLLM-Omni's group does not look as expected.
    """
    import torch  # noqa: PLC0415 - only a process whose flag is on pays for it

    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return None
    module = importlib.import_module(seams.WORKER_MODULE)
    seams.check(module, seams.WORKER_SEAMS)

    def told(message: bytes) -> list[bytes]:
        group = module.get_world_group().cpu_group
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(theirs, mine, group=group)
        return [each.numpy().tobytes() for each in theirs]

    return told


def apart(od_config: Any) -> str | None:
    """Why ranks of this model run different requests at once; ``None`` where each runs all.

    Args:
        od_config: vLLM-Omni's configuration of a diffusion model.
    """
    size = getattr(getattr(od_config, "parallel_config", None), "data_parallel_size", 1) or 1
    if size < 2:
        return None
    try:
        from vllm_omni.diffusion.offloader.config import (  # noqa: PLC0415
            any_selected_component_uses_allgather,
        )

        shares = bool(any_selected_component_uses_allgather(od_config))
    except Exception:  # noqa: BLE001 - of a original that does not say, the worst is taken
        shares = True
    if not shares:
        return None
    how = f"data_parallel_size={size} and layer-wise offload that gathers weights (dlo_use_allgather)"
    return f"with {how} ranks run different requests at once, and there is no group of one request's ranks"

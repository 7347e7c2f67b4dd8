"""The ranks of one worker's model: how they tell each other what must be the same on all of them."""

from __future__ import annotations

import importlib

from vllm_omni_session_state.exchange import Exchange
from vllm_omni_session_state.omni import seams


def exchange() -> Exchange | None:
    """How this rank tells all ranks of its model, over the CPU group; ``None`` where it is alone.

    What it returns is a collective call: every rank makes it, or the others wait until one of them is gone.

    Raises:
        SeamMismatchError: If the host's own gather does not look as expected.
    """
    import torch  # noqa: PLC0415 - only a process whose flag is on pays for it

    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return None
    module = importlib.import_module(seams.WORKER_MODULE)
    seams.check(module, seams.WORKER_SEAMS)
    gather: Exchange = module._all_gather_rank_values
    return gather

"""Tiny Cosmos3 through `Omni`, from a deploy YAML, with a watch on what its requests hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omni_tiny.cosmos3_requests import cosmos3_request
from omni_tiny.omni_runs import OmniRun, write_stage

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np


def write_cosmos3_deploy(path: str | Path, *, executor: str = "mp") -> Path:
    """Write the deploy YAML of one tiny Cosmos3 stage, as vLLM-Omni's own, and return the file.

    Args:
        path: The file.
        executor: See `write_stage`.
    """
    stage = {
        "model_class_name": "Cosmos3OmniDiffusersPipeline",
        "model_config": {"guardrails": False},  # a gated model of its own
    }
    return write_stage(path, "cosmos3_omni_deploy", stage, executor=executor)


class OmniCosmos3(OmniRun):
    """Tiny Cosmos3 behind `Omni`, watched.

    Args:
        checkpoint: From `write_cosmos3`.
        deploy: From `write_cosmos3_deploy`.
    """

    def __init__(self, checkpoint: str | Path, deploy: str | Path) -> None:
        super().__init__(checkpoint, deploy)
        self.call("tiny_watch")

    def generate(self, **words: Any) -> np.ndarray:
        """Run one request, which gets its id from vLLM-Omni.

        Args:
            **words: Of `cosmos3_request`: kind, prompt, negative, guidance, seed, steps, media, extra.

        Returns:
            What the client gets: a clip ``(1, T, H, W, 3)``, float32, or a picture ``(H, W, 3)``, uint8.
        """
        import numpy as np

        request = cosmos3_request("unused", **words)
        (output,) = self.omni.generate(request.prompt, [request.sampling_params], use_tqdm=False)
        (seen,) = output.images
        return np.asarray(seen)

    def forwards(self) -> list[str]:
        """Digests of what each forward of the transformer returned since this was last asked."""
        return self.call("tiny_forwards")

    def held(self) -> dict[str, Any]:
        """What the last request held and what is left of it; see `tiny_held`."""
        return self.call("tiny_held")

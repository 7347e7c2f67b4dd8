"""The seams: every place in vLLM-Omni that this plugin hooks, with what it expects there.

A seam that does not look as expected is left alone; the model then runs its own path. Signatures are
compared by the names, kinds and optionality of parameters: annotations and the values of defaults may
change under us without harm.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

from vllm_omni_session_state.errors import SeamMismatchError

LOADER_MODULE = "vllm_omni.diffusion.model_loader.diffusers_loader"
MARK = "__session_state_wrapper__"
"""Attribute of every function that this plugin puts around one of the host's."""

LOADER_CLASS = "DiffusersPipelineLoader"
LOADER_METHOD = "load_model"
"""Of this one only the name is relied on: its wrapper hands every argument through."""

_DREAMZERO = "vllm_omni.diffusion.models.dreamzero.pipeline_dreamzero.DreamZeroPipeline"

_COSMOS3 = "vllm_omni.diffusion.models.cosmos3.pipeline_cosmos3.Cosmos3OmniDiffusersPipeline"
_DIFFUSE = (
    "(self, latents, timesteps, cond_ids, cond_mask, uncond_ids, uncond_mask, guidance_scale, shared_kwargs, "
    "*, action_latents=..., action_velocity_mask=..., action_condition_latents=..., sound_latents=..., "
    "velocity_mask=..., image_latent=..., condition_latents=..., guidance_interval=..., raw_action_dim=..., "
    "scheduler=..., session_id=..., generator=...)"
)


@dataclass(frozen=True, slots=True)
class Seam:
    """One method that is replaced or called.

    Attributes:
        name: The method's name on its class.
        signature: Its parameters as source, ``*`` and ``=...`` (optional) included.
    """

    name: str
    signature: str


PIPELINE_SEAMS: dict[str, tuple[Seam, ...]] = {
    _COSMOS3: (
        Seam("diffuse", _DIFFUSE),
        Seam("_new_cosmos3_state", "(self, session_id)"),
        Seam("_kv_load_und", "(self, state, is_negative)"),
        Seam("_kv_capture_und", "(self, state, is_negative)"),
        Seam("_kv_reset_und", "(self, state)"),
    ),
    _DREAMZERO: (
        Seam("_get_or_create_state", "(self, session_id)"),
        Seam("_drop_ar_diffusion_session_state", "(self, session_id)"),
        Seam("bind_ar_diffusion_state", "(self, session_id, state)"),
        Seam("decode_accumulated_video_latents", "(self, session_id=...)"),
        Seam("clear_accumulated_video_latents", "(self, session_id=...)"),
        Seam("warmup_compile", "(self)"),
    ),
}
"""By the dotted name of the pipeline class, as in ``adapters.ADAPTERS``."""

RUNNER_SEAMS = (
    Seam("_get_or_create_session", "(self, session_id)"),
    Seam("_release_session", "(self, session_id, *, reset_model, reason, suppress_errors=...)"),
)
"""Of ``ARDiffusionModelRunner``."""

RUNNER_PIPELINES = frozenset({_DREAMZERO})
"""Pipelines that this runner serves."""
WORKER_MODULE = "vllm_omni.diffusion.worker.diffusion_worker"
WORKER_SEAMS = (Seam("_all_gather_rank_values", "(value)"),)
"""Functions of the module of the host's diffusion worker. Its class only gets new methods."""

SLEEP_SEAM = Seam("sleep", "(self, level=...)")
SHUTDOWN_SEAM = Seam("shutdown", "(self)")
"""Of the host's diffusion worker class."""

SERVER_MODULE = "vllm_omni.entrypoints.openai.api_server"
SERVER_FUNCTION = Seam("omni_init_app_state", "(engine_client, state, args)")
"""Called once in each API server process, as soon as the engine and its stages are there."""

SERVER_BUILDER = "build_openai_app"
"""Of the same module; returns the application. Only the name is relied on."""

SERVING_SEAMS: dict[str, tuple[Seam, ...]] = {
    "vllm_omni.entrypoints.openpi.connection.RobotRealtimeConnection": (Seam("handle_connection", "(self)"),),
    "vllm_omni.entrypoints.openpi.serving.ServingRealtimeRobotOpenPI": (
        Seam("drop_session", "(self, session_id)"),
        Seam("infer", "(self, obs, *, session_id, reset)"),
        Seam("reset", "(self, obs)"),
    ),
    "vllm_omni.entrypoints.openai.serving_rl_rollout.ServingRLRollout": (
        Seam("_infer_world_model", "(self, obs, *, session_id, reset)"),
    ),
}
"""By the dotted name of a serving class of the API server."""


def signature_of(function: object) -> str:
    """A callable's parameters in the form that ``Seam.signature`` has."""
    parts: list[str] = []
    starred = False
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        mark = ""
        if parameter.kind is parameter.VAR_POSITIONAL:
            mark, starred = "*", True
        elif parameter.kind is parameter.VAR_KEYWORD:
            mark = "**"
        parts.append(f"{mark}{parameter.name}{'' if parameter.default is parameter.empty else '=...'}")
    return f"({', '.join(parts)})"


def check(owner: type | ModuleType, seams: Iterable[Seam]) -> None:
    """Compare a class or a module of the host with what the plugin expects of it.

    Args:
        owner: The host's class or module.
        seams: Its seams.

    Raises:
        SeamMismatchError: For the first seam that is missing or has another signature.
    """
    name = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
    for seam in seams:
        place = f"{name}.{seam.name}"
        function = getattr(owner, seam.name, None)
        if function is None:
            raise SeamMismatchError(place, expected=seam.signature, found="nothing of that name")
        try:
            found = signature_of(function)
        except (TypeError, ValueError):
            found = f"a {type(function).__name__} without a signature"
        if found != seam.signature:
            raise SeamMismatchError(place, expected=seam.signature, found=found)

"""The seams: every place in vLLM-Omni that this plugin hooks, with what it expects there.

A seam that does not look as expected is left alone; the model then runs its own path. Signatures are
compared by the names, kinds and optionality of parameters: annotations and the values of defaults may
change under us without harm.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

from vllm_omni_session_state.base.errors import SeamMismatchError

LOADER_MODULE = "vllm_omni.diffusion.model_loader.diffusers_loader"
_MISSING = object()

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
    Seam("_bound_ar_session", "(self, session_id, *, description, synchronize=...)"),
    Seam("_release_session", "(self, session_id, *, reset_model, reason, suppress_errors=...)"),
)
"""Of ``ARDiffusionModelRunner``."""

SIZING_SEAMS = (
    Seam("_preallocate_kv_cache", "(self, *, available_bytes=...)"),
    Seam("_available_memory_bytes", "(self)"),
)
"""Of the same class: where it decides how large its KV pool is."""

RUNNER_PIPELINES = frozenset({_DREAMZERO})
"""Pipelines that this runner serves."""
WORKER_MODULE = "vllm_omni.diffusion.worker.diffusion_worker"
WORKER_SEAMS = (Seam("_all_gather_rank_values", "(value)"), Seam("get_world_group", "()"))
"""Functions of the module of vLLM-Omni's diffusion worker. Its class only gets new methods."""

SLEEP_SEAM = Seam("sleep", "(self, level=...)")
SHUTDOWN_SEAM = Seam("shutdown", "(self)")
"""Of vLLM-Omni's diffusion worker class."""

SERVER_MODULE = "vllm_omni.entrypoints.openai.api_server"
SERVER_FUNCTION = Seam("omni_init_app_state", "(engine_client, state, args)")
"""Called once in each API server process, as soon as the engine and its stages are there."""

SERVER_BUILDER = "build_openai_app"
"""Of the same module; returns the application. Only the name is relied on."""

CLIENT_STOPPED = "_shutdown_called"
"""Attribute of vLLM-Omni's ``AsyncOmni``, only read: whether it is told to stop. Without it ends that a stop
outruns are said one by one.
"""

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

RUNTIME_MODULE = "vllm_omni.engine.stage_runtime"
POOL_SEAMS: dict[str, tuple[Seam, ...]] = {
    f"{RUNTIME_MODULE}.StageRuntime": (
        Seam("_assemble_stage_pools", "(self, stage_plans, initialized_clients_by_stage)"),
    ),
    "vllm_omni.engine.stage_pool.StagePool": (
        Seam(
            "submit_initial",
            "(self, request_id, req_state, request, *, prompt_text=..., affinity_request_id=..., "
            "submit_kwargs=..., params_override=...)",
        ),
        Seam("collective_rpc", "(self, replica_id, method, timeout=..., args=..., kwargs=...)"),
        Seam("available_replica_ids", "(self)"),
        Seam("get_bound_replica_id", "(self, request_id)"),
        Seam("replica_monitor_sample", "(self, replica_id)"),
        Seam("_collect_serviceable_replicas", "(self)"),
        Seam("_client_input_addr", "(client)"),
    ),
}
"""By the dotted name of a class: where a stage's replicas come together, and which of them gets a request."""


Fields = Mapping[type, tuple[str, ...]]
"""By their type the names of attributes of an object of vLLM-Omni that are read or set."""

POOL_FIELDS: Fields = {
    int: ("stage_id",),
    bool: ("is_distributed",),
    list: ("clients",),
    dict: ("_request_bindings", "_affinity"),
}
"""Of a ``StagePool``: its replicas by slot; which slot a request is bound to, or which address."""

KV_STATE_SEAMS = (Seam("close", "(self)"),)
KV_STATE_FIELDS: Fields = {
    str: ("session_id",),
    dict: ("adapters", "_committed", "_paged_pending"),
    bool: ("_closed",),
}
"""Of ``ARDiffusionKVState``: one session's engine KV. By branch: adapters, committed tokens, contexts."""

KV_CACHE_SEAMS = (
    Seam("begin_request", "(self, request_id, *, prefill_prefix_tokens=...)"),
    Seam("end_request", "(self, adapter)"),
    Seam("allocate_token_slots", "(self, adapter, num_tokens)"),
    Seam("block_table", "(self, adapter)"),
    Seam("key_cache", "(self, layer_idx)"),
    Seam("value_cache", "(self, layer_idx)"),
)
KV_CACHE_FIELDS: Fields = {
    int: (
        *("num_layers", "block_size", "null_block_id", "session_capacity"),
        *("num_local_kv_branches", "cross_attention_bytes_per_session"),
    ),
    dict: ("cross_attention_lengths", "cross_attention_kv_heads", "_adapters", "_cross_sessions"),
}
KV_CONFIG_FIELDS: Fields = {int: ("sink_chunks", "window_chunks")}
KV_SPEC_FIELDS: Fields = {int: ("page_size_bytes",)}
"""Of ``ARDiffusionKVCache``: the pool. Adapters by request id; cross-attention K/V by session id, cache name
and branch, each a pair of lists by layer. Its ``config`` has the window in blocks, its ``spec`` a block's
bytes in one layer."""

KV_ADAPTER_FIELDS: Fields = {
    str: ("request_id",),
    int: ("_chunk_size", "_prefill", "_completed_chunks", "compacted_tokens", "num_computed_tokens"),
}
"""Of ``ARDiffusionRequestAdapter``: where one branch of one session stands."""

KV_POOL_SEAMS = (Seam("get_num_free_blocks", "(self)"),)
"""Of vLLM's ``BlockPool``, which is ``manager.block_pool`` of the cache."""


def signature_of(function: object) -> str:
    """A callable's parameters in the form that ``Seam.signature`` has."""
    parts: list[str] = []
    starred = False
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
        star, stars = parameter.kind is parameter.VAR_POSITIONAL, parameter.kind is parameter.VAR_KEYWORD
        mark = "*" if star else "**" if stars else ""
        starred = starred or star or parameter.kind is parameter.KEYWORD_ONLY
        parts.append(f"{mark}{parameter.name}{'' if parameter.default is parameter.empty else '=...'}")
    return f"({', '.join(parts)})"


def check(owner: type | ModuleType, seams: Iterable[Seam]) -> None:
    """Compare a class or a module of vLLM-Omni with what the plugin expects of it.

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


def check_fields(owner: object, fields: Fields) -> None:
    """Compare an object of vLLM-Omni with what the plugin expects to find on it.

    Raises:
        SeamMismatchError: For the first attribute that is missing or of another type.
    """
    place = f"{type(owner).__module__}.{type(owner).__qualname__}"
    for kind, names in fields.items():
        for name in names:
            found = getattr(owner, name, _MISSING)
            if not isinstance(found, kind):
                raise SeamMismatchError(
                    f"{place}.{name}",
                    expected=f"an attribute of type {kind.__name__}",
                    found="nothing of that name" if found is _MISSING else f"a {type(found).__name__}",
                )

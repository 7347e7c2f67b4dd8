"""Which stages of a deployment have the flag on, and of which of them a session outlives its request."""

from __future__ import annotations

import os
from typing import Any

from vllm_omni_session_state.base import settings

_AR_RUNNER = "vllm_omni.experimental.ar_diffusion.runner.ARDiffusionModelRunner"


def stages_with_sessions(engine_client: Any) -> dict[int, settings.Settings]:
    """The settings of every stage that has the flag on, by stage id."""
    stages = enumerate(getattr(engine_client, "stage_configs", None) or ())
    found = {int(getattr(stage, "stage_id", number)): settings_of(stage) for number, stage in stages}
    return {number: resolved for number, resolved in found.items() if resolved is not None}


def settings_of(stage: Any) -> settings.Settings | None:
    """The settings of one of vLLM-Omni's stage configurations; ``None`` where the flag is not on."""
    kind = getattr(stage, "stage_type", None)
    if getattr(kind, "value", kind) != "diffusion":
        return None
    held = _held(stage)
    # What is wrong with a setting is said by the worker, which reads the same.
    resolved, _ = settings.resolve(
        getattr(held, settings.FLAG, None), os.environ, options=settings.options_of(held)
    )
    return resolved if resolved.enabled else None


def keeps_sessions(stage: Any) -> bool:
    """Whether sessions of a stage outlive their requests: those of the AR-Diffusion runner's request mode.

    In its stepwise mode, and with any other runner, a session is one request.
    """
    held = _held(stage)
    if getattr(held, "step_execution", False) or getattr(held, "streaming_output", False):
        return False
    runner = getattr(held, "diffusion_model_runner_cls", None)
    if not runner:
        from vllm_omni.diffusion.diffusion_engine import DiffusionEngine  # noqa: PLC0415

        engine = DiffusionEngine.resolve_engine_class(held)
        runner = getattr(engine, "default_diffusion_model_runner_cls", None)
    if not runner or runner == _AR_RUNNER:
        return bool(runner)
    from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: PLC0415

    # Somebody may have put one of these in place.
    found = resolve_obj_by_qualname(runner) if isinstance(runner, str) else runner
    return any(f"{base.__module__}.{base.__qualname__}" == _AR_RUNNER for base in found.__mro__)


def _held(stage: Any) -> Any:
    return getattr(stage, "diffusion_config", None) or getattr(stage, "engine_args", None)

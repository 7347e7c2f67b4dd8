"""Which stages of a deployment have the flag on, and of which of them a session outlives its request."""

from __future__ import annotations

import os
from typing import Any

from vllm_omni_session_state.base import settings

_AR_RUNNER = "vllm_omni.experimental.ar_diffusion.runner.ARDiffusionModelRunner"


def stages_with_sessions(engine_client: Any) -> dict[int, settings.Settings]:
    """The settings of every stage that has the flag on, by stage id."""
    found = {}
    for number, stage in enumerate(getattr(engine_client, "stage_configs", None) or ()):
        kind = getattr(stage, "stage_type", None)
        if getattr(kind, "value", kind) != "diffusion":
            continue
        held = _held(stage)
        flag, options = getattr(held, settings.FLAG, None), settings.options_of(held)
        # What is wrong with a setting is said by the worker, which reads the same.
        resolved, _ = settings.resolve(flag, os.environ, options=options)
        if resolved.enabled:
            found[int(getattr(stage, "stage_id", number))] = resolved
    return found


def keeps_sessions(stage: Any) -> bool:
    """Whether sessions of a stage outlive their requests: those of the AR-Diffusion runner's request mode.

    In its stepwise mode, and with any other runner, a session is one request.

    Args:
        stage: One of vLLM-Omni's stage configurations, of a diffusion stage.
    """
    held = _held(stage)
    if getattr(held, "step_execution", False) or getattr(held, "streaming_output", False):
        return False
    runner = getattr(held, "diffusion_model_runner_cls", None)
    if not runner:
        from vllm_omni.diffusion.diffusion_engine import DiffusionEngine  # noqa: PLC0415

        engine = DiffusionEngine.resolve_engine_class(held)
        runner = getattr(engine, "default_diffusion_model_runner_cls", None)
    return runner == _AR_RUNNER or _is_ar_runner(runner)


def _is_ar_runner(runner: str | type | None) -> bool:
    """Whether a runner that somebody put in place is one of these."""
    if not runner:
        return False
    from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: PLC0415

    found = resolve_obj_by_qualname(runner) if isinstance(runner, str) else runner
    return any(f"{base.__module__}.{base.__qualname__}" == _AR_RUNNER for base in found.__mro__)


def _held(stage: Any) -> Any:
    return getattr(stage, "diffusion_config", None) or getattr(stage, "engine_args", None)

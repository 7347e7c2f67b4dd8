"""How a setting travels: from what an operator writes to the configuration that a worker is given.

Every step is vLLM-Omni's own: its command line, its deploy YAML, its resolver, its stage configuration.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from pathlib import Path
from typing import Any

STAGE = """\
    model_class_name: DreamZeroPipeline
    engine_backend: vllm_omni.experimental.ar_diffusion.engine.ARDiffusionEngine
"""
DREAMZERO = "pipeline: dreamzero\nasync_chunk: false\n{top}stages:\n  - stage_id: 0\n" + STAGE + "{stage}"


def write_yaml(folder: Path, *, top: str = "", stage: str = "") -> Path:
    """Write a deploy YAML of DreamZero with one more line, at its top or in its stage."""
    file = folder / "deploy.yaml"
    file.write_text(DREAMZERO.format(top=top and f"{top}\n", stage=stage and f"    {stage}\n"))
    return file


def worker_config(model: Path, **written: Any) -> Any:
    """The ``OmniDiffusionConfig`` that the worker of the one stage is given.

    Args:
        model: A checkpoint's folder; its weights are not read.
        **written: Keyword arguments as ``Omni(model, ...)`` takes them.

    Raises:
        ValueError: vLLM-Omni refuses what is written.
    """
    from vllm_omni.config.resolver import resolve_omni_config
    from vllm_omni.engine import stage_init_utils as stages
    from vllm_omni.entrypoints.utils import prepare_stage_config_inputs

    inputs = prepare_stage_config_inputs(os.fspath(model), written, trust_remote_code=None)
    resolved = resolve_omni_config(
        inputs.model,
        trust_remote_code=inputs.trust_remote_code,
        cli_overrides=inputs.kwargs,
        deploy_config_path=inputs.deploy_config_path,
        stage_overrides=inputs.stage_overrides,
        strategy_config_path=inputs.strategy_config_path,
    )
    (stage,) = resolved.stage_configs
    metadata = stages.extract_stage_metadata_from_omni_stage_config(stage)
    return stages.build_diffusion_config(inputs.model, stage, metadata)


class CommandRefusedError(Exception):
    """vLLM-Omni's command line does not take it; the message is vLLM-Omni's."""


def serve_arguments(arguments: list[str]) -> dict[str, Any]:
    """What ``vllm serve`` makes of its arguments: those that were given, by name, with ``model``.

    Raises:
        CommandRefusedError: It does not take them.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = _parser().parse_args(["serve", *arguments])
            _command().validate(parsed)
    except (SystemExit, ValueError) as error:
        raise CommandRefusedError(said.getvalue() or str(error)) from None
    given = dict(parsed.get_explicit_kwargs_dict())
    for name in ("omni", "subparser", "dispatch_function"):
        given.pop(name, None)
    given["model"] = given.pop("model_tag", None) or given["model"]
    return given


@functools.cache
def _command() -> Any:
    from vllm_omni.entrypoints.cli.serve import cmd_init

    (command,) = [command for command in cmd_init() if command.name == "serve"]
    return command


@functools.cache
def _parser() -> Any:
    from vllm_omni.utils.tracking_parser import TrackingArgumentParser

    parser = TrackingArgumentParser()
    _command().subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    return parser

"""``doctor``: will the plugin do here what is asked of it? What is found out, and what follows from it.

Not here: how it looks in a terminal.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import metadata
from types import SimpleNamespace
from typing import Any

from vllm_omni_session_state.base import settings
from vllm_omni_session_state.base.errors import error_text
from vllm_omni_session_state.base.ids import ENV_KEY
from vllm_omni_session_state.base.kinds import Size
from vllm_omni_session_state.base.settings import ENV_FLAG, FLAG, OPTIONS, SETTINGS
from vllm_omni_session_state.omni import compat
from vllm_omni_session_state.omni.worker import budgets

GROUP = "vllm_omni.general_plugins"
ENTRY_POINT = "vllm_omni_session_state.plugin:register"
DISTRIBUTION = "vllm-omni-session-state"
ALLOWED = "VLLM_PLUGINS"

IN_ORDER, PROBLEMS, COULD_NOT_LOOK = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Plugin:
    """This plugin, as vLLM-Omni will find it: by the name of an entry point that ``VLLM_PLUGINS`` allows."""

    version: str | None
    name: str | None
    allowed: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """The settings of one stage.

    Attributes:
        stage_id: As in the deploy config; ``None`` where none was named: what the environment says.
        budgets: What its worker will say of its budgets; ``None`` where that cannot be told here.
    """

    stage_id: object
    on: bool
    settings: tuple[settings.Origin, ...]
    budgets: str | None


@dataclass(slots=True)
class Report:
    """What was found.

    Attributes:
        host: The versions of vLLM-Omni's packages.
        seams: Each as it was looked at; empty where vLLM-Omni cannot be imported.
        problems: What will not work as asked, and the remedy.
        unseen: Why something could not be looked at.
        notes: What is as it may be, and good to know.
    """

    plugin: Plugin
    host: list[compat.Version]
    deploy_config: str | None
    seams: list[compat.SeamCheck] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status; not having been able to look outweighs what was seen."""
        return COULD_NOT_LOOK if self.unseen else PROBLEMS if self.problems else IN_ORDER

    @property
    def on(self) -> bool:
        """Whether a stage has the flag on."""
        return any(stage.on for stage in self.stages)


def plain(value: Any) -> object:
    """A record of a report for ``json.dumps()``, with what follows from its fields; a size as text."""
    if isinstance(value, Size):
        return str(value)
    follows = {Report: ["status", "on"], compat.Version: ["known"]}.get(type(value), [])
    return {name: getattr(value, name) for name in follows + [each.name for each in fields(value)]}


def examine(*, deploy_config: str | None = None) -> Report:
    """Look at everything.

    Args:
        deploy_config: The deploy YAML that is served with.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # what vLLM-Omni has to say, it says when it serves
    report = Report(_plugin(), compat.versions(), deploy_config)
    _judge_plugin(report)
    _look_at_host(report)
    _look_at_settings(report)
    if report.stages and not report.on:
        otherwise = ", unless a stage of a deploy YAML says otherwise (--deploy-config)"
        elsewhere = "" if deploy_config else otherwise
        report.notes.append(
            f"the flag is off{elsewhere}: every model keeps its own session state. "
            f"To turn it on, set {ENV_FLAG}=1, or {FLAG}: true in the stage"
        )
    return report


def _plugin() -> Plugin:
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        version = None
    names = [entry.name for entry in metadata.entry_points(group=GROUP) if entry.value == ENTRY_POINT]
    name = names[0] if names else None
    named = os.environ.get(ALLOWED)
    return Plugin(version, name, allowed=named is None or name in named.split(","))


def _judge_plugin(report: Report) -> None:
    if report.plugin.name is None:
        report.problems.append(
            f"vLLM-Omni does not find the plugin: {sys.prefix} has no entry point {ENTRY_POINT} in {GROUP}. "
            f"Install {DISTRIBUTION} with the pip of this Python"
        )
    elif not report.plugin.allowed:
        report.problems.append(
            f"vLLM-Omni does not load the plugin: {ALLOWED}={os.environ[ALLOWED]!r} does not name "
            f"{report.plugin.name}. Add it to the list, without spaces, or unset the variable"
        )


def _look_at_host(report: Report) -> None:
    missing = [version.package for version in report.host if version.installed is None]
    if missing:
        wanted = ", ".join(f"{name} {compat.TESTED[name]}" for name in missing)
        report.unseen.append(
            f"vLLM-Omni is not there: {', '.join(missing)} cannot be found by {sys.executable}. "
            f"This was tested with {wanted}; run the command with the Python that serves"
        )
        return
    failure = compat.import_host()
    if failure is not None:
        report.unseen.append(f"vLLM-Omni cannot be imported: {failure}")
        return
    for version in report.host:
        if not version.known:
            found = version.installed or "of an unknown version"
            report.notes.append(
                f"{version.package} {found} is not the one that this was tested with ({version.tested}); "
                "what counts are the seams"
            )
    report.seams = compat.survey()
    for look in report.seams:
        if not look.ok:
            report.problems.append(
                f"a seam is not as expected: {look.place}: expected {look.expected}, found {look.found}; "
                f"{look.otherwise}. Take a vLLM-Omni that this was tested with ({compat.TESTED['vllm_omni']})"
            )


def _look_at_settings(report: Report) -> None:
    written: Mapping[str, Any] = {"stages": [{}]}
    if report.deploy_config is not None:
        if not report.seams:
            report.unseen.append(f"without vLLM-Omni {report.deploy_config} cannot be read")
            return
        try:
            written = compat.read_deploy_config(report.deploy_config)
        except ValueError as error:
            report.unseen.append(str(error))
            return
    _judge_places(report, written)
    heard: dict[str, None] = {}  # what several stages say is said once
    for stage in written["stages"]:
        held = {**stage, **(stage.get("engine_args") or {})}
        flag, options = held.get(FLAG), settings.options_of(SimpleNamespace(**held))
        found, _ = settings.origins(flag, os.environ, options=options)
        resolved, complaints = settings.resolve(flag, os.environ, options=options)
        bounds = None
        try:
            bounds, ignored = budgets.bounds_of(resolved, several_ranks=False)
            complaints += ignored
        except Exception as error:  # noqa: BLE001 - a per cent of a memory that is not there
            report.notes.append(f"the budgets cannot be worked out here: {error_text(error)}")
        heard.update((str(complaint), None) for complaint in complaints)
        named = None if bounds is None else str(bounds)
        report.stages.append(Stage(stage.get("stage_id"), resolved.enabled, found, named))
        replicas = compat.replicas_of(written, stage)
        if resolved.enabled and replicas > 1:
            _judge_affinity(report, stage.get("stage_id"), replicas)
    report.problems += [*heard, *unread(os.environ)]


def unread(environ: Iterable[str]) -> list[str]:
    """Of each variable that looks like a setting and is none, that it is not read, and what may be meant."""
    known = {ENV_KEY, *(setting.variable for setting in SETTINGS)}
    said = []
    for name in sorted(name for name in environ if name.startswith(ENV_FLAG) and name not in known):
        near = [f"; do you mean {near}?" for near in difflib.get_close_matches(name, known, n=1)]
        said.append(f"{name} is no setting and is not read" + "".join(near))
    return said


def _judge_affinity(report: Report, stage_id: object, replicas: int) -> None:
    """Say whether each session's steps go to one of a stage's replicas."""
    ours = report.plugin.name is not None and report.plugin.allowed
    if ours and all(look.ok for look in report.seams if compat.is_of_a_pool(look)):
        report.notes.append(
            f"stage {stage_id} has {replicas} replicas: affinity holds here, all steps of a session go to one"
        )
        return
    why = "a seam of vLLM-Omni's pool of replicas differs" if ours else "the plugin is not loaded"
    report.problems.append(
        f"stage {stage_id} has {replicas} replicas, and sessions WILL be split between them: {why}. "
        "Their outputs will be wrong: serve with num_replicas: 1 until that is mended"
    )


def _judge_places(report: Report, written: Mapping[str, Any]) -> None:
    """Say what stands where vLLM-Omni drops it without a word."""
    key = OPTIONS.rpartition(".")[2]
    for name, home in ((FLAG, "a stage"), (key, "a stage's model_config")):
        if name in written:
            report.problems.append(f"{name} at the top of the deploy YAML has no effect: write it in {home}")
    for stage in written["stages"]:
        where = f"stage {stage.get('stage_id')}"
        if isinstance(stage.get("model_config"), Mapping) and FLAG in stage["model_config"]:
            report.problems.append(f"{FLAG} in the model_config of {where} has no effect: write it beside it")
        if key in stage:
            report.problems.append(f"{key} of {where} has no effect: write it in the stage's model_config")

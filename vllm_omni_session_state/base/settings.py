"""Settings: what is in force, and what was wrong with what the operator wrote.

A *set* environment variable wins over the deploy config in both directions, so that one deployment can
be run twice with only the flag flipped. Nonsense never raises (serving goes on) and is never ignored
in silence: each piece of it becomes one complaint that names the value and what is used instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

from vllm_omni_session_state.base.sizes import SIZE_WORDS, Size, read_size

FLAG = "enable_session_state_manager"
"""The deploy config's field."""

ENV_FLAG = "OMNI_DIFFUSION_SESSION_STATE_MANAGER"
ENV_MAX_SESSIONS = "OMNI_DIFFUSION_SESSION_STATE_MANAGER_MAX_SESSIONS"

OPTIONS = "model_config.session_state"
"""The mapping in a stage of the deploy config that holds every setting but the flag."""

DEFAULT_MAX_SESSIONS = 64
"""Sessions kept; mirrors the cap of DreamZero's own session table."""

DEFAULT_MAX_PARKED = 4096
"""Sessions parked at once."""

DEFAULT_EXPIRE_S = 86_400.0
"""Seconds for which a parked session is kept for its client: a day."""

_OPTION_NAMES = (
    "device_budget",
    "host_budget",
    "disk.path",
    "disk.budget",
    "idle_park_s",
    "expire_s",
    "idle_drop_s",
    "max_parked",
    "on_lost",
    "video_latents",
    "keep_on_exit",
    "kv_pool",
    "show_ids",
    "resume_s",
    "switch_ends",
    "http",
)
_GROUPS = frozenset(name.partition(".")[0] for name in _OPTION_NAMES if "." in name)
"""Settings that a deploy config may write as a mapping of their own."""

_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


VideoLatents: TypeAlias = Literal["keep", "spill"] | int
"""All in host memory, the older ones on the disk, or only the last so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is in force.

    Attributes:
        enabled: Whether models get manager-backed session state.
        max_sessions: Sessions kept in the table, at least 1; beyond it the least recently used leaves.
        device_budget: What idle sessions may hold on the device; ``None``: any.
        host_budget: What sessions may hold in host memory, live and parked; ``None``: none is parked there.
        disk_path: Folder below which each worker has its own for parked sessions; ``None``: none goes there.
        disk_budget: What the files of one worker may take.
        idle_park_s: Seconds after its last step when a served session is parked; 0 parks none for its age.
        expire_s: Seconds after its last step when a served session that is parked ends; 0 ends none.
        idle_drop_s: Seconds after its last step when a served session is marked stale: it may be dropped
            when room is wanted, although nobody may be lost; 0 marks none.
        max_parked: Sessions parked at once.
        on_lost: ``"warn"``, or ``"error"``: refuse a new session rather than lose another.
        video_latents: What becomes of the latents that a model keeps for a later decode of its video.
        keep_on_exit: Whether a worker that is shut down leaves its sessions on the disk.
        kv_pool: Whether the device budget decides how large the engine's KV pool is, or vLLM-Omni alone.
        show_ids: Whether logs and listings show session ids in the clear.
        resume_s: Seconds for which a robot's session is kept after a disconnect, for a connection that
            names its explicit id; 0 keeps none.
        switch_ends: Whether a connection that goes on to another session has ended the earlier one.
        http: Whether the API server has routes that show sessions and act on them.
    """

    enabled: bool = False
    max_sessions: int = DEFAULT_MAX_SESSIONS
    device_budget: Size | None = None
    host_budget: Size | None = None
    disk_path: str | None = None
    disk_budget: Size | None = None
    idle_park_s: float = 0.0
    expire_s: float = DEFAULT_EXPIRE_S
    idle_drop_s: float = 0.0
    max_parked: int = DEFAULT_MAX_PARKED
    on_lost: Literal["warn", "error"] = "warn"
    video_latents: VideoLatents = "keep"
    keep_on_exit: bool = False
    kv_pool: Literal["budget", "host"] = "budget"
    show_ids: bool = False
    resume_s: float = 0.0
    switch_ends: bool = False
    http: bool = False


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Kind(Generic[T]):
    """What one kind of setting may hold: in words, and how it is read; ``None`` is nonsense."""

    wanted: str
    read: Callable[[object], T | None]


def _read_switch(value: object) -> bool | None:
    return value if isinstance(value, bool) else _WORDS.get(str(value).strip().lower())


def _read_seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _read_count(value: object) -> int | None:
    try:
        count = int(str(value)) if isinstance(value, int | str) and not isinstance(value, bool) else 0
    except ValueError:
        return None
    return count if count > 0 else None


def _read_on_lost(value: object) -> Literal["warn", "error"] | None:
    words: dict[str, Literal["warn", "error"]] = {"warn": "warn", "error": "error"}
    return words.get(str(value).strip().lower())


def _read_path(value: object) -> str | None:
    text = value.strip() if isinstance(value, str) else ""
    return text if text and "\0" not in text else None


def _read_video_latents(value: object) -> VideoLatents | None:
    words: dict[str, VideoLatents] = {"keep": "keep", "spill": "spill"}
    text = str(value).strip().lower()
    name, _, number = text.partition(":")
    return _read_count(number) if name.strip() == "last" else words.get(text)


def _read_kv_pool(value: object) -> Literal["budget", "host"] | None:
    words: dict[str, Literal["budget", "host"]] = {"budget": "budget", "host": "host"}
    return words.get(str(value).strip().lower())


_size: _Kind[Size | None] = _Kind(SIZE_WORDS, read_size)
_count = _Kind("a positive whole number", _read_count)
_on_lost: _Kind[Literal["warn", "error"]] = _Kind("warn or error", _read_on_lost)
_kv_pool: _Kind[Literal["budget", "host"]] = _Kind("budget or host", _read_kv_pool)
_switch = _Kind("one of " + "/".join(_WORDS), _read_switch)
_path: _Kind[str | None] = _Kind("the path of a folder", _read_path)
_video_latents: _Kind[VideoLatents] = _Kind("keep, spill or last:N, such as last:100", _read_video_latents)
_seconds = _Kind("a number of seconds, 0 or more", _read_seconds)


@dataclass(frozen=True, slots=True)
class Complaint:
    """One value that could not be understood.

    Attributes:
        setting: The environment variable or config key.
        value: What it held, as written.
        wanted: What it may hold.
        instead: What is used instead.
    """

    setting: str
    value: str
    wanted: str
    instead: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value!r} is not {self.wanted}; using {self.instead}"


def options_of(stage: object) -> object:
    """What a stage's configuration holds for this plugin beside the flag; ``None`` where that is nothing."""
    model_config = getattr(stage, "model_config", None)
    return model_config.get("session_state") if isinstance(model_config, Mapping) else None


def resolve(
    flag: object, environ: Mapping[str, str], *, options: object = None
) -> tuple[Settings, tuple[Complaint, ...]]:
    """Combine the deploy config with the environment.

    Args:
        flag: The config field's value; ``None`` where vLLM-Omni has no such field.
        environ: The process environment.
        options: The stage's ``model_config.session_state``; ``None`` where it has none.

    Returns:
        The settings in force and what was wrong on the way to them.
    """
    complaints: list[Complaint] = []
    option = _Options(configured=_known(options, complaints), environ=environ, complaints=complaints)
    settings = Settings(
        enabled=_flag(flag, environ, complaints),
        max_sessions=_max_sessions(environ, complaints),
        device_budget=option("device_budget", _size, default=None),
        host_budget=option("host_budget", _size, default=None),
        disk_path=option("disk.path", _path, default=None),
        disk_budget=option("disk.budget", _size, default=None),
        idle_park_s=option("idle_park_s", _seconds, default=0.0),
        expire_s=option("expire_s", _seconds, default=DEFAULT_EXPIRE_S),
        idle_drop_s=option("idle_drop_s", _seconds, default=0.0),
        max_parked=option("max_parked", _count, default=DEFAULT_MAX_PARKED),
        on_lost=option("on_lost", _on_lost, default="warn"),
        video_latents=option("video_latents", _video_latents, default="keep"),
        keep_on_exit=option("keep_on_exit", _switch, default=False),
        kv_pool=option("kv_pool", _kv_pool, default="budget"),
        show_ids=option("show_ids", _switch, default=False),
        resume_s=option("resume_s", _seconds, default=0.0),
        switch_ends=option("switch_ends", _switch, default=False),
        http=option("http", _switch, default=False),
    )
    return settings, tuple(complaints)


def _flag(flag: object, environ: Mapping[str, str], complaints: list[Complaint]) -> bool:
    words = _switch.wanted
    configured = False if flag is None else _switch.read(flag)
    if configured is None:
        complaints.append(Complaint(FLAG, str(flag), words, "off"))
        configured = False
    text = environ.get(ENV_FLAG, "").strip()
    if not text:  # an empty variable is how a shell script leaves one unset
        return configured
    override = _WORDS.get(text.lower())
    if override is None:
        complaints.append(Complaint(ENV_FLAG, text, words, f"the config's {'on' if configured else 'off'}"))
        return configured
    return override


def _max_sessions(environ: Mapping[str, str], complaints: list[Complaint]) -> int:
    text = environ.get(ENV_MAX_SESSIONS, "").strip()
    if not text:
        return DEFAULT_MAX_SESSIONS
    count = _count.read(text)
    if count is None:
        complaints.append(Complaint(ENV_MAX_SESSIONS, text, _count.wanted, str(DEFAULT_MAX_SESSIONS)))
    return count or DEFAULT_MAX_SESSIONS


def _known(options: object, complaints: list[Complaint]) -> Mapping[object, object]:
    """The settings that the deploy config holds, without what nobody asked for."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        complaints.append(Complaint(OPTIONS, str(options), "a mapping of settings", "the defaults"))
        return {}
    written: dict[object, object] = {}
    for key, value in options.items():
        if key in _GROUPS and isinstance(value, Mapping):
            written.update((f"{key}.{name}", held) for name, held in value.items())
        else:
            written[key] = value
    unknown = [str(key) for key in written if key not in _OPTION_NAMES]
    if unknown:
        named = ", ".join(sorted(unknown))
        complaints.append(Complaint(OPTIONS, named, f"any of {', '.join(_OPTION_NAMES)}", "the rest"))
    return written


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """Where the settings beside the flag are written, and what is wrong with them."""

    configured: Mapping[object, object]
    environ: Mapping[str, str]
    complaints: list[Complaint]

    def __call__(self, name: str, kind: _Kind[T], *, default: T) -> T:
        """One setting: the environment's where that is set and no nonsense, else the config's."""
        value = default
        variable = f"{ENV_FLAG}_{name.upper().replace('.', '_')}"
        text = self.environ.get(variable, "").strip() or None
        for place, written in ((f"{OPTIONS}.{name}", self.configured.get(name)), (variable, text)):
            read = None if written is None else kind.read(written)
            if read is not None:
                value = read
            elif written is not None:
                instead = "none" if value is None else str(value)
                self.complaints.append(Complaint(place, str(written), kind.wanted, instead))
        return value

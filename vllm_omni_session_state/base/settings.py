"""Settings: what is in force, where it came from, and what was wrong with what the operator wrote.

One field of ``Settings`` declares one setting: keys, variables, defaults, complaints, the tables of the docs
and what ``doctor`` shows follow from it. A *set* environment variable wins over the deploy config in both
directions, so that one deployment can be run twice with only the flag flipped. Nonsense never raises
(serving goes on) and is never ignored in silence: each piece of it becomes one complaint.
"""

# ruff: noqa: RUF009 - a declaration makes a dataclass's field

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from vllm_omni_session_state.base.kinds import (
    COUNT,
    FOLDER,
    KV_POOL,
    ON_LOST,
    SECONDS,
    SIZE,
    SWITCH,
    VIDEO_LATENTS,
    Kind,
    Size,
    VideoLatents,
)

FLAG = "enable_session_state_manager"
"""The deploy config's field."""

ENV_FLAG = "OMNI_DIFFUSION_SESSION_STATE_MANAGER"
ENV_MAX_SESSIONS = f"{ENV_FLAG}_MAX_SESSIONS"

OPTIONS = "model_config.session_state"
"""The mapping in a stage of the deploy config that holds every setting but the flag and the cap."""

DEFAULT_MAX_SESSIONS = 64
"""Sessions kept; mirrors the cap of DreamZero's own session table."""

DEFAULT_MAX_PARKED = 4096
"""Sessions parked at once."""

_DAY_S = 86_400.0


def _setting(kind: Kind, default: object, meaning: str, *, key: str = "", option: bool = True) -> Any:
    """Declare a setting.

    Args:
        kind: What it may hold.
        default: Its value where nobody sets it.
        meaning: With what its row in the docs begins.
        key: As a deploy config writes it, if not as the field. For ``a.b`` it may write a mapping ``a`` too.
        option: Whether ``OPTIONS`` may hold it.
    """
    return field(
        default=default, metadata={"kind": kind, "meaning": meaning, "own_key": key, "option": option}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is in force. Budgets are of one worker process."""

    enabled: bool = _setting(SWITCH, False, "models get manager-backed session state", key=FLAG, option=False)
    max_sessions: int = _setting(COUNT, DEFAULT_MAX_SESSIONS, "sessions kept on the device", option=False)
    device_budget: Size | None = _setting(SIZE, None, "bytes on the device of sessions that nobody uses")
    host_budget: Size | None = _setting(SIZE, None, "bytes of session state in host memory, live and parked")
    disk_path: str | None = _setting(FOLDER, None, "where parked sessions go", key="disk.path")
    disk_budget: Size | None = _setting(SIZE, None, "bytes of files", key="disk.budget")
    idle_park_s: float = _setting(SECONDS, 0.0, "parks a session so long after its last step")
    expire_s: float = _setting(SECONDS, _DAY_S, "ends a parked session so long after its last step")
    idle_drop_s: float = _setting(SECONDS, 0.0, "lets a session go so long after its last step, for room")
    max_parked: int = _setting(COUNT, DEFAULT_MAX_PARKED, "sessions parked at once")
    on_lost: Literal["warn", "error"] = _setting(ON_LOST, "warn", "what happens where there is no room")
    video_latents: VideoLatents = _setting(
        VIDEO_LATENTS, "keep", "what becomes of the latents that DreamZero keeps for a later decode"
    )
    keep_on_exit: bool = _setting(SWITCH, False, "a worker that is shut down leaves its sessions on the disk")
    kv_pool: Literal["budget", "host"] = _setting(KV_POOL, "budget", "who decides how large the KV pool is")
    show_ids: bool = _setting(SWITCH, False, "logs and listings show ids in the clear")
    resume_s: float = _setting(SECONDS, 0.0, "after a disconnect the session is kept for so long")
    switch_ends: bool = _setting(
        SWITCH, False, "a connection that goes on to another session has ended the earlier one"
    )
    http: bool = _setting(SWITCH, False, "the API server has routes that show sessions and act on them")

    @property
    def has_disk(self) -> bool:
        """Whether sessions can be parked on a disk."""
        return None not in (self.disk_path, self.disk_budget)

    @property
    def has_tier(self) -> bool:
        """Whether sessions can be parked at all."""
        return self.host_budget is not None or self.has_disk


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, as its field declares it."""

    name: str
    default: object
    kind: Kind
    meaning: str
    own_key: str
    option: bool

    @property
    def key(self) -> str:
        """As a deploy config writes it."""
        return self.own_key or self.name

    @property
    def place(self) -> str:
        """Where a deploy config writes it."""
        return f"{OPTIONS}.{self.key}" if self.option else self.key

    @property
    def variable(self) -> str:
        """The environment's."""
        return ENV_FLAG if self.name == "enabled" else f"{ENV_FLAG}_{self.name.upper()}"


SETTINGS = tuple(Setting(each.name, each.default, **each.metadata) for each in fields(Settings))
OPTION_KEYS = tuple(setting.key for setting in SETTINGS if setting.option)
_GROUPS = frozenset(key.partition(".")[0] for key in OPTION_KEYS if "." in key)


@dataclass(frozen=True, slots=True)
class Complaint:
    """One thing that an operator wrote and does not get.

    Attributes:
        setting: The environment variable, the config's key, or the setting.
        value: What it held, as written.
        instead: What is used instead.
        text: All of it in a sentence, with what can be done.
    """

    setting: str
    value: str
    instead: str
    text: str

    def __str__(self) -> str:
        return self.text


Source: TypeAlias = Literal["environment", "config", "default"]


@dataclass(frozen=True, slots=True)
class Origin:
    """One setting in force.

    Attributes:
        name: As a deploy config writes it.
        value: What is in force.
        source: Where it came from.
        where: The variable or the config's key; ``""`` for a default.
    """

    name: str
    value: Any
    source: Source
    where: str


def options_of(stage: object) -> object:
    """What a stage's configuration holds for this plugin beside the flag; ``None`` where that is nothing."""
    model_config = getattr(stage, "model_config", None)
    return model_config.get("session_state") if isinstance(model_config, Mapping) else None


def origins(
    flag: object, environ: Mapping[str, str], *, options: object = None
) -> tuple[tuple[Origin, ...], tuple[Complaint, ...]]:
    """Combine the deploy config with the environment.

    Args:
        flag: The config field's value; ``None`` where vLLM-Omni has no such field.
        environ: The process environment.
        options: The stage's ``model_config.session_state``; ``None`` where it has none.

    Returns:
        Each of ``SETTINGS`` with where it came from, and what was wrong on the way.
    """
    complaints: list[Complaint] = []
    config = {**_known(options, complaints), FLAG: flag}
    found = []
    for setting in SETTINGS:
        origin = Origin(setting.key, setting.default, "default", "")
        variable = environ.get(setting.variable, "").strip() or None  # a script leaves one unset as empty
        places: tuple[tuple[Source, str, object], ...] = (
            ("config", setting.place, config.get(setting.key)),
            ("environment", setting.variable, variable),
        )
        for source, where, written in places:
            value = None if written is None else setting.kind.read(written)
            if value is not None:
                origin = Origin(setting.key, value, source, where)
            elif written is not None:
                instead = (
                    f"the config's {_shown(origin.value)}" if where == ENV_FLAG else _shown(origin.value)
                )
                complaints.append(_nonsense(where, written, setting.kind.wanted, instead))
        found.append(origin)
    return tuple(found), tuple(complaints)


def resolve(
    flag: object, environ: Mapping[str, str], *, options: object = None
) -> tuple[Settings, tuple[Complaint, ...]]:
    """The settings in force, and what was wrong on the way to them; takes what ``origins()`` takes."""
    found, complaints = origins(flag, environ, options=options)
    values = {setting.name: origin.value for setting, origin in zip(SETTINGS, found, strict=True)}
    return Settings(**values), complaints


def _known(options: object, complaints: list[Complaint]) -> dict[str, object]:
    """The settings that the deploy config holds, by key, without what nobody asked for."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        complaints.append(_nonsense(OPTIONS, options, "a mapping of settings", "the defaults"))
        return {}
    written: dict[object, object] = {}
    for key, value in options.items():
        if key in _GROUPS and isinstance(value, Mapping):
            written.update((f"{key}.{name}", held) for name, held in value.items())
        else:
            written[key] = value
    if unknown := sorted(str(key) for key in written if key not in OPTION_KEYS):
        wanted = f"any of {', '.join(OPTION_KEYS)}"
        complaints.append(_nonsense(OPTIONS, ", ".join(unknown), wanted, "the rest"))
    return {key: written[key] for key in OPTION_KEYS if key in written}


def _nonsense(where: str, written: object, wanted: str, instead: str) -> Complaint:
    value = str(written)
    return Complaint(where, value, instead, f"{where}={value!r} is not {wanted}; using {instead}")


def _shown(value: object) -> str:
    return "none" if value is None else ("off", "on")[value] if isinstance(value, bool) else str(value)

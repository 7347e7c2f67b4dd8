"""Settings: what is in force, and what was wrong with what the operator wrote.

A *set* environment variable wins over the deploy config in both directions, so that one deployment can
be run twice with only the flag flipped. Nonsense never raises (serving goes on) and is never ignored
in silence: each piece of it becomes one complaint that names the value and what is used instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FLAG = "enable_session_state_manager"
"""The deploy config's field."""

ENV_FLAG = "OMNI_DIFFUSION_SESSION_STATE_MANAGER"
ENV_MAX_SESSIONS = "OMNI_DIFFUSION_SESSION_STATE_MANAGER_MAX_SESSIONS"

DEFAULT_MAX_SESSIONS = 64
"""Sessions kept; mirrors the cap of DreamZero's own session table."""

DEFAULT_MAX_PARKED = 4096
"""Sessions parked at once."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is in force.

    Attributes:
        enabled: Whether models get manager-backed session state.
        max_sessions: Sessions kept in the table, at least 1; beyond it the least recently used leaves.
    """

    enabled: bool = False
    max_sessions: int = DEFAULT_MAX_SESSIONS


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


def resolve(flag: object, environ: Mapping[str, str]) -> tuple[Settings, tuple[Complaint, ...]]:
    """Combine the deploy config's flag with the environment.

    Args:
        flag: The config field's value; ``None`` where the host has no such field.
        environ: The process environment.

    Returns:
        The settings in force and what was wrong on the way to them.
    """
    complaints: list[Complaint] = []
    enabled = _flag(flag, environ, complaints)
    max_sessions = _max_sessions(environ, complaints)
    return Settings(enabled=enabled, max_sessions=max_sessions), tuple(complaints)


def _flag(flag: object, environ: Mapping[str, str], complaints: list[Complaint]) -> bool:
    words = "one of " + "/".join(_WORDS)
    configured = False if flag is None else _parsed(flag)
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


def _parsed(flag: object) -> bool | None:
    if isinstance(flag, bool):
        return flag
    return _WORDS.get(str(flag).strip().lower())


def _max_sessions(environ: Mapping[str, str], complaints: list[Complaint]) -> int:
    text = environ.get(ENV_MAX_SESSIONS, "").strip()
    if not text:
        return DEFAULT_MAX_SESSIONS
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count > 0:
        return count
    complaints.append(Complaint(ENV_MAX_SESSIONS, text, "a positive whole number", str(DEFAULT_MAX_SESSIONS)))
    return DEFAULT_MAX_SESSIONS

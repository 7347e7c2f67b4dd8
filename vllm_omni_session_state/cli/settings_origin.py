"""Where each setting in force came from. What is in force, ``config.resolve()`` alone says.

Not here: where the deploy config and the environment are read.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from vllm_omni_session_state.base import settings
from vllm_omni_session_state.base.ids import ENV_KEY
from vllm_omni_session_state.base.settings import (
    ENV_FLAG,
    ENV_MAX_SESSIONS,
    FLAG,
    OPTIONS,
    Complaint,
    Settings,
)


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
    value: object
    source: Literal["environment", "config", "default"]
    where: str


def origins(
    flag: object, environ: Mapping[str, str], *, options: object = None
) -> tuple[tuple[Origin, ...], tuple[Complaint, ...]]:
    """Every setting with where it came from, and what was wrong; takes what ``resolve()`` takes."""
    resolved, complaints = settings.resolve(flag, environ, options=options)
    refused = {complaint.setting for complaint in complaints}
    found = []
    for field in fields(Settings):
        value = getattr(resolved, field.name)
        name, variable, key, written = _places(field.name, flag, options)
        if environ.get(variable, "").strip() and variable not in refused:
            found.append(Origin(name, value, "environment", variable))
        elif written is not None and key not in refused:
            found.append(Origin(name, value, "config", key))
        else:
            found.append(Origin(name, value, "default", ""))
    return tuple(found), complaints


def unread(environ: Iterable[str]) -> dict[str, str | None]:
    """Variables that look like a setting and are none, each with the one that may be meant."""
    known = {ENV_KEY, *(_variable(field.name) for field in fields(Settings))}
    strange = sorted(name for name in environ if name.startswith(ENV_FLAG) and name not in known)
    return {name: next(iter(difflib.get_close_matches(name, known, n=1)), None) for name in strange}


def _variable(field: str) -> str:
    named = {"enabled": ENV_FLAG, "max_sessions": ENV_MAX_SESSIONS}
    return named.get(field, f"{ENV_FLAG}_{field.upper()}")


def _places(field: str, flag: object, options: object) -> tuple[str, str, str, object]:
    """The setting's name, variable and key, and what stands under the key."""
    if field == "enabled":
        return FLAG, _variable(field), FLAG, flag
    if field == "max_sessions":
        return field, _variable(field), "", None
    # A key may be of a group, as in ``disk.path``, and the group may be a mapping of its own.
    name = next((key for key in settings._OPTION_NAMES if key.replace(".", "_") == field), field)  # noqa: SLF001
    written = None
    if isinstance(options, Mapping):
        group, _, rest = name.partition(".")
        inside = options.get(group) if rest else None
        written = options.get(name, inside.get(rest) if isinstance(inside, Mapping) else None)
    return name, _variable(field), f"{OPTIONS}.{name}", written

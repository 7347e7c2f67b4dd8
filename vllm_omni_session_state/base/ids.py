"""Session ids: which are the same session, how one is shown, and who is meant by a name.

An id is a bearer secret: whoever knows it can continue the rollout. Logs and listings therefore show a
keyed hash, from which nobody can find the id by guessing, unless the operator asks for ids in the clear.
All processes of a deployment share the key, so that a session looks the same wherever it is shown.

Two sessions are never shown alike: not by letters that look alike, nor by an id that was made to look like
another's hash or like another's written-out signs. And what is shown is one word of ASCII.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
from collections.abc import Iterable
from typing import Literal

from vllm_omni_session_state.base.errors import SessionStateError
from vllm_omni_session_state.base.printable import escaped
from vllm_omni_session_state.base.settings import ENV_FLAG

DEFAULT = "default"
"""The session of a client that names none; vLLM-Omni's runner and pipelines use the same word."""

ENV_KEY = f"{ENV_FLAG}_ID_KEY"
"""The deployment's key, any text: child processes inherit it, and several machines can be given one."""

MOST_SHOWN = 96
"""Signs of an id that are shown at most; of a longer one it is the first half of these, and its hash."""

_HASHED = re.compile(r"s-[0-9a-f]{12}")
_OWN_KEY = secrets.token_hex(32)  # of a process that has no deployment around it
_in_the_clear = False


def export_key() -> None:
    """Give this process and its children one key, unless they have been given one."""
    if not os.environ.get(ENV_KEY):
        os.environ[ENV_KEY] = _OWN_KEY


def show_in_the_clear(on: bool) -> None:  # noqa: FBT001 - reads as the setting
    """Show ids themselves in this process, or their hashes."""
    global _in_the_clear  # noqa: PLW0603 - one setting of a process
    _in_the_clear = on


def session_key(session_id: str | None) -> str:
    """The table key of a session id: itself, or ``"default"`` for ``None`` and ``""``.

    Raises:
        TypeError: For anything else, since ``str()`` would make one session of ``0`` and ``"0"``.
    """
    if session_id is None or session_id == "":
        return DEFAULT
    if not isinstance(session_id, str):
        raise TypeError(
            f"session id {session_id!r} is of type {type(session_id).__name__}, not str; "
            "convert it where the request is made"
        )
    return session_id


def fingerprint(key: str) -> bytes:
    """A session key's hash under the deployment's key, 16 bytes: what is remembered of one that is gone."""
    secret = _key_bytes(os.environ.get(ENV_KEY) or _OWN_KEY)
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), key=secret, digest_size=16).digest()


def digest(key: str) -> str:
    """The same as text: what tells sessions apart for a program. People are shown less of it."""
    return fingerprint(key).hex()


def redacted_id(key: str) -> str:
    """The hash of a session key, whatever is shown."""
    return f"s-{fingerprint(key)[:6].hex()}"


def display_id(key: str) -> str:
    """A session key as logs and listings show it: a hash under the deployment's key, or itself, escaped."""
    if not _in_the_clear:
        return redacted_id(key)
    if len(key) > MOST_SHOWN:
        return f"{escaped(key[: MOST_SHOWN // 2])}\\...{redacted_id(key)}"  # a dot is never escaped
    if _HASHED.fullmatch(key):
        return f"\\x73{key[1:]}"  # its "s" written out: only a hash looks like one
    return escaped(key)


def may_be_shown(name: str) -> bool:
    """Whether some session could be shown like that and have another id."""
    return bool(_HASHED.fullmatch(name)) or (_in_the_clear and "\\" in name)


class AmbiguousNameError(SessionStateError):
    """A name means more than one session; nothing was done to any of them."""

    message = (
        "more than one session answers to this name, and nothing has changed; name the one that you mean by "
        "its id, as a listing with show_ids shows it"
    )


class Names:
    """Who is meant by a name, among the sessions that are there.

    A listing is what an operator reads names from. So a name means the session that is shown like that, also
    where a client has chosen that very text for its id; else it is an id.

    Args:
        keys: Of the sessions.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = frozenset(keys)
        self._shown: dict[str, set[str]] = {}

    def find(self, name: str | None, *, only: Literal["id", "shown"] | None = None) -> str | None:
        """The key that a name means; ``None`` where there is no such session.

        Args:
            name: A name.
            only: ``"id"`` takes it for an id and nothing else; ``"shown"`` takes it for an id only where no
                session could be shown like that.

        Raises:
            TypeError: For a name that is no string.
            AmbiguousNameError: If it means several.
        """
        wanted = session_key(name)
        itself = wanted if wanted in self._keys else None
        if only == "id" or not may_be_shown(wanted):
            return itself
        meant = self._shown_like(wanted)
        if _in_the_clear and itself is not None and _HASHED.fullmatch(wanted):
            meant = meant | {itself}  # where ids are shown, a hash is no more shown than this id is
        if len(meant) > 1:
            raise AmbiguousNameError
        return next(iter(meant), None if only == "shown" else itself)

    def _shown_like(self, name: str) -> set[str]:
        if not self._shown:
            for key in self._keys:
                for text in {redacted_id(key), display_id(key)}:
                    self._shown.setdefault(text, set()).add(key)
        return self._shown.get(name, set())


@functools.lru_cache(maxsize=4)
def _key_bytes(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=32).digest()

"""Session ids: which are the same session, and how one is shown.

An id is a bearer secret: whoever knows it can continue the rollout. Logs and listings therefore show a
keyed hash, from which nobody can find the id by guessing.
"""

from __future__ import annotations

import hashlib
import secrets

DEFAULT = "default"
"""The session of a client that names none; the host's runner and pipelines use the same word."""

_KEY = secrets.token_bytes(32)


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
    """A session key's hash under the secret key, 16 bytes: what is remembered of a session that is gone."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), key=_KEY, digest_size=16).digest()


def shown(key: str) -> str:
    """A session key as logs and listings show it: the start of its fingerprint."""
    return f"s-{fingerprint(key)[:6].hex()}"

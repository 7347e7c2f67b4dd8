"""Session ids: which are the same session, how one is shown, and who is meant by a name.

An id is a bearer secret: whoever knows it can continue the rollout. Logs and listings therefore show a
keyed hash, from which nobody can find the id by guessing, unless the operator asks for ids in the clear.
All processes of a deployment share the key, so that a session looks the same wherever it is shown.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
from collections.abc import Iterable

from vllm_omni_session_state.config import ENV_FLAG

DEFAULT = "default"
"""The session of a client that names none; the host's runner and pipelines use the same word."""

ENV_KEY = f"{ENV_FLAG}_ID_KEY"
"""The deployment's key, any text: child processes inherit it, and several machines can be given one."""

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


def shown(key: str) -> str:
    """A session key as logs and listings show it: a hash under the deployment's key, or itself."""
    if _in_the_clear:
        return key.encode("utf-8", "backslashreplace").decode("utf-8")  # what any log and any wire can carry
    return hashed(key)


def hashed(key: str) -> str:
    """The hash of a session key, whatever is shown."""
    return f"s-{fingerprint(key)[:6].hex()}"


def find(name: str | None, keys: Iterable[str]) -> str | None:
    """The key among ``keys`` that a name means: the id itself before an id that is shown like that.

    Raises:
        TypeError: For a name that is no string.
    """
    wanted = session_key(name)
    known = list(keys)
    if wanted in known:
        return wanted
    return next((key for key in known if wanted in (hashed(key), shown(key))), None)


@functools.lru_cache(maxsize=4)
def _key_bytes(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=32).digest()

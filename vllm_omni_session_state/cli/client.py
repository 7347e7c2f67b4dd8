"""A server's routes, from the command line: one request at a time, and one clear line for what goes wrong."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from vllm_omni_session_state.base.settings import ENV_FLAG

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where ``vllm serve`` listens if it is not told otherwise."""

ENV_API_KEY = "VLLM_API_KEY"
"""From which the server takes its key too."""

PATH = "/v1/session_state/sessions"
DEFAULT_TIMEOUT_S = 10.0
MORE_S = 5.0
"""So much longer than the server waits for its workers, this waits for the server."""


class CommandError(Exception):
    """What was asked for cannot be done; the message is all that a user sees."""


class WorkerFailedError(CommandError):
    """The server answered that a worker failed at what was asked of this one session."""


class NotDoneError(Exception):
    """The server answered, and did not do it: there is no such session, it is in use, or it does not move."""


class Client:
    """One server. Whatever is asked raises ``CommandError`` where no answer of its routes comes.

    Args:
        url: Of the server.
        api_key: Its key; ``None``: what the environment says.
        timeout_s: For how long the server is to wait for its workers.

    Raises:
        CommandError: For a URL that is none.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, api_key: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CommandError(f"--url {url!r} is no address of a server, such as {DEFAULT_URL}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._api_key = os.environ.get(ENV_API_KEY) if api_key is None else api_key
        self._timeout_s = timeout_s

    def sessions(self) -> dict[str, Any]:
        """All sessions."""
        return self._ask("GET", f"?timeout_s={self._timeout_s:g}")

    def session(self, name: str) -> dict[str, Any]:
        """One session with its values; ``NotDoneError`` if there is none."""
        return self._ask("GET", f"/{_quoted(name)}?timeout_s={self._timeout_s:g}")

    def act(self, how: str, name: str) -> dict[str, Any]:
        """Close, reset, park or restore a session; ``NotDoneError`` if the server did not do it."""
        return self._ask("POST", f"/{_quoted(name)}/{how}", {"timeout_s": self._timeout_s})

    def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        headers = {"Accept": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        try:
            request = urllib.request.Request(  # noqa: S310 - the scheme was looked at
                f"{self.url}{PATH}{path}", method=method, data=data, headers=headers
            )
            with urllib.request.urlopen(request, timeout=self._timeout_s + MORE_S) as answer:  # noqa: S310
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise CommandError(f"no answer from {self.url}: {why}; --url names another server") from error
        return self._understood(status, text)

    def _understood(self, status: int, text: bytes) -> dict[str, Any]:
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        if status == http.client.OK and isinstance(content, dict):
            return content
        if status == http.client.UNAUTHORIZED:
            raise CommandError(
                f"{self.url} wants its API key, and {'another one' if self._api_key else 'none'} was given: "
                f"pass --api-key, or set {ENV_API_KEY}"
            )
        error = content.get("error") if isinstance(content, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        if message is None:
            raise CommandError(
                f"{self.url} answers {status} and has no routes for sessions: "
                f"serve with the plugin's flag on, and with {ENV_FLAG}_HTTP=on"
            )
        if status in (http.client.NOT_FOUND, http.client.CONFLICT):
            raise NotDoneError(message)
        failed = WorkerFailedError if status == http.client.BAD_GATEWAY else CommandError
        raise failed(f"{self.url} answers {status}: {message}")


def _quoted(name: str) -> str:
    return urllib.parse.quote(name.encode("utf-8", "surrogateescape"), safe="")

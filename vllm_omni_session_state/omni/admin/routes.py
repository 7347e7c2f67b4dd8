"""The routes of an API server under ``/v1/session_state``; off unless the setting ``http`` is on.

vLLM-Omni guards every path under ``/v1`` by its API key, routes that are added late too. A session is named
in the path, by what a listing shows or by its id; the last part of a POST's path is what is done, all before
it is the name, so that an id may hold any character, ``/`` included.

Imported only where the routes are on: it needs FastAPI, which vLLM-Omni brings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Path, Query
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from vllm_omni_session_state.omni.admin.service import ACTS, AdminService, RefusedError

PREFIX = "/v1/session_state"

DEFAULT_TIMEOUT_S = 10.0
MOST_S = 600.0

Name = Annotated[
    str, Path(min_length=1, description="A session as a listing shows it, or its id, percent-encoded.")
]
Seconds = Annotated[
    float, Query(gt=0, le=MOST_S, allow_inf_nan=False, description="How long to wait for the workers.")
]


Home = Annotated[int | None, Field(description="The replica in which it is; null where it is in several.")]
Answered = Annotated[list[int], Field(description="The replicas that answered.")]


class Options(BaseModel):
    """What a POST may say."""

    model_config = ConfigDict(extra="forbid")
    timeout_s: float = Field(
        default=DEFAULT_TIMEOUT_S,
        gt=0,
        le=MOST_S,
        allow_inf_nan=False,
        strict=True,
        description="As for a GET.",
    )


class Session(BaseModel):
    """One session, its parts on all ranks and replicas together."""

    session: str = Field(description="As it is shown: a hash, or the id where show_ids is on.")
    state: str = Field(description="in_use, idle, host, disk or kv_only.")
    nbytes: dict[str, int] = Field(description="Bytes by device, over all ranks.")
    home: Home
    replicas: list[int] = Field(description="All that have a part of it; more than one is wrong.")
    ranks: int
    agree: bool = Field(description="Whether all ranks say the same, in one replica.")


class Value(BaseModel):
    """One value of a session; never its content."""

    name: str
    kind: str
    bucket: str
    shape: str
    nbytes: dict[str, int]


class Inspected(Session):
    """A session with its values; a parked one lists none."""

    values: list[Value]
    answered: Answered


class Listing(BaseModel):
    """All sessions, least recently used first."""

    sessions: list[Session]
    agree: bool
    answered: Answered
    age_s: float = Field(description="How old what is shown is; 0 where the workers write it for the server.")


class Done(BaseModel):
    """What was done."""

    session: str
    done: str
    home: Home
    replicas: list[int]
    agree: bool


class LastKnown(BaseModel):
    """The figures of the last answer."""

    age_s: float
    figures: dict[str, int]


class ErrorDetail(BaseModel):
    """What is the matter."""

    type: str
    message: str
    code: int
    pending: bool | None = Field(default=None, description="With 504: whether the call takes effect yet.")
    last_known: LastKnown | None = Field(default=None, description="With 504, where there are any.")


class Error(BaseModel):
    """The one form of an error."""

    error: ErrorDetail


class _Route(APIRoute):
    """A route whose errors have the one form, whatever the server does with its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A line's end is a character as any other is.
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z", re.DOTALL)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        original = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await original(request)
            except (RequestValidationError, HTTPException) as error:
                refused = RefusedError("bad_request", _what_is_wrong(error))
            except RefusedError as error:
                refused = error
            return _answer(refused.content, refused.status)

        return handle


def attach(app: FastAPI, service: AdminService) -> None:
    """Add the routes to an application that does not serve yet."""
    router = APIRouter(prefix=PREFIX, tags=["session state"], route_class=_Route)

    async def sessions(timeout_s: Seconds = DEFAULT_TIMEOUT_S) -> Response:
        return _answer(await service.sessions(timeout_s=timeout_s))

    async def session(name: Name, timeout_s: Seconds = DEFAULT_TIMEOUT_S) -> Response:
        return _answer(await service.session(name, timeout_s=timeout_s))

    def add(
        what: str, act: Callable[..., Awaitable[Response]], model: type[BaseModel], summary: str, *errors: int
    ) -> None:
        method, _, path = what.partition(" ")
        answers: dict[int | str, dict[str, Any]] = {
            status: {"model": Error, "description": _MEANING[status]} for status in (*errors, 422, 502, 504)
        }
        router.add_api_route(
            path,
            act,
            methods=[method],
            summary=summary,
            operation_id=f"session_state_{act.__name__}",
            response_model=model,
            responses={**answers, 401: {"description": _MEANING[401]}},
        )

    one = "/sessions/{name:path}"
    add("GET /sessions", sessions, Listing, "All sessions")
    add(f"GET {one}", session, Inspected, "One session with its values", 404)
    for how in ACTS:
        words = f"{how.capitalize()} a session that nobody uses"
        add(f"POST {one}/{how}", _act(service, how), Done, words, 404, 409)
    app.include_router(router)


def _act(service: AdminService, how: str) -> Callable[..., Awaitable[Response]]:
    async def act(name: Name, options: Annotated[Options | None, Body()] = None) -> Response:
        asked = options or Options()
        return _answer(await service.act(how, name, timeout_s=asked.timeout_s))

    act.__name__ = how
    act.__doc__ = f"Answers when it is {ACTS[how][1]} on all ranks."
    return act


_MEANING = {
    401: "The server has an API key and it is not given.",
    404: "There is no such session.",
    409: "The session is in use, does not move, or is one of several of that name: nothing has changed.",
    422: "The request is not understood.",
    502: "worker_failed: a worker could not do it.",
    504: "No worker answered in time.",
}


def _what_is_wrong(error: RequestValidationError | HTTPException) -> str:
    if isinstance(error, HTTPException):
        return str(error.detail)
    # Where it is and what is wanted; what was given may be anything, and is not repeated.
    return "; ".join(
        f"{'.'.join(str(part) for part in each['loc'][:2])}: {each['msg']}" for each in error.errors()
    )


def _answer(content: dict[str, Any], status: int = 200) -> Response:
    # Escaped: whatever stands in it, it can be sent.
    return Response(json.dumps(content), status_code=status, media_type="application/json")

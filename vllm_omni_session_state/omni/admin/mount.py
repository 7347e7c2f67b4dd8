"""What an API server offers its operator: the metrics, and the routes where ``http`` is on.

The routes are added to the server's own application, between its building and its serving. That vLLM-Omni
has a group of entry points for such routes is no help: what is installed there is warned about on every
server that does not name it in ``VLLM_PLUGINS``, and naming it keeps all other plugins out.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_omni_session_state.base.log import LOGGER, tried
from vllm_omni_session_state.omni.admin.stats_poller import StatsPoller
from vllm_omni_session_state.omni.hooks import patching, seams
from vllm_omni_session_state.omni.server.worker_client import WorkerClient

_applications: list[weakref.ref[Any]] = []
"""The one application that this process built last, for as long as it lives."""


def note_applications(module: ModuleType) -> None:
    """Wrap the function by which the server builds its application; where there is none, nothing happens."""
    if callable(getattr(module, seams.SERVER_BUILDER, None)):
        patching.wrap(module, seams.SERVER_BUILDER, _build)


def _build(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    app = original(*args, **kwargs)
    _applications[:] = [weakref.ref(app)]
    return app


def serve(workers: WorkerClient, state: Any, *, http: bool) -> None:
    """Offer an operator what the settings ask for, with ``http`` the routes too. Never raises."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # no server that serves: there is nobody to answer
        return
    figures = StatsPoller(workers, loop)
    figures.want()  # the one call by which the workers' files are found
    tried(lambda: _add_metrics(workers, figures), "the metrics vllm_omni_session_state:* are not there")
    if http:
        tried(
            lambda: _add_routes(workers, figures, state), "the routes under /v1/session_state are not there"
        )


def _add_metrics(workers: WorkerClient, figures: StatsPoller) -> None:
    from vllm_omni_session_state.omni.admin import metrics  # noqa: PLC0415 - it needs the Prometheus client

    metrics.register(figures, workers.lost)


def _add_routes(workers: WorkerClient, figures: StatsPoller, state: Any) -> None:
    from vllm_omni_session_state.omni.admin import routes, service  # noqa: PLC0415 - they need FastAPI

    builder = f"{seams.SERVER_MODULE}.{seams.SERVER_BUILDER}"
    app = next(
        (app for app in (each() for each in _applications) if app is not None and app.state is state), None
    )
    if app is None:
        raise LookupError(f"expected {builder} to build the application, found another way")
    routes.attach(app, service.AdminService(workers, figures))
    LOGGER.info("sessions can be seen and steered under %s", routes.PREFIX)

"""``sessions``, ``inspect``, ``close``, ``reset``, ``park``, ``restore``: what is asked and what is printed.

Not here: how tables look, and how a server is asked.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_omni_session_state.base.printable import printable
from vllm_omni_session_state.cli.client import Client, CommandError, NotDoneError, WorkerFailedError

if TYPE_CHECKING:
    from types import ModuleType

ACTS = {
    "close": "end sessions and free all that they hold",
    "reset": "free what sessions hold; their next steps start anew",
    "park": "park sessions that nobody uses",
    "restore": "bring parked sessions back to the device",
}

IN_ORDER, NOT_DONE, COULD_NOT = 0, 1, 2


def show(client: Client, name: str | None = None, *, as_json: bool, tables: Callable[[], ModuleType]) -> int:
    """Print all sessions, or one that is named with its values."""
    try:
        found = client.sessions() if name is None else client.session(name)
    except NotDoneError as error:
        _complain(str(name), error)
        return NOT_DONE
    if as_json:
        print_json(found)
    elif name is None:
        tables().show_sessions(found)
    else:
        tables().show_session(found)
    return IN_ORDER


def watch(client: Client, *, every_s: float, tables: ModuleType, rounds: int | None = None) -> int:
    """Show all sessions and keep what is shown up to date, until the user breaks it off.

    Args:
        client: Whom to ask.
        every_s: Between two looks.
        tables: How it looks.
        rounds: After so many looks it ends by itself.
    """
    found, trouble = client.sessions(), None  # what is wrong at once is an error, later it may pass
    with tables.live() as live:
        while True:
            live.update(tables.sessions_table(found, at=time.strftime("%H:%M:%S"), trouble=trouble))
            live.refresh()
            rounds = None if rounds is None else rounds - 1
            if rounds == 0:
                return IN_ORDER
            time.sleep(every_s)
            try:
                found, trouble = client.sessions(), None
            except CommandError as error:
                trouble = str(error)


def act(client: Client, how: str, names: Sequence[str]) -> int:
    """Do something to each of some sessions, one line for each; what one refuses keeps no other from it."""
    status = IN_ORDER
    for name in names:
        try:
            done = client.act(how, name)
        except (NotDoneError, WorkerFailedError) as error:  # noqa: PERF203 - as the docstring says
            _complain(name, error)
            status = max(status, NOT_DONE if isinstance(error, NotDoneError) else COULD_NOT)
        else:
            sys.stdout.write(printable(f"{done['session']}: {done['done']}") + "\n")
    return status


def _complain(name: str, error: Exception) -> None:
    sys.stderr.write(printable(f"{name}: {error}") + "\n")


def print_json(found: object, *, plain: Callable[[Any], object] | None = None) -> None:
    """Print one JSON object, for scripts; ``plain`` says what a record is to it."""
    sys.stdout.write(json.dumps(found, indent=2, default=plain) + "\n")

"""The command line: what can be asked, and one clear line for what cannot be done.

=====  ===========================================================
exit   meaning
=====  ===========================================================
0      all right
1      something will not work as asked; it is said what
2      the command could not do its work, or was not understood
=====  ===========================================================
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from vllm_omni_session_state.base.printable import printable
from vllm_omni_session_state.cli import doctor, sessions
from vllm_omni_session_state.cli.client import (
    DEFAULT_TIMEOUT_S,
    DEFAULT_URL,
    ENV_API_KEY,
    Client,
    CommandError,
)

PROGRAM = "vllm-omni-session-state"
BROKEN_OFF = 130

EXITS = (
    "exit status: 0 all right; 1 a session was not there, is in use or refused; 2 no server could be asked"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    asked = _parser().parse_args(arguments)
    try:
        status: int = asked.run(asked)
    except CommandError as error:
        sys.stderr.write(printable(f"{PROGRAM}: {error}") + "\n")
        return sessions.COULD_NOT
    except KeyboardInterrupt:
        return 0 if getattr(asked, "watch", False) else BROKEN_OFF
    return status


def _sessions(asked: argparse.Namespace) -> int:
    client = Client(asked.url, api_key=asked.api_key, timeout_s=asked.timeout)
    if asked.command in sessions.ACTS:
        return sessions.act(client, asked.command, asked.names)
    if getattr(asked, "watch", False):
        return sessions.watch(client, every_s=asked.every, tables=_tables())
    return sessions.show(client, getattr(asked, "name", None), as_json=asked.json, tables=_tables)


def _doctor(asked: argparse.Namespace) -> int:
    tables = None if asked.json else _tables()
    busy = tables.busy("Importing vLLM-Omni, and looking at it") if tables else contextlib.nullcontext()
    with busy:
        report = doctor.examine(deploy_config=asked.deploy_config)
    if tables:
        tables.show_doctor(report)
    else:
        sessions.print_json(report, plain=doctor.plain)
    return report.status


def _ab(asked: argparse.Namespace) -> int:
    try:
        from vllm_omni_session_state.ab import command  # noqa: PLC0415 - it needs the extra
        from vllm_omni_session_state.ab.runs import progress, subprocess  # noqa: PLC0415 - as above
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "jinja2"):
            raise
        raise CommandError(f"ab needs {error.name}: pip install '{PROGRAM}[cli]'") from error
    names = ("deploy_config", "model", "sessions", "steps", "record", "replay", "out")
    options = command.Options(**{name: getattr(asked, name) for name in names})
    try:
        return command.ab(options, progress.LastingConsole(highlight=False))
    except subprocess.CouldNotRunError as error:
        raise CommandError(str(error)) from error


def _tables() -> ModuleType:
    try:
        from vllm_omni_session_state.cli import tables  # noqa: PLC0415 - scripts need no tables
    except ModuleNotFoundError as error:
        if error.name != "rich":
            raise
        raise CommandError(f"tables need rich: pip install '{PROGRAM}[cli]', or ask for --json") from error
    return tables


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError
    return seconds


_seconds.__name__ = "number of seconds"  # as argparse calls it


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Session state for world models on vLLM-Omni, from the command line."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="one JSON object, for scripts")

    asked = commands.add_parser(
        "doctor",
        parents=[as_json],
        help="will it work here? Plugin, host, seams, settings",
        description="Looks at the plugin, vLLM-Omni, its seams, and the settings in force. Serves nothing, "
        "changes nothing.",
        epilog="exit status: 0 all right; 1 something will not work as asked; 2 could not look",
    )
    asked.set_defaults(run=_doctor)
    asked.add_argument("--deploy-config", metavar="FILE", help="the deploy YAML that you serve with")

    asked = commands.add_parser(
        "ab",
        help="is every bit equal with the flag off and on? Serves a deployment twice and compares",
        description="Serves one deploy YAML twice, with only the flag flipped, sends both the same and "
        "compares every output, and the session state that each step leaves, bit by bit.",
        epilog="exit status: 0 equal; 1 different; 2 could not run",
    )
    asked.set_defaults(run=_ab)
    asked.add_argument(
        "--deploy-config", metavar="FILE", required=True, help="the deploy YAML that you serve with"
    )
    asked.add_argument("--model", help="the checkpoint (default: the published one of the YAML's model)")
    asked.add_argument(
        "--sessions", metavar="K", type=int, help="interleaved sessions (default: 3, Cosmos3: 2)"
    )
    asked.add_argument("--steps", metavar="N", type=int, help="steps of each (default: 12, Cosmos3: 6)")
    how = asked.add_mutually_exclusive_group()
    how.add_argument("--record", metavar="FILE", type=Path, help="write what is sent to a file")
    how.add_argument("--replay", metavar="FILE", type=Path, help="send what such a file says")
    asked.add_argument(
        "--out", metavar="FOLDER", type=Path, help="for outputs, logs and the report (default: a new one)"
    )

    server = argparse.ArgumentParser(add_help=False)
    server.set_defaults(run=_sessions)
    server.add_argument("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    server.add_argument(
        "--api-key", metavar="KEY", help=f"the server's key (default: what {ENV_API_KEY} holds)"
    )
    help_ = f"how long to wait for the workers (default: {DEFAULT_TIMEOUT_S:g})"
    _add_seconds(server, "--timeout", DEFAULT_TIMEOUT_S, help_)

    asked = commands.add_parser("sessions", parents=[server], help="who holds what, and where", epilog=EXITS)
    how = asked.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="one JSON object, for scripts")
    how.add_argument("--watch", action="store_true", help="keep it up to date, until Ctrl-C")
    _add_seconds(asked, "--every", 1.0, "with --watch, between looks (default: 1)")
    named = "a session as it is shown, or its id"
    asked = commands.add_parser(
        "inspect", parents=[server, as_json], help="one session with its values", epilog=EXITS
    )
    asked.add_argument("name", metavar="NAME", help=named)
    for name, help_ in sessions.ACTS.items():
        asked = commands.add_parser(name, parents=[server], help=help_, epilog=EXITS)
        asked.add_argument("names", metavar="NAME", nargs="+", help=named)
    return parser


def _add_seconds(parser: argparse.ArgumentParser, name: str, default: float, help_: str) -> None:
    parser.add_argument(name, metavar="SECONDS", type=_seconds, default=default, help=help_)

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
import json
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
COULD_NOT = 2
BROKEN_OFF = 130

EXITS = (
    "exit status: 0 all right; 1 a session was not there, is in use or refused; 2 no server could be asked"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    asked = _parser().parse_args(arguments)
    try:
        if asked.command == "doctor":
            return _doctor(deploy_config=asked.deploy_config, as_json=asked.json)
        if asked.command == "ab":
            return _ab(asked)
        return _ask(asked)
    except CommandError as error:
        sys.stderr.write(printable(f"{PROGRAM}: {error}") + "\n")
        return COULD_NOT
    except KeyboardInterrupt:
        return 0 if getattr(asked, "watch", False) else BROKEN_OFF


def _ask(asked: argparse.Namespace) -> int:
    client = Client(asked.url, api_key=asked.api_key, timeout_s=asked.timeout)
    if asked.command == "sessions" and asked.watch:
        return sessions.watch(client, every_s=asked.every, tables=_tables())
    if asked.command == "sessions":
        return sessions.show(client, as_json=asked.json, tables=_tables)
    if asked.command == "inspect":
        return sessions.inspect(client, asked.name, as_json=asked.json, tables=_tables)
    return sessions.act(client, asked.command, asked.names)


def _doctor(*, deploy_config: str | None, as_json: bool) -> int:
    if as_json:
        report = doctor.examine(deploy_config=deploy_config)
        sys.stdout.write(json.dumps(report.as_json(), indent=2) + "\n")
        return report.status
    tables = _tables()
    with tables.busy("Importing vLLM-Omni, and looking at it"):
        report = doctor.examine(deploy_config=deploy_config)
    tables.show_doctor(report)
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
    asked = commands.add_parser(
        "doctor",
        help="will it work here? Plugin, host, seams, settings",
        description="Looks at the plugin, vLLM-Omni its seams, and the settings in force. Serves nothing, "
        "changes nothing.",
        epilog="exit status: 0 all right; 1 something will not work as asked; 2 could not look",
    )
    asked.add_argument("--deploy-config", metavar="FILE", help="the deploy YAML that you serve with")
    asked.add_argument("--json", action="store_true", help="one JSON object, for scripts")

    _add_ab(
        commands.add_parser(
            "ab",
            help="is every bit equal with the flag off and on? Serves a deployment twice and compares",
            description="Serves one deploy YAML twice, with only the flag flipped, sends both the same and "
            "compares every output, and the session state that each step leaves, bit by bit.",
            epilog="exit status: 0 equal; 1 different; 2 could not run",
        )
    )

    server = argparse.ArgumentParser(add_help=False)
    server.add_argument("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    server.add_argument(
        "--api-key", metavar="KEY", help=f"the server's key (default: what {ENV_API_KEY} holds)"
    )
    server.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=DEFAULT_TIMEOUT_S,
        help=f"how long to wait for the workers (default: {DEFAULT_TIMEOUT_S:g})",
    )

    asked = commands.add_parser("sessions", parents=[server], help="who holds what, and where", epilog=EXITS)
    how = asked.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="one JSON object, for scripts")
    how.add_argument("--watch", action="store_true", help="keep it up to date, until Ctrl-C")
    asked.add_argument(
        "--every",
        metavar="SECONDS",
        type=_seconds,
        default=1.0,
        help="with --watch, between looks (default: 1)",
    )
    asked = commands.add_parser("inspect", parents=[server], help="one session with its values", epilog=EXITS)
    asked.add_argument("name", metavar="NAME", help="a session as it is shown, or its id")
    asked.add_argument("--json", action="store_true", help="one JSON object, for scripts")
    for name, help_ in sessions.ACTS.items():
        asked = commands.add_parser(name, parents=[server], help=help_, epilog=EXITS)
        asked.add_argument("names", metavar="NAME", nargs="+", help="a session as it is shown, or its id")
    return parser


def _add_ab(asked: argparse.ArgumentParser) -> None:
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

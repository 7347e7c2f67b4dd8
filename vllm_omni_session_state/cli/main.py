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
import sys
from collections.abc import Sequence

from vllm_omni_session_state.cli import doctor

PROGRAM = "vllm-omni-session-state"
COULD_NOT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    asked = _parser().parse_args(arguments)
    try:
        return _doctor(deploy_config=asked.deploy_config, as_json=asked.json)
    except CommandError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return COULD_NOT


class CommandError(Exception):
    """What was asked for cannot be done; the message is all that a user sees."""


def _doctor(*, deploy_config: str | None, as_json: bool) -> int:
    if as_json:
        report = doctor.examine(deploy_config=deploy_config)
        sys.stdout.write(json.dumps(report.as_json(), indent=2) + "\n")
        return report.status
    try:
        from vllm_omni_session_state.cli import tables  # noqa: PLC0415 - scripts need no tables
    except ModuleNotFoundError as error:
        if error.name != "rich":
            raise
        raise CommandError(f"tables need rich: pip install '{PROGRAM}[cli]', or ask for --json") from error
    with tables.busy("Importing vLLM-Omni, and looking at it"):
        report = doctor.examine(deploy_config=deploy_config)
    tables.show_doctor(report)
    return report.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Session state for world models on vLLM-Omni, from the command line."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    asked = commands.add_parser(
        "doctor",
        help="will it work here? Plugin, host, seams, settings",
        description="Looks at the plugin, the host and its seams, and the settings in force. Serves nothing, "
        "changes nothing.",
        epilog="exit status: 0 all right; 1 something will not work as asked; 2 could not look",
    )
    asked.add_argument("--deploy-config", metavar="FILE", help="the deploy YAML that you serve with")
    asked.add_argument("--json", action="store_true", help="one JSON object, for scripts")
    return parser

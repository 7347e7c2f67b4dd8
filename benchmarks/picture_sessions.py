"""The picture of ``vllm-omni-session-state sessions --watch`` in the documentation, drawn from a real run.

A server of the tiny DreamZero, robots that step, some of them parked: what the command shows of it, as SVG
that fetches nothing. Run it again when the table looks otherwise: ``python -m benchmarks.picture_sessions``.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from vllm_omni_session_state.cli import tables
from vllm_omni_session_state.cli.client import Client

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "sessions.svg"
COLUMNS = 76


def main() -> None:
    """Serve, look and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=PICTURE, help="the file that is written")
    into = parser.parse_args().into
    from omni_tiny.checkpoint.dreamzero import write_dreamzero
    from omni_tiny.serve import Server

    options = {"http": True, "host_budget": "256MiB", "disk": {"budget": "1GiB"}}
    with tempfile.TemporaryDirectory() as name, ExitStack() as robots:
        folder = Path(name)
        options["disk"]["path"] = str(folder / "parked")
        with Server(write_dreamzero(folder / "model"), folder, session_state=options) as server:
            for number in range(6):
                robot = robots.enter_context(server.robot(f"robot-{number}", seed=number))
                for _ in range(2 + number % 3):
                    robot.step()
            client = Client(f"http://127.0.0.1:{server.port}")
            for row in client.sessions()["sessions"][:2]:
                client.act("park", row["session"])
            found = client.sessions()
            robots.close()
    into.write_text(drawn(found), encoding="utf-8")
    print(into)


def drawn(found: dict[str, object]) -> str:
    """The table as SVG, with the fonts that the reader has."""
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, highlight=False, force_terminal=True)
        console.print(tables.sessions_table(found, at="14:03:27"))
        text = console.export_svg(title="vllm-omni-session-state sessions --watch")
    text = re.sub(r"\s*<!--.*?-->|\s*@font-face \{.*?\}", "", text, flags=re.DOTALL)
    return re.sub(r"font-family: Fira Code, ?monospace", "font-family: monospace", text)


if __name__ == "__main__":
    main()

"""How the commands look in a terminal. The only file that needs rich."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_omni_session_state.base.kinds import Size
from vllm_omni_session_state.base.printable import printable
from vllm_omni_session_state.cli.doctor import COULD_NOT_LOOK, IN_ORDER, Report, Stage

SOURCES = {"environment": "environment", "config": "deploy YAML", "default": "default"}
MARKS = {True: Text("ok", "green"), False: Text("NO", "bold red")}


def busy(what: str) -> AbstractContextManager[object]:
    """Show that something is under way, where somebody looks at a terminal."""
    return Console(stderr=True).status(what)


def show_doctor(report: Report) -> None:
    """Print a report: tables of what was seen, then what follows from it."""
    console = Console(highlight=False)
    console.print(_packages(report))
    for stage in report.stages:
        console.print(_settings(stage, report.deploy_config))
    if report.seams:
        console.print(_seams(report))
    for style, heading, lines in (
        ("yellow", "note", report.notes),
        ("bold red", "problem", report.problems),
        ("bold red", "could not look", report.unseen),
    ):
        for line in lines:
            console.print(Text.assemble((heading, style), f": {printable(line)}"))
    console.print(_verdict(report))


def _table(title: str, *columns: str) -> Table:
    title_text = Text(printable(title), "bold")
    table = Table(title=title_text, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _add_row(table: Table, *cells: str | Text, style: str = "") -> None:
    """Add a row whose words stay what they are: a name may be a stranger's, and no cell is markup."""
    table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells), style=style)


def _packages(report: Report) -> Table:
    table = _table("Plugin and host", "package", "installed", "tested with", "")
    plugin = report.plugin
    found = plugin.name is not None and plugin.allowed
    _add_row(table, "vllm_omni_session_state", plugin.version or "not installed", "", MARKS[found])
    for version in report.host:
        there = version.installed is not None
        mark = MARKS[there] if version.known or not there else Text("untested", "yellow")
        _add_row(table, version.package, version.installed or "not there", version.tested, mark)
    return table


def _settings(stage: Stage, file: str | None) -> Table:
    of = "in force" if file is None else f"of stage {stage.stage_id} in {file}"
    table = _table(f"Settings {of}", "setting", "value", "from")
    for origin in stage.settings:
        dim = "dim" if origin.source == "default" else ""
        _add_row(table, origin.name, _value(origin.value), SOURCES[origin.source], style=dim)
    return table


def _value(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Size):
        return str(value) if value.relative else f"{value.of(0):,} bytes"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _seams(report: Report) -> Table:
    table = _table("Seams in vLLM-Omni", "where", "seam", "")
    before = ""
    for look in report.seams:
        owner, _, name = look.place.rpartition(".")
        owner = owner.rpartition(".")[2]
        _add_row(table, "" if owner == before else owner, name, MARKS[look.ok])
        before = owner
    return table


def _verdict(report: Report) -> Text:
    if report.status == COULD_NOT_LOOK:
        return Text("Not everything could be looked at.", "bold red")
    if report.status != IN_ORDER:
        count = len(report.problems)
        return Text(f"{count} problem{'s' if count > 1 else ''}: not all will work as asked.", "bold red")
    flag = "on" if report.on else "off"
    return Text(f"All right: the flag is {flag}, and nothing is in its way.", "bold green")


def show_sessions(found: Mapping[str, Any]) -> None:
    """Print all sessions."""
    Console(highlight=False).print(sessions_table(found))


def live() -> Live:
    """Something that is shown and changes; it is told when."""
    return Live(console=Console(highlight=False), auto_refresh=False)


def sessions_table(found: Mapping[str, Any], *, at: str = "", trouble: str | None = None) -> Group:
    """All sessions, and one line that counts them.

    Args:
        found: What the server said.
        at: When, where that is of interest.
        trouble: Why this is not up to date.
    """
    rows = found["sessions"]
    table = _table(f"Sessions {at}".rstrip(), "session", "state")
    devices = _add_devices(table, rows)
    several = found["answered"] != [0]
    table.add_column("home" if several else "ranks", justify="right")
    table.columns[0].min_width = 14  # a hash is whole, an id may be folded
    table.columns[1].no_wrap = True
    for row in rows:
        where = ", ".join(map(str, row["replicas"])) if several else str(row["ranks"])
        _add_row(
            table,
            row["session"],
            Text(STATES[row["state"]], STYLES.get(row["state"], "")),
            *_cells(row, devices),
            Text(where if row["agree"] else f"{DIFFER} {where}", "" if row["agree"] else "yellow"),
        )
    parts: list[Any] = [table, _count(rows, devices)]
    if not found["agree"]:
        split = any(row["home"] is None for row in rows)
        parts.append(Text(f"{DIFFER} {SPLIT if split else 'Not all ranks say the same.'}", "yellow"))
    if found["age_s"] >= 1:
        seldom = f"As of {found['age_s']:.0f} s ago: a worker is asked seldom, as steps run."
        parts.append(Text(seldom, "yellow"))
    if trouble is not None:
        parts.append(Text(printable(f"Not up to date: {trouble}"), "bold red"))
    return Group(*parts)


STATES = {"in_use": "in use", "idle": "idle", "host": "on host", "disk": "on disk", "kv_only": "only KV"}
DIFFER = "\u2260"
SPLIT = "A session in several replicas has wrong outputs: its steps were split between them. Close it."
STYLES = {"in_use": "bold green", "host": "cyan", "disk": "blue", "kv_only": "yellow"}


def _count(rows: list[Mapping[str, Any]], devices: list[str]) -> Text:
    if not rows:
        return Text("No sessions.", "dim")
    states = [row["state"] for row in rows]
    counted = [f"{states.count(state)} {words}" for state, words in STATES.items() if state in states]
    held = {device: sum(row["nbytes"].get(device, 0) for row in rows) for device in devices}
    many = "1 session" if len(rows) == 1 else f"{len(rows)} sessions"
    return Text(f"{many}: {', '.join(counted)}; together {_held(held)}", "dim")


def show_session(found: Mapping[str, Any]) -> None:
    """Print one session with its values."""
    console = Console(highlight=False)
    state = STATES[found["state"]]
    table = _table(f"Session {found['session']}: {state}", "value", "kind", "shape")
    devices = _add_devices(table, found["values"])
    for value in found["values"]:
        _add_row(table, value["name"], value["kind"], value["shape"], *_cells(value, devices))
    console.print(table if found["values"] else Text(printable(f"Session {found['session']}"), "bold"))
    note = "" if found["values"] else "; what a parked session holds is not listed by value"
    if found["answered"] != [0]:
        named = "replica" if found["home"] is not None else "replicas"
        state += f", {named} {', '.join(map(str, found['replicas']))}"
    console.print(Text(f"{state}: {_held(found['nbytes'])}, each allocation once{note}", "dim"))
    if found["home"] is None:
        console.print(Text(f"{DIFFER} {SPLIT}", "yellow"))


def _add_devices(table: Table, rows: list[Mapping[str, Any]]) -> list[str]:
    """A column for each device on which one of the rows has bytes; returns these."""
    devices = sorted({device for row in rows for device in row["nbytes"]})
    for device in devices:
        table.add_column(device, justify="right", no_wrap=True)
    return devices


def _cells(row: Mapping[str, Any], devices: list[str]) -> list[str]:
    return [bytes_text(row["nbytes"].get(device, 0)) for device in devices]


def _held(nbytes: Mapping[str, int]) -> str:
    held = (f"{bytes_text(count)} on {device}" for device, count in sorted(nbytes.items()))
    return ", ".join(held) or "nothing"


def bytes_text(count: int) -> str:
    """A size for people, three digits of it."""
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 999.5:
            return f"{size:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f} {unit}"
    return f"{size / 1024:.2f} TiB"

"""How the commands look in a terminal. The only file that needs rich."""

from __future__ import annotations

from contextlib import AbstractContextManager

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_omni_session_state.cli.doctor import COULD_NOT_LOOK, IN_ORDER, Report, Stage
from vllm_omni_session_state.sizes import Size

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
            console.print(Text.assemble((heading, style), f": {line}"))
    console.print(_verdict(report))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _packages(report: Report) -> Table:
    table = _table("Plugin and host", "package", "installed", "tested with", "")
    plugin = report.plugin
    found = plugin.name is not None and plugin.allowed
    table.add_row("vllm_omni_session_state", plugin.version or "not installed", "", MARKS[found])
    for version in report.host:
        there = version.installed is not None
        mark = MARKS[there] if version.known or not there else Text("untested", "yellow")
        table.add_row(version.package, version.installed if there else "not there", version.tested, mark)
    return table


def _settings(stage: Stage, file: str | None) -> Table:
    of = "in force" if file is None else f"of stage {stage.stage_id} in {file}"
    table = _table(f"Settings {of}", "setting", "value", "from")
    for origin in stage.settings:
        dim = "dim" if origin.source == "default" else ""
        table.add_row(origin.name, _value(origin.value), SOURCES[origin.source], style=dim)
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
        table.add_row("" if owner == before else owner, name, MARKS[look.ok])
        before = owner
    return table


def _verdict(report: Report) -> Text:
    if report.status == COULD_NOT_LOOK:
        return Text("Not everything could be looked at.", "bold red")
    if report.status != IN_ORDER:
        count = len(report.problems)
        return Text(f"{count} problem{'s' if count > 1 else ''}: not all will work as asked.", "bold red")
    return Text(
        f"All right: the flag is {'on' if report.on else 'off'}, and nothing is in its way.", "bold green"
    )

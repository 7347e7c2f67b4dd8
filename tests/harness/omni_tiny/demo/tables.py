"""The demo's tables: what the workers held of session state, one function per model.

Robots' sessions stay, so they are shown as they are; Cosmos3's last as long as a request, so each request
is shown while it runs and after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from omni_tiny.demo.verdict import Served

BRANCHES = ("und_kv", "und_kv_neg")
"""What the plugin calls the state of Cosmos3's two branches."""


def show_sessions(console: Console, off: Served, on: Served) -> None:
    """Show what the flagged run's worker says of its sessions, and what the other run's worker could say."""
    before, after = on.looks[0]["sessions"], on.looks[-1]["sessions"]
    console.print("\n[bold]Bytes of session state[/], as the worker process of the flagged run lists them")
    console.print(bytes_table([session for session in before if session["nbytes"]]))
    console.print(f"Counted by {on.looks[0]['manager']}.")
    if idle := [session["session"] for session in before if not session["nbytes"]]:
        console.print(f"Without a byte: {', '.join(idle)} (vLLM-Omni makes that session when it starts).")
    left = {session["session"] for session in after}
    for session in before:
        if session["session"] not in left:
            freed = sum(session["nbytes"].values())
            console.print(f"After the close of {session['session']} its {freed:,} bytes are listed no more.")
    names = ", ".join(session["session"] for session in off.looks[0]["sessions"])
    console.print(
        f"\nWith the flag off the worker could only name its sessions ({names}): "
        "the model's own table counts no bytes."
    )


def bytes_table(sessions: Sequence[dict[str, Any]]) -> Table:
    """Make the table of bytes: a row per value and device, a column per session, a sum per device.

    Values may share memory, and the sum counts each region once. Plain numbers hold no memory region:
    values without a byte in any session share one row.
    """
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("value", "kept as", "device"):
        table.add_column(heading, no_wrap=heading != "value")
    for session in sessions:
        table.add_column(session["session"], justify="right", no_wrap=True)
    rows: dict[tuple[str, str, str], dict[str, int]] = {}
    without: dict[str, None] = {}
    for session in sessions:
        for value in session["values"]:
            without.setdefault(value["name"])
            for device, count in value["nbytes"].items():
                rows.setdefault((value["name"], value["bucket"], device), {})[session["session"]] = count
    for (name, bucket, device), row in rows.items():
        without.pop(name, None)
        table.add_row(name, bucket, device, *(f"{row.get(session['session'], 0):,}" for session in sessions))
    if without:
        table.add_row("plain numbers: " + ", ".join(without), "attrs", "-", *("0" for _ in sessions))
    table.add_section()
    for device in sorted({device for session in sessions for device in session["nbytes"]}):
        sums = (f"{session['nbytes'].get(device, 0):,}" for session in sessions)
        table.add_row("sum, each byte once", "", device, *sums, style="bold")
    return table


def show_requests(console: Console, off: Served, on: Served) -> None:
    """Show what each request's session held in the flagged run, and what was left of it in both runs."""
    console.print("\n[bold]Bytes of session state[/], as the worker process of the flagged run lists them")
    console.print(requests_table(off.looks, on.looks))
    console.print(f"Counted by {on.looks[0]['manager']}.")
    console.print("und_kv_neg belongs to the negative prompt, which only CFG reads.")
    if all(
        held_by(look["during"]) == look["during_alive"] == without["during_alive"]
        for look, without in zip(on.looks, off.looks, strict=True)
    ):
        console.print("The sum is also what memory held, flag off and on, by weak references to it.")
    console.print("Bytes after a request are what is still in memory, by weak references, too.")


def requests_table(off: Sequence[dict[str, Any]], on: Sequence[dict[str, Any]]) -> Table:
    """Make the table of requests: what the one session held, and the sessions and bytes left after it."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("\n\nrequest", no_wrap=True)
    headings = ("during\n\nsessions", *(f"\n\n{name}" for name in BRANCHES), "\n\nsum")
    for heading in (*headings, "after\n\nsessions", "\n\nbytes", "after,\nflag off\nbytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for without, look in zip(off, on, strict=True):
        held: dict[str, int] = dict.fromkeys(BRANCHES, 0)
        for session in look["during"]:
            for value in session["values"]:
                held[value["name"]] = held.get(value["name"], 0) + sum(value["nbytes"].values())
        during = (len(look["during"]), *(held[name] for name in BRANCHES), held_by(look["during"]))
        numbers = (*during, len(look["sessions"]), look["alive"], without["alive"])
        table.add_row(look["of"], *(f"{number:,}" for number in numbers))
    return table


def held_by(sessions: Sequence[dict[str, Any]]) -> int:
    """Bytes of these sessions on all devices."""
    return sum(sum(session["nbytes"].values()) for session in sessions)


SHOW = {"dreamzero": show_sessions, "cosmos3": show_requests}
"""Scenario -> its table."""

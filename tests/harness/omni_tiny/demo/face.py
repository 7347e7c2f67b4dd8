"""What the demo says at its end: which outputs differ, and after which requests state was left."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from omni_tiny.demo.scenarios import Scenario


def say_equality(console: Console, scenario: Scenario, *, total: int, different: Sequence[str]) -> None:
    """Say whether every output is bit-identical."""
    if not different:
        console.print(
            f"[bold green]IDENTICAL[/]: all {total} outputs are equal to the last bit, flag off and on"
        )
        console.print(f"({scenario.outputs}).")
        return
    console.print(
        f"[bold red]DIFFERENT[/]: {len(different)} of {total} outputs are not the same, flag off and on:"
    )
    for name in different[:10]:
        console.print(f"  {name}", markup=False)
    if len(different) > 10:
        console.print(f"  and {len(different) - 10} more")


def say_left(console: Console, left: Sequence[str]) -> None:
    """Say after which requests state was left, if any."""
    if left:
        console.print("[bold red]LEFT BEHIND[/]: with the flag on, state was there after:", ", ".join(left))

"""What a DreamZero session's state costs: ours, vLLM-Omni's own (bespoke) and its in-tree manager's.

``python -m benchmarks.state_ops``. One pair is one session of 400 steps by every contender, in one process
and on one thread, interleaved step by step in every order, so that a busy machine troubles all alike.
No network runs; `benchmarks.dreamzero_session` says what does. Figures are medians over the pairs:

``encoder_over_bespoke``
    Append, read and ``quant_conv`` of the encoder stream: ours over bespoke. At most 0.2 is wanted.
``all_over_intree``
    All operations on the state, ``quant_conv`` too: ours over in-tree. At most 1.0 is wanted.
``with_books_over_intree``
    The same with the books: ours charges a session for what it holds whenever a forward ends, in-tree counts
    when somebody asks, which nobody does here. `benchmarks.accounting` is about what that charging costs.
``host_only_share``
    How much of ours is vLLM-Omni's own inherited code: the time of vLLM-Omni's ``DreamZeroState`` on plain
    attributes, its encoder output cut to our window off the clock, over the time of ours. Of ours the session
    look-up is part, of vLLM-Omni's it is not, since it is the plugin that looks up; the books and
    ``quant_conv``, which is the model's, are in neither.

Times are CPU time of the one thread, so that what else the machine does shows only through its caches.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measure import (
    LapClock,
    Machine,
    Spread,
    consoles,
    last_line,
    machine,
    one_thread,
    options,
    orders,
    positive,
    turns,
)

if TYPE_CHECKING:
    from benchmarks.dreamzero_session import Inputs, Session

OURS, BESPOKE, IN_TREE, PLAIN = "ours", "bespoke", "in-tree", "host only"
WANTED = {"encoder_over_bespoke": 0.2, "all_over_intree": 1.0}
WARM_UP = 40  # steps
Pair = dict[str, LapClock]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    asked = _parser().parse_args(arguments)
    steps, pairs = (
        (asked.steps or 12, asked.pairs or 2) if asked.quick else (asked.steps or 400, asked.pairs or 20)
    )
    console, aside = consoles()
    aside.print("Importing vLLM-Omni (10 to 30 seconds) ...")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    one_thread()
    from benchmarks.dreamzero_session import make_inputs

    # Each step is logged at INFO, and at WARNING that a session of these sizes outgrows vLLM-Omni's 603 MiB.
    logging.getLogger("vllm_omni").setLevel(logging.ERROR)
    inputs = make_inputs(steps=max(steps, WARM_UP))
    place = machine()
    console.print(_header(inputs, place, steps=steps, pairs=pairs))
    measured = _measure(inputs, aside, steps=steps, pairs=pairs)
    figures = _figures(measured)
    console.print(_operations(measured, steps=steps))
    console.print(_verdicts(figures))
    sys.stdout.write(
        last_line(figures, machine=place, session={"steps": steps, "pairs": pairs, "shapes": inputs.shapes()})
        + "\n"
    )
    sys.stdout.flush()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = options("state_ops", __doc__, quick="12 steps, 2 pairs")
    parser.add_argument("--steps", type=positive, help="steps of a session (default: 400)")
    parser.add_argument("--pairs", type=positive, help="sessions of each contender (default: 20)")
    return parser


def _measure(inputs: Inputs, aside: Console, *, steps: int, pairs: int) -> list[Pair]:
    aside.print("Warming up ...")
    _pair(inputs, steps=WARM_UP, turn=0)
    return [_pair(inputs, steps=steps, turn=turn) for turn in turns(pairs, what="pair", aside=aside)]


def _pair(inputs: Inputs, *, steps: int, turn: int) -> Pair:
    """One session by every contender; the collector's turn comes between sessions, not within one's laps."""
    import torch

    from benchmarks.dreamzero_session import Session, bespoke, in_tree, keep_window, ours

    sessions = {
        OURS: Session(ours, inputs),
        BESPOKE: Session(bespoke, inputs),
        IN_TREE: Session(in_tree, inputs),
        PLAIN: Session(bespoke, inputs, tidy=keep_window),
    }
    order = orders(tuple(sessions.values()))
    for _ in range(turn):
        next(order)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            for _ in range(steps):
                for session in next(order):
                    session.step()
    finally:
        gc.enable()
    check_equal(sessions)
    return {name: session.clock for name, session in sessions.items()}


def check_equal(sessions: dict[str, Session]) -> None:
    """The contenders did the same: a faster one that read something else would have won nothing."""
    import torch

    first = sessions[BESPOKE]
    for name, session in sessions.items():
        state, expected = session.pipeline.state, first.pipeline.state
        same = (session.step_no, session.reads, session.windows) == (
            first.step_no,
            first.reads,
            first.windows,
        )
        same &= len(state.video_latents_across_time) == len(expected.video_latents_across_time)
        same &= torch.equal(state.vae_encoder_out[:, :, -1], expected.vae_encoder_out[:, :, -1])
        if session.read is not None and first.read is not None:
            same &= torch.equal(session.read, first.read)
        if not same:
            raise AssertionError(f"{name} did not do what {BESPOKE} did")


def _figures(measured: list[Pair]) -> dict[str, Spread]:
    from benchmarks.dreamzero_session import ENCODER, LOOKUP, QUANT_CONV, STATE

    inherited = [name for name in STATE if name not in {LOOKUP, QUANT_CONV}]
    ratios = {
        "encoder_over_bespoke": [
            pair[OURS].total(ENCODER) / pair[BESPOKE].total(ENCODER) for pair in measured
        ],
        "all_over_intree": [pair[OURS].total(STATE) / pair[IN_TREE].total(STATE) for pair in measured],
        "with_books_over_intree": [pair[OURS].total() / pair[IN_TREE].total() for pair in measured],
        "host_only_share": [
            pair[PLAIN].total(inherited) / pair[OURS].total([*inherited, LOOKUP]) for pair in measured
        ],
    }
    return {name: Spread.of(values) for name, values in ratios.items()}


def _header(inputs: Inputs, place: Machine, *, steps: int, pairs: int) -> Table:
    table = Table(
        title=f"DreamZero session state: {steps} steps, {pairs} pairs, {place.threads} thread",
        caption=f"{place.cpu}, {place.cores} cores; {place.system}; Python {place.python}, "
        f"torch {place.torch}, vLLM-Omni {place.vllm_omni}; tensors on the CPU",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("what the state is given")
    table.add_column("shape and type")
    for name, shape in inputs.shapes().items():
        table.add_row(name, shape)
    return table


def _operations(measured: list[Pair], *, steps: int) -> Table:
    from benchmarks.dreamzero_session import BOOKS, ENCODER, LOOKUP, QUANT_CONV, STATE

    contenders = (OURS, IN_TREE, BESPOKE, PLAIN)
    table = Table(title="Microseconds a step, median over the pairs", box=box.SIMPLE_HEAD)
    table.add_column("operation", no_wrap=True)
    for name in contenders:
        table.add_column(name, justify="right")
    table.add_column("ours / in-tree", justify="right")

    def row(title: str, names: Sequence[str], *, style: str | None = None) -> None:
        cells = [
            Spread.of([pair[name].total(names) / 1000 / steps for pair in measured]).median
            for name in contenders
        ]
        ratio = Spread.of(
            [pair[OURS].total(names) / max(1, pair[IN_TREE].total(names)) for pair in measured]
        ).median
        table.add_row(title, *(f"{cell:.1f}" for cell in cells), f"{ratio:.3f}", style=style)

    for operation in STATE:
        row(operation, [operation])
    table.add_section()
    row("the encoder stream", ENCODER)
    row("all but quant_conv", [name for name in STATE if name != QUANT_CONV])
    row("all but quant_conv and look-up", [name for name in STATE if name not in {QUANT_CONV, LOOKUP}])
    row("all", STATE, style="bold")
    table.add_section()
    row(BOOKS, [BOOKS])
    row("all, and books", [*STATE, BOOKS])
    return table


def _verdicts(figures: dict[str, Spread]) -> Table:
    table = Table(title="Medians over the pairs", box=box.SIMPLE_HEAD)
    for column in ("figure", "median", "quartiles", "wanted"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, spread in figures.items():
        wanted = WANTED.get(name)
        verdict = "" if wanted is None else f"<= {wanted}: {'yes' if spread.median <= wanted else 'NO'}"
        table.add_row(name, f"{spread.median:.3f}", f"{spread.low:.3f} to {spread.high:.3f}", verdict)
    return table


if __name__ == "__main__":
    sys.exit(main())

"""The ways in which a session ends on a real server, and a table of what each leaves behind.

Run it (``python -m omni_tiny.ways_to_end``) to see the same cycles with the plugin and without it. The
figures come from the worker itself: the sessions in the model's table, their bytes where the plugin counts
them, the sessions and free blocks of the engine's KV pool.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_tiny.serve import Server

if TYPE_CHECKING:
    from collections.abc import Callable

PLUGINS = "omni_tiny,omni_tiny_cpu"
"""What vLLM-Omni is told to load where the plugin is to be left out."""

STEPS = 3

LONG_S = 1.0
"""Seconds of a step that is still running when the next thing happens."""


def some_id() -> str:
    """A random id, as a robot should use."""
    return f"robot-{uuid.uuid4()}"


def hangs_up(server: Server) -> int:
    """A robot connects, steps and closes the connection. Returns how many sessions it began."""
    with server.robot(some_id()) as robot:
        for _ in range(STEPS):
            robot.step()
    return 1


def names_none(server: Server) -> int:
    """The same robot without an id: everybody's "default"."""
    with server.robot() as robot:
        for _ in range(STEPS):
            robot.step()
    return 1


def starts_afresh(server: Server) -> int:
    """A robot sends ``endpoint: "reset"`` after its steps, and then closes the connection."""
    with server.robot(some_id()) as robot:
        for _ in range(STEPS):
            robot.step()
        robot.reset()
    return 1


def switches(server: Server) -> int:
    """A robot goes on to another session on the same connection, as an evaluation does."""
    with server.robot() as robot:
        for session in (some_id(), some_id()):
            for _ in range(STEPS):
                robot.step(session)
    return 2


def vanishes(server: Server) -> int:
    """A robot loses its network while a step of it runs."""
    robot = server.robot(some_id())
    for _ in range(STEPS - 1):
        robot.step()
    robot.send_step(lasts_s=LONG_S)
    time.sleep(LONG_S / 2)
    robot.vanish()
    return 1


def falls_silent(server: Server) -> int:
    """A robot says nothing for so long that the server closes the connection."""
    robot = server.robot(some_id())
    for _ in range(STEPS):
        robot.step()
    robot.wait_until_closed(60)
    return 1


def both_at_once(server: Server) -> int:
    """A robot's server-side silence limit and its own hanging up come together."""
    robot = server.robot(some_id())
    for _ in range(STEPS):
        robot.step()
    time.sleep(server.idle_timeout_s - 0.02)
    robot.hang_up()
    return 1


def closed_over_http(server: Server) -> int:
    """A rollout of the endpoints that is closed."""
    rollout = server.rollout()
    _step(rollout)
    rollout.close()
    return 1


def reset_over_http(server: Server) -> int:
    """A rollout that is reset, and closed a while later: the endpoints keep no more than 64 open."""
    rollout = server.rollout()
    _step(rollout)
    rollout.reset()
    left_in_the_end(server, within_s=1.0)
    rollout.close()
    return 1


def closed_with_outside_steps(server: Server) -> int:
    """A closed rollout that also took a step outside of its context, which is a session of its own."""
    rollout = server.rollout()
    _step(rollout)
    rollout.step(in_context=False)
    rollout.close()
    return 2


def _step(rollout: Any) -> None:
    for number in range(STEPS):
        status, answer = rollout.step()
        assert status == 200, answer
        assert answer["error"] is None, answer
        assert answer["model_metadata"]["committed_step_id"] == number


WAYS: dict[str, Callable[[Server], int]] = {
    "robot hangs up": hangs_up,
    "robot without an id hangs up": names_none,
    "robot resets": starts_afresh,
    "robot switches sessions": switches,
    "robot vanishes in a step": vanishes,
    "robot falls silent": falls_silent,
    "robot and server hang up": both_at_once,
    "rollout closed": closed_over_http,
    "rollout reset": reset_over_http,
    "rollout closed, also outside": closed_with_outside_steps,
}
"""Each returns how many sessions it began and brought to an end."""

SLOW = ("robot falls silent", "robot and server hang up")
"""Ways that wait for the server's silence limit."""


@dataclass(frozen=True, slots=True)
class Left:
    """What the worker holds.

    Attributes:
        sessions: In the model's table.
        nbytes: Of these; ``None`` where nothing counts them.
        kv_sessions: With KV in the engine's pool.
        kv_used: Blocks of that pool that are not free.
        kv_blocks: Blocks of that pool.
        ends: That reached the worker: those that found their session and those that found none; ``None``
            without the plugin.
    """

    sessions: int
    nbytes: int | None
    kv_sessions: int
    kv_used: int
    kv_blocks: int
    ends: tuple[int, int] | None


def clear(server: Server) -> None:
    """End the session "default", which the model makes for itself while it is loaded."""
    assert server.call("close_ar_diffusion_session", "default") is True


def left(server: Server) -> Left:
    """Ask the worker what it holds."""
    listing = server.call("tiny_listing")
    kv = listing["kv"]
    managed = "session_state" in str(listing["manager"])
    counted = [sum(entry["nbytes"].values()) for entry in listing["sessions"]] if managed else None
    ends = None
    if managed:
        (rank,) = server.call("session_state_stats")["ranks"]
        ends = (rank["ends"]["close"] + rank["ends"]["reset"], rank["ends"]["absent"])
    return Left(
        sessions=len(listing["sessions"]),
        nbytes=None if counted is None else sum(counted),
        kv_sessions=kv["sessions"],
        kv_used=kv["blocks"] - kv["free"],
        kv_blocks=kv["blocks"],
        ends=ends,
    )


def left_in_the_end(server: Server, *, sessions: int = 0, within_s: float = 60.0) -> Left:
    """What the worker holds once it holds no more than so many sessions, or after so long all the same."""
    deadline = time.monotonic() + within_s
    while True:
        found = left(server)
        if max(found.sessions, found.kv_sessions) <= sessions or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=5, help="of each way")
    cycles = parser.parse_args().cycles
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="tiny-ends-", dir=shared_memory if shared_memory.is_dir() else None
    ) as folder:
        from omni_tiny.checkpoint.dreamzero import write_dreamzero

        checkpoint = write_dreamzero(Path(folder) / "tiny-dreamzero")
        for title, plugins in (("with", f"{PLUGINS},session_state"), ("without", PLUGINS)):
            run = Path(folder) / title
            run.mkdir()
            environ = {"VLLM_PLUGINS": plugins}
            flag = title == "with"
            with Server(checkpoint, run, flag=flag, idle_timeout_s=1.0, environ=environ) as server:
                _table(server, f"{title} the plugin, {cycles} cycles each", cycles)


def _table(server: Server, title: str, cycles: int) -> None:
    head = f"{'way':<30}{'begun':>7}{'ended':>7}{'left':>6}{'bytes':>10}{'KV left':>9}{'KV used':>12}"
    sys.stdout.write(f"\n{title}\n{head}\n")
    clear(server)
    for name, way in WAYS.items():
        before = left(server)
        begun = sum(way(server) for _ in range(cycles))
        found = left_in_the_end(server, within_s=10.0)
        ended = "-" if found.ends is None or before.ends is None else str(found.ends[0] - before.ends[0])
        nbytes = "?" if found.nbytes is None else str(found.nbytes)
        used = f"{found.kv_used} of {found.kv_blocks}"
        sys.stdout.write(
            f"{name:<30}{begun:>7}{ended:>7}{found.sessions:>6}{nbytes:>10}{found.kv_sessions:>9}{used:>12}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":  # vLLM-Omni's processes import this file again
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()

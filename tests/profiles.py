"""How much the tests run: ``SESSION_STATE_LONG=1`` asks for the full counts, else it is a twentieth."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

LONG = os.environ.get("SESSION_STATE_LONG", "0") == "1"

EXECUTOR = "mp" if LONG else "uni"
"""Of a served model with one rank: its worker has a process of its own, or its engine's."""


def count(full: int) -> int:
    """``full`` in the long run, a twentieth of it (at least 1) in the short one."""
    return full if LONG else max(1, full // 20)


def sized(full: int, **more) -> settings:
    """Hypothesis settings for ``full`` examples in the long run; the same ones every time, no deadline."""
    return settings(
        max_examples=count(full),
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        **more,
    )

"""Fixtures for the tests that need vLLM-Omni itself, and the quiet under which all of them run.

One thread everywhere, also in child processes: one and two threads give different bits.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
for name in [name for name in os.environ if name.startswith("OMNI_DIFFUSION_SESSION_STATE_MANAGER")]:
    del os.environ[name]  # each test says itself what is set
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# An import of the API server gives each handler of the root logger, also those of pytest, this level.
os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", "WARNING")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMNI_TINY_BFLOAT16_IN_FLOAT32", "1")  # a tiny model's step is ten times as fast

import pytest
import torch
from profiles import LONG

torch.set_num_threads(1)

LIMIT_S = (3600 if LONG else 900) * float(os.environ.get("SESSION_STATE_TIMEOUT_SCALE", "1"))
"""Of one test with its fixtures: more than any takes on a busy machine, so that only one that hangs ends."""

TESTS = Path(__file__).parent
LONGEST_FIRST = (
    "homes/test_served_replicas.py",
    "dreamzero/test_parking_ranks.py",
    "steer/test_steer_served.py",
    "ends/test_served.py",
    "ab/test_ab_served.py",
    "omni/test_hook.py",
    "cosmos3/test_ranks_cosmos3.py",
    "dreamzero/test_parking.py",
    "dreamzero/test_session_state_equivalence.py",
    "dreamzero/test_video_latents.py",
    "dreamzero/test_mutants.py",
    "kv/test_live_faults.py",
    "kv/test_live_sessions.py",
    "cosmos3/test_harness_cosmos3.py",
    "cosmos3/test_session_state_cosmos3.py",
)
"""Files that start vLLM-Omni, by the time that they take: a long one that came last would run alone."""

MISSING = [name for name in ("vllm", "vllm_omni", "omni_tiny") if importlib.util.find_spec(name) is None]


def pytest_configure(config):
    """Have pytest-xdist keep the order of files; its own is by their number of tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """Put the longest files first, and give each test its limit.

    Refuse to run where vLLM-Omni is not: skipping its tests would make a green run mean nothing.
    """
    places = {TESTS / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for item in items:
        item.add_marker(pytest.mark.timeout(LIMIT_S))
    if MISSING and any(item.get_closest_marker("host") for item in items):
        raise pytest.UsageError(
            f"{', '.join(MISSING)} cannot be found by {sys.executable}: "
            "run `make test`, which installs vLLM-Omni and the test harness into .venv first"
        )


@pytest.fixture(scope="session")
def dreamzero_checkpoint():
    """A tiny DreamZero checkpoint, written once per run, in memory where the machine has such a place."""
    from omni_tiny.checkpoint.dreamzero import write_dreamzero

    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="tiny-dreamzero-", dir=shared_memory if shared_memory.is_dir() else None
    ) as folder:
        yield write_dreamzero(folder)


@pytest.fixture(autouse=True)
def _log_lines_reach_the_tests(monkeypatch):
    """Have pytest listen at the plugin's own logger: an import of vLLM-Omni sets up the loggers above it."""
    monkeypatch.setattr(logging.getLogger("vllm_omni.session_state"), "propagate", False)

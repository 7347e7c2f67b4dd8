"""Stands in for a served run: it reports and writes as `child` does, and does what a test wants it to.

``AB_FAKE`` says what, in words: ``off`` or ``on``, then ``differs``, ``dies``, ``fails``, ``warns``,
``sleeps`` or ``other``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import made
import numpy as np

from vllm_omni_session_state.ab.runs.subprocess import FLAG, THREADS, reporting
from vllm_omni_session_state.ab.workload.dreamzero import Robots
from vllm_omni_session_state.ab.workload.trace import Trace, write_recording


def main():
    parser = argparse.ArgumentParser()
    for name in ("--deploy-config", "--model"):
        parser.add_argument(name)
    for name in ("--sessions", "--steps"):
        parser.add_argument(name, type=int, default=2)
    for name in ("--replay", "--record", "--out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("events", type=int)
    asked = parser.parse_args()
    flag = os.environ[FLAG]
    who, _, wanted = os.environ.get("AB_FAKE", "").partition(" ")
    does = wanted if who == ("on" if flag == "1" else "off") else ""
    print(
        "noise of vLLM-Omni",
        flag,
        *(os.environ[name] for name in THREADS),
        os.environ.get(f"{FLAG}_MAX_SESSIONS"),
    )
    with reporting(asked.events) as report:
        report(phase="loading")
        steps = asked.steps + (does == "other")
        sent = Trace(asked.replay) if asked.replay else Robots(sessions=asked.sessions, steps=steps)
        if asked.record:
            write_recording(asked.record, sent)
        asks = [[ask.session, ask.do, dict(ask.words)] for ask in sent.asks]
        report(model=sent.model, checkpoint=asked.model or "a/b", asks=asks)
        report(phase="serving")
        for ask in sent.asks:
            if does and ask.number == 2:
                if does == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                if does == "sleeps":
                    time.sleep(600)
                if does == "fails":
                    raise RuntimeError("session 1, step 2\nwas refused")
            actions = np.arange(3, dtype=np.float32) + (does == "differs" and ask.number >= 2)
            made.write(asked.out, ask.number, actions=actions)
            sessions = {f"session {ask.session}": {"cpu": 24}}
            said = ["careful", "again"] if does == "warns" and ask.number == 2 else []
            report(done=ask.number + 1, seconds=0.1, peak_bytes=1 << 20, sessions=sessions, said=said)
        report(phase="stopping")


if __name__ == "__main__":
    sys.exit(main())

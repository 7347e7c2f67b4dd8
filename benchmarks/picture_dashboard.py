"""The picture of the Grafana dashboard in the documentation, drawn from a real run.

A server of the tiny DreamZero with places for three sessions, host memory for two more and a disk; robots
that come, step, rest and leave; a Prometheus that scrapes the server. It is then asked the dashboard's own
expressions, and `panels_svg` draws the answers; Grafana is no part of it. Run it again when the dashboard or
the metrics change: ``python -m benchmarks.picture_dashboard``. It takes three minutes and a ``prometheus``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.panels_svg import Panel, Series, drawing

if TYPE_CHECKING:
    from omni_tiny.serve import Server
    from omni_tiny.served_clients import Robot

DOCS = Path(__file__).parents[1] / "docs"
PICTURE = DOCS / "images" / "dashboard.svg"
BOARD = DOCS / "monitoring" / "dashboard.json"

ROOM = 3
OPTIONS = {"http": True, "host_budget": "5MiB", "expire_s": 20, "video_latents": "last:4"}
DISK = "16MiB"

SECONDS = 90
WINDOW = "15s"
"""Of rates, where the dashboard has five minutes."""

CAPTION = (
    "Drawn from Prometheus' answers to the dashboard's own expressions. Grafana draws it in its own style.",
    f"A tiny DreamZero on a CPU, {SECONDS} seconds: rates are over {WINDOW} where the dashboard says 5m.",
)

PROMETHEUS = """\
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: vllm-omni
    static_configs:
      - targets: ["127.0.0.1:{port}"]
        labels: {{instance: "dreamzero:8000"}}
"""


@dataclass(frozen=True, slots=True)
class Life:
    """What one robot does.

    Attributes:
        comes_s: When it connects, in seconds since the run began.
        until_s: When it stops to step.
        then: ``hangs up``, ``falls silent`` and stays connected, or ``is reset`` by an operator and goes on.
    """

    comes_s: float
    until_s: float
    then: str = "hangs up"


LIVES = (
    Life(3, 95),
    Life(5, 38, "falls silent"),
    Life(8, 95),
    Life(12, 52),
    Life(16, 48, "is reset"),
    Life(20, 95),
    Life(24, 66),
    Life(28, 78),
    Life(32, 82),
)


def main() -> None:
    """Serve, scrape, ask and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=PICTURE, help="the file that is written")
    into = parser.parse_args().into
    program = shutil.which("prometheus")
    if program is None:
        parser.error("there is no prometheus on the PATH: install it (on Debian: apt-get install prometheus)")
    from omni_tiny.checkpoint.dreamzero import write_dreamzero
    from omni_tiny.serve import Server

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = {**OPTIONS, "disk": {"path": str(folder / "parked"), "budget": DISK}}
        model = write_dreamzero(folder / "model")
        with (
            Server(model, folder, session_state=options, capacity=ROOM, idle_timeout_s=300) as server,
            prometheus(program, folder, server.port) as url,
        ):
            time.sleep(4)  # the first figures are there
            begun = time.time()
            run(server)
            found = [panel(each, url, begun) for each in json.loads(BOARD.read_text())["panels"]]
    into.write_text(drawing(found, seconds=SECONDS, caption=CAPTION), encoding="utf-8")
    print(into)


@contextmanager
def prometheus(program: str, folder: Path, port: int) -> Iterator[str]:
    """A Prometheus that scrapes the server on ``port``; its address.

    Raises:
        RuntimeError: It does not get ready; with the end of its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{probe.getsockname()[1]}"
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    config.write_text(PROMETHEUS.format(port=port))
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'series'}"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={own}"], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 60
        while not _ready(f"http://{own}"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"prometheus does not get ready:\n{log.read_text()[-3000:]}")
            time.sleep(0.3)
        yield f"http://{own}"
    finally:
        process.terminate()
        process.wait(30)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def run(server: Server) -> None:
    """Have all robots live, for as long as the picture is wide."""
    begun = time.monotonic()
    with ThreadPoolExecutor(len(LIVES)) as threads:
        futures = [threads.submit(_live, server, number, life, begun) for number, life in enumerate(LIVES)]
        for future in futures:
            future.result()


def _live(server: Server, number: int, life: Life, begun: float) -> None:
    rng = random.Random(number)
    _sleep_until(begun + life.comes_s)
    with server.robot(f"robot-{number}", seed=number) as robot:
        _work(robot, rng, begun + life.until_s, begun)
        if life.then == "is reset":
            server.http("POST", f"/v1/session_state/sessions/{robot.session}/reset")
            _work(robot, rng, begun + SECONDS, begun)
        elif life.then == "falls silent":
            _sleep_until(begun + SECONDS)


def _work(robot: Robot, rng: random.Random, until: float, begun: float) -> None:
    """Steps, a rest, and so on."""
    until = min(until, begun + SECONDS)
    while time.monotonic() < until:
        for _ in range(rng.randint(3, 9)):
            robot.send_step(lasts_s=0.08)
            robot.receive()
            time.sleep(0.3)
        _sleep_until(min(until, time.monotonic() + rng.uniform(2, 9)))


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


def panel(asked: dict[str, Any], url: str, begun: float) -> Panel:
    """One panel with Prometheus' answers.

    Raises:
        RuntimeError: There is nothing to see in it: the expression or the run is wrong.
    """
    found = [series for target in asked["targets"] for series in _series(target, url, begun)]
    if not any(series.points for series in found):
        expressions = [target["expr"] for target in asked["targets"]]
        raise RuntimeError(f"the panel {asked['title']!r} is empty: nothing comes of {expressions}")
    defaults, at = asked["fieldConfig"]["defaults"], asked["gridPos"]
    return Panel(
        title=asked["title"],
        unit=defaults["unit"],
        number=asked["type"] == "stat",
        stacked=defaults["custom"].get("stacking", {}).get("mode") == "normal",
        decimals=defaults.get("decimals"),
        x=at["x"],
        y=at["y"],
        w=at["w"],
        h=at["h"],
        series=tuple(found),
    )


def _series(target: dict[str, Any], url: str, begun: float) -> Iterator[Series]:
    expression = target["expr"].replace("$instance", ".*").replace("[5m]", f"[{WINDOW}]")
    asked = {"query": expression, "start": f"{begun:.3f}", "end": f"{begun + SECONDS:.3f}", "step": "1"}
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query_range?{urllib.parse.urlencode(asked)}") as answer:
            results = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"prometheus refuses {expression!r}: {error.read().decode()}") from error
    for result in results:
        points = [(round(at - begun, 3), float(value)) for at, value in result["values"]]
        yield Series(
            _legend(target["legendFormat"], result["metric"]),
            tuple(point for point in points if math.isfinite(point[1])),
        )


def _legend(form: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), form)


if __name__ == "__main__":
    main()

"""The metrics on the server's own ``/metrics``: right, never slow, never with a session in them."""

import itertools
import json
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import torch
import yaml
from desk_fakes import FakeEngine
from prometheus_client.parser import text_string_to_metric_families

from vllm_omni_session_state.base.errors import SessionRestoreFailedError
from vllm_omni_session_state.base.ids import redacted_id
from vllm_omni_session_state.manager.losses import Reason
from vllm_omni_session_state.manager.move_stats import NBYTES, SECONDS
from vllm_omni_session_state.offload import copy
from vllm_omni_session_state.omni.admin import metrics, stats_poller
from vllm_omni_session_state.state.session import Declaration

pytestmark = pytest.mark.host

SESSIONS = "/v1/session_state/sessions"
MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"


@pytest.fixture(autouse=True)
def fresh_registry():
    """What a server of this process registered is gone after its test."""
    yield
    for registry, collector in list(metrics._registered.items()):
        registry.unregister(collector)
        del metrics._registered[registry]


def scrape(server):
    """What a scrape says of ours: by name and labels the values; and how long it took in seconds."""
    begun = time.monotonic()
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=300) as answer:
        text = answer.read().decode()
    took = time.monotonic() - begun
    found = {
        (sample.name.removeprefix(metrics.PREFIX), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(metrics.PREFIX)
    }
    return found, took, text


def fresh(server):
    """A scrape of figures that came after now."""
    asked = time.monotonic()
    while True:
        before = time.monotonic()
        found, _, _ = scrape(server)
        age = found.get(("figures_age_seconds",))
        if age is not None and before - age > asked + 0.05:  # they came then or later
            return found
        time.sleep(0.05)


def value(found, name, **labels):
    return found[(name, *sorted({"replica": "0", **labels}.items()))]


def scripted(server):
    """A run in which everything happens that is counted."""
    server.engine.begin("a", "b", "c", "d")
    manager = server.engine.managers[0]
    manager.park("a")
    manager.park("b")
    server.engine.begin("a")  # restored
    manager.drop_session("d")
    manager.mark_lost("d", Reason.KV_EVICTION)
    manager.charge_outside("alias", manager.peek("c").attrs["frames"].clone())
    server.http("POST", f"/v1/session_state/sessions/{redacted_id('c')}/close")
    server.http("POST", "/v1/session_state/sessions/nobody/close")
    server.engine.begin("c")
    return manager


def test_who_was_lost_with_a_replica_is_counted_where_it_was_also_when_it_answers_no_more():
    (lost,) = (
        each for each in metrics.families({}, lost_homes={1: 3}) if each.name == f"{metrics.PREFIX}lost"
    )
    (sample,) = lost.samples
    assert (sample.labels, sample.value) == ({"replica": "1", "reason": "replica"}, 3)


def test_counts_equal_stats_after_a_scripted_run(live):
    server = live()
    manager = scripted(server)
    found, stats = fresh(server), manager.stats()
    for name in ("hits", "misses", "evictions", "parks", "restores", "restores_ahead"):
        assert value(found, f"{name}_total") == stats[name]
    assert stats["parks"] == 2
    assert stats["restores"] == 1
    states = {state: value(found, "sessions", state=state) for state in ("idle", "in_use", "host", "disk")}
    assert states == {"idle": 2, "in_use": 0, "host": 1, "disk": 0}
    assert sum(states.values()) == stats["sessions"]
    places = (("device", "live"), ("host", "live"), ("host", "parked"))
    assert stats["nbytes:cpu"] == sum(
        value(found, "bytes", rank="0", tier=tier, device="cpu", kind=kind) for tier, kind in places
    )
    assert value(found, "bytes", rank="0", tier="host", device="cpu", kind="parked") == 4096
    assert value(found, "bytes", rank="0", tier="disk", device="disk", kind="parked") == stats["disk_nbytes"]
    for kind, name in (("outside", "outside"), ("staged", "staged_nbytes"), ("detached", "detached_nbytes")):
        assert value(found, "more_bytes", rank="0", kind=kind) == stats[name]
    assert stats["outside"] == 4096
    lost = {reason.value: value(found, "lost_total", reason=reason.value) for reason in Reason}
    assert lost == {reason.value: stats.get(f"lost:{reason.value}", 0) for reason in Reason}
    assert lost["kv_eviction"] == 1
    assert value(found, "ends_total", how="close") == 1
    assert value(found, "ends_total", how="absent") == 1
    assert value(found, "budget_bytes", tier="host") == 64 << 20
    assert value(found, "max_sessions", what="kept") == stats["max_sessions"]
    assert value(found, "agree") == value(found, "ranks_ok") == 1


def test_moves_are_histograms_of_seconds_and_bytes_and_what_fails_is_counted_apart(live, monkeypatch):
    server = live()
    manager = scripted(server)
    monkeypatch.setattr(manager.offloader.host, "get", lambda parcel: 1 / 0)
    with pytest.raises(SessionRestoreFailedError), manager.lease("b"):
        pass
    found, moves = fresh(server), manager.offloader.moves.figures()
    done = {"park:host": 2, "park:disk": 0, "sink:disk": 0, "restore:host": 1, "restore:disk": 0}
    assert moves.keys() == done.keys()
    for name, held in moves.items():
        move, tier = name.split(":")
        where = {"move": move, "tier": tier}
        assert value(found, "moves_failed_total", **where) == held["failed"] == (name == "restore:host")
        for metric, what, bounds in (("move_seconds", "seconds", SECONDS), ("move_bytes", "nbytes", NBYTES)):
            where["rank"] = "0"
            assert value(found, f"{metric}_count", **where) == done[name]
            assert value(found, f"{metric}_sum", **where) == pytest.approx(held[what]["total"])
            buckets = [value(found, f"{metric}_bucket", **where, le=str(float(bound))) for bound in bounds]
            assert buckets == list(itertools.accumulate(held[what]["counts"][:-1]))
            assert value(found, f"{metric}_bucket", **where, le="+Inf") == done[name]
            del where["rank"]
    assert moves["park:host"]["nbytes"]["total"] == 2 * 4096


def test_the_host_tier_is_what_counts_towards_its_budget(live):
    """On a CPU, where a session that is ready lies in the same memory and is none of it."""
    server = live()
    manager = server.engine.managers[0]
    manager.declaration = Declaration(device_nbytes=4096, host_fields=frozenset({"kept"}))
    server.engine.begin("a", "b")
    for key in "ab":
        with manager.lease(key) as session:
            session.attrs["kept"] = torch.zeros(100, dtype=torch.uint8)
    manager.park("a")
    found = fresh(server)
    device, live_there, parked = (
        value(found, "bytes", rank="0", tier=tier, device="cpu", kind=kind)
        for tier, kind in (("device", "live"), ("host", "live"), ("host", "parked"))
    )
    assert (device, live_there, parked) == (4096, 200, 4096)
    tier = manager.offloader.host
    assert tier.budget - live_there - parked == tier.room(200)


@pytest.fixture
def page_locked(monkeypatch):
    """Have slabs page-locked, as they are where there is an accelerator; here that is said of them alone."""
    slabs = set()
    host_memory, is_pinned = copy.host_memory, torch.Tensor.is_pinned

    def of_slabs(nbytes):
        slab = host_memory(nbytes)
        slabs.add(slab.untyped_storage().data_ptr())
        return slab

    monkeypatch.setattr(copy, "host_memory", of_slabs)
    monkeypatch.setattr(
        torch.Tensor,
        "is_pinned",
        lambda self, *how: self.untyped_storage().data_ptr() in slabs or is_pinned(self, *how),
    )


@pytest.mark.usefixtures("page_locked")
def test_page_locked_slabs_are_of_the_host_tier_and_no_tier_is_below_nothing(live):
    server = live()
    manager = server.engine.managers[0]
    manager.declaration = Declaration(device_nbytes=4096, host_fields=frozenset({"kept"}))
    server.engine.begin("a", "b", "c")
    for key in "abc":
        with manager.lease(key) as session:
            session.attrs["kept"] = torch.zeros(100, dtype=torch.uint8)
    manager.park("a")
    manager.park("b")
    manager.check()
    found = fresh(server)
    held = {
        tuple(dict(labels)[name] for name in ("tier", "kind", "device")): count
        for (name, *labels), count in found.items()
        if name == "bytes" and count
    }
    assert held == {
        ("device", "live", "cpu"): 4096,
        ("host", "live", "cpu"): 300,
        ("host", "parked", "pinned"): 2 * 4096,
    }
    assert sum(held.values()) == manager.stats()["total_nbytes"]
    rows = {row["session"]: row["nbytes"] for row in server.http("GET", SESSIONS)[1]["sessions"]}
    assert rows == {
        redacted_id("a"): {"cpu": 100, "pinned": 4096},
        redacted_id("b"): {"cpu": 100, "pinned": 4096},
        redacted_id("c"): {"cpu": 4196},
    }


def test_a_session_in_use_is_counted_so(live):
    server = live("a")
    with server.engine.managers[0].lease("a"):
        assert value(fresh(server), "sessions", state="in_use") == 1


def test_no_scrape_makes_a_call_and_each_has_the_figures_of_now(live):
    server = live("a")
    fresh(server)
    server.step_runs(True)
    manager = server.engine.managers[0]
    with manager.lease("a"):
        for _ in range(20):
            found, _, _ = scrape(server)
            assert value(found, "sessions", state="in_use") == 1
    found, _, _ = scrape(server)
    assert value(found, "sessions", state="idle") == 1
    assert value(found, "hits_total") == manager.stats()["hits"] == 1
    assert server.engine.calls == [("session_state_figures", ())], "the one of the server's start"


def test_before_the_first_figures_a_scrape_has_none(live):
    engine = FakeEngine()
    engine.between_steps.clear()
    found, _, text = scrape(live(engine=engine))
    assert found == {}
    assert f"# TYPE {metrics.PREFIX}sessions gauge" in text


def test_no_metric_has_a_session_in_it(live):
    server = live("robot-0815-secret")
    fresh(server)
    _, _, text = scrape(server)
    assert f'{metrics.PREFIX}sessions{{replica="0",state="idle"}} 1.0' in text
    assert "robot-0815-secret" not in text
    assert redacted_id("robot-0815-secret") not in text


def test_the_hosts_cleaning_leaves_ours_where_it_is(live):
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    server = live("a")
    unregister_vllm_metrics()
    assert value(fresh(server), "sessions", state="idle") == 1


def test_a_second_server_of_one_process_takes_the_place_of_the_first(live):
    live("a")
    assert value(fresh(live("b", "c")), "sessions", state="idle") == 2


def test_each_replica_is_counted_apart(live):
    engine = FakeEngine(replicas=2)
    engine.begin("a", replica=1)
    found = fresh(live(engine=engine))
    assert value(found, "sessions", state="idle") == 0
    assert value(found, "sessions", replica="1", state="idle") == 1


def test_workers_without_managed_state_are_asked_once(live, monkeypatch):
    monkeypatch.setattr(stats_poller, "EVERY_S", 0.02)
    engine = FakeEngine()
    engine.replies = [{"supported": False, "error": "no attribute 'session_state_figures'"}]
    server = live(engine=engine)
    for _ in range(5):
        scrape(server)
        time.sleep(0.05)
    assert len(engine.calls) == 1


def names_of(expression):
    """The metrics of ours that a PromQL expression asks for."""
    return {
        re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(rf"{metrics.PREFIX}\w+", expression)
    }


def known_names():
    found = metrics.families({})
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in found}


def test_the_page_has_a_row_for_each_metric_and_no_other():
    page = (MONITORING.parent / "metrics.md").read_text()
    assert set(re.findall(rf"^\| `({metrics.PREFIX}\w+)`", page, re.MULTILINE)) == known_names()


def expressions():
    board = json.loads((MONITORING / "dashboard.json").read_text())
    yield from (target["expr"] for panel in board["panels"] for target in panel.get("targets", ()))
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    yield from (rule["expr"] for group in rules["groups"] for rule in group["rules"])


def test_every_expression_of_dashboard_and_alerts_asks_for_metrics_and_labels_that_exist(live):
    server = live()
    scripted(server)
    labels = {}
    for name, *pairs in fresh(server):
        labels.setdefault(f"{metrics.PREFIX}{name}", set()).update(key for key, _ in pairs)
    found = list(expressions())
    assert len(found) > 12
    asked = set()
    for expression in found:
        names = names_of(expression)
        assert names, expression
        assert names <= known_names(), expression
        asked |= names
        for grouped in re.findall(r"by ?\(([^)]*)\)", expression):
            wanted = {label.strip() for label in grouped.split(",")} - {"instance"}
            assert any(wanted <= labels.get(name, wanted) for name in names), expression
        for name, matched in re.findall(rf"({metrics.PREFIX}\w+)\{{([^}}]*)\}}", expression):
            wanted = set(re.findall(r"(\w+)[=!]", matched)) - {"instance"}  # Prometheus adds it
            assert wanted <= labels.get(name, wanted), expression
        assert expression.count("(") == expression.count(")")
    assert {name for name in known_names() if name.endswith("_total")} <= asked


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool on the PATH")
def test_prometheus_understands_every_expression(tmp_path):
    rules = [{"record": f"found:{number}", "expr": asked} for number, asked in enumerate(expressions())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "found", "rules": rules}]}))
    for file in (tmp_path / "rules.yml", MONITORING / "alerts.yml"):
        command = ["promtool", "check", "rules", file]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_has_what_grafana_needs_to_load_it():
    board = json.loads((MONITORING / "dashboard.json").read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time", "refresh"} <= board.keys()
    assert board["id"] is None
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in board["panels"]:
        assert {"type", "title", "gridPos", "datasource", "targets", "fieldConfig"} <= panel.keys()
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies on another"
        taken |= cells
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_there_are_five_alert_rules_that_say_what_to_do():
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    assert len(group["rules"]) == 5
    for rule in group["rules"]:
        assert {"alert", "expr", "for", "labels", "annotations"} == rule.keys()
        assert {"summary", "description"} == rule["annotations"].keys()
        assert rule["labels"]["severity"] in ("warning", "critical")

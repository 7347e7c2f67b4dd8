"""The metrics ``vllm_omni_session_state:*`` on the server's own ``/metrics``, from the last known figures.

A scrape reads what is there and never waits; it has the figures renewed behind it. What counts sessions or
events is of each replica's first rank, since all ranks of one decide alike; bytes are of each rank. No label
is a session.

Imported only in a server whose flag is on: it needs the Prometheus client, which vLLM-Omni brings.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from vllm_omni_session_state.manager.losses import Reason
from vllm_omni_session_state.manager.move_stats import NBYTES, SECONDS
from vllm_omni_session_state.omni.admin.aggregate import Answers, by_state, ranks_of, tier_nbytes
from vllm_omni_session_state.omni.admin.stats_poller import LINGER_S, StatsPoller

PREFIX = "vllm_omni_session_state:"
"""Not vLLM-Omni's own ``vllm:``, which it removes from the registry when an engine starts."""

_GAUGES = {
    "figures_age_seconds": ("", "Age of these figures."),
    "agree": ("replica", "Whether all ranks say the same."),
    "ranks_ok": ("replica", "Ranks that answer."),
    "unchanged_seconds": (
        "replica rank",
        "Seconds since a worker last wrote its figures, as it does at each event.",
    ),
    "sessions": ("replica state", "Sessions, by where they are."),
    "split_sessions": ("", "Sessions that are in several replicas."),
    "bytes": ("replica rank tier device kind", "Bytes of the sessions of the table."),
    "more_bytes": ("replica rank kind", "Bytes beside the sessions of the table."),
    "budget_bytes": ("replica tier", "Budget of one rank, where one is set."),
    "max_sessions": ("replica what", "Sessions that may be kept, or parked."),
    "kv_blocks": ("replica state", "Blocks of the engine's KV pool."),
}
_COUNTS = {
    "hits": ("replica", "Steps that found their session."),
    "misses": ("replica", "Sessions that were begun."),
    "evictions": ("replica", "Sessions that left the table to make room."),
    "parks": ("replica", "Sessions that were parked."),
    "restores": ("replica", "Parked sessions that were brought back."),
    "restores_ahead": ("replica", "Of these, those whose file was read before their step began."),
}
"""By the figure of ``stats()``."""
_COUNTERS = {
    **_COUNTS,
    "ends": ("replica how", "Ends that arrived, by what came of them."),
    "lost": ("replica reason", "Sessions dropped that no client had ended."),
    "moves_failed": (
        "replica move tier",
        "Moves that were refused or failed; the session is where it was.",
    ),
}
_HISTOGRAMS = {
    "move_seconds": ("replica rank move tier", "Seconds that a move took."),
    "move_bytes": ("replica rank move tier", "Bytes that a move moved."),
}
_KINDS: tuple[tuple[Callable[..., Any], Mapping[str, tuple[str, str]]], ...] = (
    (GaugeMetricFamily, _GAUGES),
    (CounterMetricFamily, _COUNTERS),
    (HistogramMetricFamily, _HISTOGRAMS),
)
"""All metrics by their names, with their labels and what they are."""

Rank = Mapping[str, Any]
Samples = Iterator[tuple[Any, ...]]
"""Of each the metric's name, its labels but replica and rank, its value: of a histogram buckets and sum."""

Lost = Callable[[], Mapping[int, int]]
"""How many sessions were lost with their replica, by its number; known here, and to no worker."""
_NONE: Mapping[int, int] = {}


class SessionStateCollector(Collector):
    """Answers scrapes from the last known figures."""

    def __init__(self, figures: StatsPoller, lost: Lost) -> None:
        self._figures = figures
        self._lost = lost

    def describe(self) -> Iterable[Metric]:
        """The names, so that nobody else registers one."""
        return families({})

    def collect(self) -> Iterable[Metric]:
        """What is known; it waits for no worker."""
        self._figures.want(linger_s=LINGER_S)
        known = self._figures.look()
        if known is None:
            return families({}, lost_homes=self._lost())
        return families(known.answers, known.age_s, self._figures.split, self._lost())


_registered: dict[CollectorRegistry, SessionStateCollector] = {}


def register(figures: StatsPoller, lost: Lost, registry: CollectorRegistry = REGISTRY) -> None:
    """Have scrapes answered from these figures, and from no earlier ones of this process."""
    earlier = _registered.pop(registry, None)
    if earlier is not None:
        registry.unregister(earlier)
    _registered[registry] = collector = SessionStateCollector(figures, lost)
    registry.register(collector)


def families(
    answers: Answers,
    age_s: float | None = None,
    split: int | None = None,
    lost_homes: Mapping[int, int] = _NONE,
) -> list[Metric]:
    """All metrics, from answers of ``session_state_stats``; what is ``None`` has no sample."""
    found = {
        name: kind(f"{PREFIX}{name}", words, labels=labels.split())
        for kind, metrics in _KINDS
        for name, (labels, words) in metrics.items()
    }
    for name, value in (("figures_age_seconds", age_s), ("split_sessions", split)):
        if value is not None:
            found[name].add_metric([], value)
    first: dict[int, Rank] = {}
    for n, answer in answers.items():
        found["agree"].add_metric([f"{n}"], float(answer["agree"]))
        found["ranks_ok"].add_metric([f"{n}"], sum(rank["ok"] for rank in answer["ranks"]))
    for n, rank in ranks_of(answers):
        for name, labels, *values in _of_rank(rank):
            found[name].add_metric([f"{n}", f"{rank['rank']}", *labels], *values)
        if first.setdefault(n, rank) is rank:
            for name, labels, value in _of_replica(rank):
                found[name].add_metric([f"{n}", *labels], value)
    for n in sorted({*first, *lost_homes}):
        found["lost"].add_metric([f"{n}", Reason.REPLICA.value], lost_homes.get(n, 0))
    return list(found.values())


def _of_replica(rank: Rank) -> Samples:
    """What all ranks of a replica say alike."""
    for state, count in by_state(rank).items():
        yield "sessions", [state], count
    for tier in ("device", "host", "disk"):
        if tier in rank["bounds"]:
            yield "budget_bytes", [tier], rank["bounds"][tier]
    yield "max_sessions", ["kept"], rank["max_sessions"]
    yield "max_sessions", ["parked"], rank["bounds"]["max_parked"]
    if rank["kv"] is not None:
        free = rank["kv"]["free"]
        yield "kv_blocks", ["free"], free
        yield "kv_blocks", ["used"], rank["kv"]["blocks"] - free
    for name in _COUNTS:
        yield name, [], rank[name]
    for how, count in rank["ends"].items():
        yield "ends", [how], count
    for reason in Reason:
        if reason is not Reason.REPLICA:
            yield "lost", [reason.value], rank.get(f"lost:{reason.value}", 0)
    for move, held in rank["moves"].items():
        yield "moves_failed", move.split(":"), held["failed"]


def _of_rank(rank: Rank) -> Samples:
    if "unchanged_s" in rank:
        yield "unchanged_seconds", [], rank["unchanged_s"]
    for (tier, kind, device), count in tier_nbytes(rank):  # each byte in memory once
        yield "bytes", [tier, device, kind], count
    yield "bytes", ["disk", "disk", "parked"], rank["disk_nbytes"]
    yield "more_bytes", ["outside"], rank["outside"]
    for kind in ("staged", "detached", "ahead", "kept"):
        yield "more_bytes", [kind], rank[f"{kind}_nbytes"]
    for move, held in rank["moves"].items():
        for name, what, bounds in (("move_seconds", "seconds", SECONDS), ("move_bytes", "nbytes", NBYTES)):
            upper = [*(f"{float(bound)}" for bound in bounds), "+Inf"]
            counts = itertools.accumulate(held[what]["counts"])
            yield name, move.split(":"), list(zip(upper, counts, strict=True)), held[what]["total"]

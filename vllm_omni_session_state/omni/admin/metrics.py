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

_COUNTS = {
    "hits": "Steps that found their session.",
    "misses": "Sessions that were begun.",
    "evictions": "Sessions that left the table to make room.",
    "parks": "Sessions that were parked.",
    "restores": "Parked sessions that were brought back.",
    "restores_ahead": "Of these, those whose file was read before their step began.",
}
"""By the figure of ``stats()``, with what it counts."""

_MORE = {
    "staged": "staged_nbytes",
    "outside": "outside",
    "detached": "detached_nbytes",
    "ahead": "ahead_nbytes",
    "kept": "kept_nbytes",
}
"""By the kind the figure of ``stats()`` that counts bytes beside those of the sessions of the table."""

Sample = tuple[list[str], float]
Lost = Callable[[], Mapping[int, int]]
_NONE: Mapping[int, int] = {}


class SessionStateCollector(Collector):
    """Answers scrapes.

    Args:
        figures: The last known ones.
        lost: How many sessions were lost with their replica, by its number; known here, and to no worker.
    """

    def __init__(self, figures: StatsPoller, lost: Lost) -> None:
        self._figures = figures
        self._lost = lost

    def describe(self) -> Iterable[Metric]:
        """The names, so that nobody else registers one."""
        return families({})

    def collect(self) -> Iterator[Metric]:
        """What is known; it waits for no worker."""
        self._figures.want(linger_s=LINGER_S)
        known = self._figures.look()
        if known is None:
            return iter(families({}, lost_homes=self._lost()))
        return iter(families(known.asked.answers, known.age_s, self._figures.split, self._lost()))


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
    """All metrics.

    Args:
        answers: Of ``session_state_stats``.
        age_s: How old they are; ``None`` where there are none.
        split: How many sessions are in several replicas; ``None`` where that is not known.
        lost_homes: Sessions that were lost with their replica, by its number.
    """
    every = list(ranks_of(answers))
    first: dict[int, Mapping[str, Any]] = {}
    for replica, rank in every:
        first.setdefault(replica, rank)
    found: list[Metric] = [_gauge("figures_age_seconds", "Age of these figures.", (), _one(age_s))]
    found.append(_gauge("agree", "Whether all ranks say the same.", ("replica",), _agree(answers)))
    found.append(_gauge("ranks_ok", "Ranks that answer.", ("replica",), _answering(answers)))
    unchanged = [
        ([f"{n}", f"{rank['rank']}"], rank["unchanged_s"]) for n, rank in every if "unchanged_s" in rank
    ]
    words = "Seconds since a worker last wrote its figures, as it does at each event."
    found.append(_gauge("unchanged_seconds", words, ("replica", "rank"), unchanged))
    states = [
        ([f"{n}", state], count) for n, rank in first.items() for state, count in by_state(rank).items()
    ]
    found.append(_gauge("sessions", "Sessions, by where they are.", ("replica", "state"), states))
    found.append(_gauge("split_sessions", "Sessions that are in several replicas.", (), _one(split)))
    held = [
        ([f"{n}", f"{rank['rank']}", *labels], count) for n, rank in every for labels, count in _bytes(rank)
    ]
    where = ("replica", "rank", "tier", "device", "kind")
    found.append(_gauge("bytes", "Bytes of the sessions of the table.", where, held))
    more = [
        ([f"{n}", f"{rank['rank']}", kind], rank[key]) for n, rank in every for kind, key in _MORE.items()
    ]
    found.append(
        _gauge("more_bytes", "Bytes beside the sessions of the table.", ("replica", "rank", "kind"), more)
    )
    budgets = [
        ([f"{n}", tier], rank["bounds"][tier])
        for n, rank in first.items()
        for tier in ("device", "host", "disk")
        if tier in rank["bounds"]
    ]
    found.append(
        _gauge("budget_bytes", "Budget of one rank, where one is set.", ("replica", "tier"), budgets)
    )
    limits = [
        ([f"{n}", what], count)
        for n, rank in first.items()
        for what, count in (("kept", rank["max_sessions"]), ("parked", rank["bounds"]["max_parked"]))
    ]
    found.append(_gauge("max_sessions", "Sessions that may be kept, or parked.", ("replica", "what"), limits))
    blocks = [
        ([f"{n}", state], count)
        for n, rank in first.items()
        if rank["kv"] is not None
        for state, count in (
            ("free", rank["kv"]["free"]),
            ("used", rank["kv"]["blocks"] - rank["kv"]["free"]),
        )
    ]
    found.append(_gauge("kv_blocks", "Blocks of the engine's KV pool.", ("replica", "state"), blocks))
    for name, words in _COUNTS.items():
        found.append(
            _counter(name, words, ("replica",), [([f"{n}"], rank[name]) for n, rank in first.items()])
        )
    ends = [([f"{n}", how], count) for n, rank in first.items() for how, count in rank["ends"].items()]
    found.append(_counter("ends", "Ends that arrived, by what came of them.", ("replica", "how"), ends))
    lost = [
        ([f"{n}", reason.value], rank.get(f"lost:{reason.value}", 0))
        for n, rank in first.items()
        for reason in Reason
        if reason is not Reason.REPLICA
    ]
    lost += [([f"{n}", Reason.REPLICA.value], lost_homes.get(n, 0)) for n in sorted({*first, *lost_homes})]
    found.append(_counter("lost", "Sessions dropped that no client had ended.", ("replica", "reason"), lost))
    failed = [
        ([f"{n}", *move.split(":")], held["failed"])
        for n, rank in first.items()
        for move, held in rank["moves"].items()
    ]
    words = "Moves that were refused or failed; the session is where it was."
    found.append(_counter("moves_failed", words, ("replica", "move", "tier"), failed))
    found.append(_histogram("move_seconds", "Seconds that a move took.", every, "seconds", SECONDS))
    found.append(_histogram("move_bytes", "Bytes that a move moved.", every, "nbytes", NBYTES))
    return found


def _one(value: float | None) -> list[Sample]:
    return [] if value is None else [([], value)]


def _agree(answers: Answers) -> list[Sample]:
    return [([f"{replica}"], float(answer["agree"])) for replica, answer in answers.items()]


def _answering(answers: Answers) -> list[Sample]:
    return [
        ([f"{replica}"], sum(rank["ok"] for rank in answer["ranks"])) for replica, answer in answers.items()
    ]


def _bytes(rank: Mapping[str, Any]) -> Iterator[Sample]:
    """Bytes of one rank by tier, device and kind, each once."""
    for (tier, kind, device), count in tier_nbytes(rank):
        yield [tier, device, kind], count
    yield ["disk", "disk", "parked"], rank["disk_nbytes"]


def _gauge(name: str, words: str, labels: tuple[str, ...], samples: Iterable[Sample]) -> Metric:
    return _filled(GaugeMetricFamily(f"{PREFIX}{name}", words, labels=labels), samples)


def _counter(name: str, words: str, labels: tuple[str, ...], samples: Iterable[Sample]) -> Metric:
    return _filled(CounterMetricFamily(f"{PREFIX}{name}", words, labels=labels), samples)


def _histogram(
    name: str,
    words: str,
    ranks: list[tuple[int, Mapping[str, Any]]],
    what: str,
    bounds: tuple[float, ...],
) -> Metric:
    labels = ("replica", "rank", "move", "tier")
    family = HistogramMetricFamily(f"{PREFIX}{name}", words, labels=labels)
    upper = [*(f"{float(bound)}" for bound in bounds), "+Inf"]
    for n, rank in ranks:
        for move, held in rank["moves"].items():
            counts = itertools.accumulate(held[what]["counts"])
            where = [f"{n}", f"{rank['rank']}", *move.split(":")]
            family.add_metric(where, list(zip(upper, counts, strict=True)), held[what]["total"])
    metric: Metric = family
    return metric


def _filled(family: Any, samples: Iterable[Sample]) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    metric: Metric = family
    return metric

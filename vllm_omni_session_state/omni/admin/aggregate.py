"""One view of what all replicas and ranks say: a session is one row, wherever its parts are.

Bytes are added up over ranks and replicas. What they do not agree on is shown as ``agree: false``, never
hidden; the worker's answer itself has each rank's part. A session is at home in one replica: one that is in
several has no home, and they do not agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm_omni_session_state.accounting.allocations import TIER

STATES = ("in_use", "idle", "host", "disk", "kv_only")
"""Where a session is: used by a forward, on the device with nobody using it, parked, or only engine KV."""

Answers = Mapping[int, Mapping[str, Any]]
"""By the number of the replica what its ranks answer."""

Row = dict[str, Any]


def ranks_of(answers: Answers) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Each rank that did well, with its replica's number."""
    for replica, answer in answers.items():
        yield from ((replica, rank) for rank in answer["ranks"] if rank["ok"])


def state_of(place: str, *, used: bool) -> str:
    """The state of one rank's part of a session."""
    if place != "device":
        return place
    return "in_use" if used else "idle"


def rows(answers: Answers) -> list[Row]:
    """The sessions of ``session_state_figures``, least recently used first, one row for each.

    Ranks that agree after a step may show a session in two states for a moment: one of them is ahead.
    """
    found: dict[str, Row] = {}
    for replica, rank in ranks_of(answers):
        for row in rank["rows"]:
            state = state_of(row.place, used=row.used)
            _add(found, row.digest, replica, row.session, state=state, nbytes=row.nbytes)
        for digest, session in rank["only_kv"].items():
            _add(found, digest, replica, session, state="kv_only", nbytes={})
    for row in found.values():
        holding = [answers[replica] for replica in row["replicas"]]
        if all(answer["agree"] for answer in holding):
            row["agree"] = alike = True
        else:
            alike = row["ranks"] == sum(len(answer["ranks"]) for answer in holding)
        _judge(row, alike=alike)
    return list(found.values())


def home_of(replicas: Sequence[int]) -> int | None:
    """The replica that has a session, of those that have a part of it; ``None`` where there are several."""
    return replicas[0] if len(replicas) == 1 else None


def split(listed: Iterable[Row]) -> list[Row]:
    """Of some sessions those that are in several replicas: their steps went now to one, now to another."""
    return [row for row in listed if len(row["replicas"]) > 1]


def one(answers: Answers) -> Row | None:
    """The session of ``session_state_inspect`` with its values; ``None`` where nobody has it."""
    found: dict[str, Row] = {}
    values: dict[str, Row] = {}
    for replica, rank in ranks_of(answers):
        entry = rank["session"]
        if entry is None:
            continue
        state = state_of(entry["place"], used=entry["used"])
        nbytes = Counter(entry["nbytes"])
        nbytes.update(entry["parked_nbytes"])
        _add(found, entry["digest"], replica, entry["session"], state=state, nbytes=nbytes)
        for value in entry["values"]:
            mine = {name: value[name] for name in ("name", "kind", "bucket", "shape")}
            merged = values.setdefault(value["name"], {**mine, "nbytes": Counter()})
            merged["nbytes"].update(value["nbytes"])
    if not found:
        return None
    row = next(iter(found.values()))
    _judge(row, alike=all(answers[replica]["agree"] for replica in row["replicas"]))
    return {**row, "values": list(values.values())}


def _add(
    found: dict[str, Row], digest: str, replica: int, session: str, *, state: str, nbytes: Mapping[str, int]
) -> None:
    """Add one rank's part to a session's row; two that are shown alike are two rows."""
    row = found.get(digest)
    if row is None:
        row = {"session": session, "state": state, "nbytes": Counter(), "home": None, "replicas": []}
        row = found[digest] = {**row, "ranks": 0, "agree": True}
    row["ranks"] += 1
    row["agree"] = row["agree"] and row["state"] == state
    row["state"] = min(row["state"], state, key=STATES.index)
    if replica not in row["replicas"]:
        row["replicas"].append(replica)
    row["nbytes"].update(nbytes)


def _judge(row: Row, *, alike: bool) -> None:
    """Say of a whole row where its session is at home, and whether all say the same of it."""
    row["home"] = home_of(row["replicas"])
    row["agree"] = row["agree"] and alike and row["home"] is not None


def totals(answers: Answers) -> dict[str, int]:
    """The figures of ``session_state_stats`` in few.

    Sessions by state, counted on each replica's first rank that did well; bytes by device, over all ranks.
    """
    found = Counter(dict.fromkeys(("sessions", "in_use", "idle", "host", "disk"), 0))
    seen: set[int] = set()
    for replica, rank in ranks_of(answers):
        found.update({key: count for key, count in rank.items() if key.startswith("nbytes:")})
        if replica not in seen:
            seen.add(replica)
            found.update(by_state(rank), sessions=rank["sessions"])
    return found


def by_state(rank: Mapping[str, Any]) -> dict[str, int]:
    """Sessions of one rank's ``session_state_stats``, by their state."""
    on_device = rank["sessions"] - rank["parked_sessions"]
    return {
        "in_use": rank["used_sessions"],
        "idle": max(0, on_device - rank["used_sessions"]),
        "host": rank["parked_sessions"] - rank["disk_sessions"],
        "disk": rank["disk_sessions"],
    }


def tier_nbytes(rank: Mapping[str, Any]) -> Iterable[tuple[tuple[str, str, str], int]]:
    """Bytes by tier, kind and device of one rank's ``session_state_stats``: all in memory, each once."""
    for key, count in rank.items():
        if key.startswith(TIER):
            tier, kind, device = key.removeprefix(TIER).split(":", 2)
            yield (tier, kind, device), count

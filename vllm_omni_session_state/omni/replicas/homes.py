"""The homes of one stage's sessions: which replica has each session, and who lost theirs with a replica.

A home is a client object of vLLM-Omni's pool, never a slot's number: vLLM-Omni gives the slot of a dead
replica to the next one. A session gets its home at its first step and keeps it until it ends. A worker that
lets go of a session by itself tells nobody; so a replica is asked now and then which of its sessions it still
has, and what it has not is forgotten. Nothing is forgotten by a guess.

All of it runs on the one thread of vLLM-Omni's orchestrator; other threads only read.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from vllm_omni_session_state.base.errors import NoRoomError, SessionStateLostError
from vllm_omni_session_state.base.ids import display_id, redacted_id
from vllm_omni_session_state.base.log import LOGGER
from vllm_omni_session_state.manager.losses import Losses, Reason

MOST = 65_536
"""Sessions that have a home at once."""

SLICE = 256
"""Sessions that one replica is asked for in one call."""

Live = Mapping[int, object]
"""By its slot the client of each replica that can be given a step."""

Asking = dict[str, int]
"""Sessions that a replica is asked for, each with the number of its last step, of all steps of the stage."""


@dataclass(slots=True)
class _Home:
    """The home of one session.

    Attributes:
        client: The replica.
        slot: Its place in the pool.
        held: Whether it has the session, as far as is known; one that it lost counts for nothing.
        last: The number of its last step, of all steps of the stage.
        requests: The ids of those that may still be under way.
    """

    client: object
    slot: int
    held: bool = True
    last: int = 0
    requests: set[str] = field(default_factory=set)


class Homes:
    """The sessions of one stage.

    Args:
        strict: Whether the steps of a session that is lost fail until its client begins anew.
        under_way: Whether a request is still under way, by its id.
        most: How many there may be.

    Attributes:
        lost: How many were lost with a replica, by its slot.
    """

    def __init__(self, *, strict: bool, under_way: Callable[[str], bool], most: int = MOST) -> None:
        self.lost: Counter[int] = Counter()
        self.most = most
        self._strict = strict
        self._under_way = under_way
        self._steps = 0
        self._homes: OrderedDict[str, _Home] = OrderedDict()  # longest neither used nor confirmed first
        self._doubted: dict[str, None] = {}
        self._losses = Losses()

    def __len__(self) -> int:
        return len(self._homes)

    def __contains__(self, key: str) -> bool:
        return key in self._homes

    @property
    def full(self) -> bool:
        """Whether there is no room for another session."""
        return len(self._homes) >= self.most

    @property
    def doubts(self) -> bool:
        """Whether something is to be asked for that is not only old."""
        return bool(self._doubted)

    def of(self, key: str) -> object | None:
        """The client that has a session, ``None`` where it has no home."""
        home = self._homes.get(key)
        return None if home is None else home.client

    def is_lost(self, key: str) -> bool:
        """Whether a session was lost with a replica and its client does not know it yet."""
        return self._losses.reason(key) is not None

    def named(self, name: str) -> list[str]:
        """The sessions that a name may mean: the one of that id, and those that are shown so."""
        return [key for key in list(self._homes) if name in (key, redacted_id(key), display_id(key))]

    def loads(self) -> Counter[int]:
        """How many sessions each replica has, by the ``id()`` of its client."""
        return Counter(id(home.client) for home in self._homes.values() if home.held)

    def place(
        self, key: str, request: str, live: Live, running: Callable[[int], int], *, reset: bool = False
    ) -> int:
        """The slot where a step of a session goes; with ``reset`` its client starts anew.

        Raises:
            SessionStateLostError: If the session was lost with its replica and steps of such fail.
            NoRoomError: If it is new and ``full``.
        """
        home = self._homes.get(key)
        if home is not None and not _is_live(home, live):
            self._lose(key, home)
            home = None
        if reset:
            self._losses.clear(key)
        elif home is None and (reason := self._losses.reason(key)) is not None:
            raise SessionStateLostError(display_id(key), reason.value)
        if home is None:
            if self.full:
                raise NoRoomError(f"{len(self._homes)} sessions have a replica, and each is still there")
            loads = self.loads()
            slot = min(live, key=lambda slot: (loads[id(live[slot])], running(slot), slot))
            home = self._homes[key] = _Home(live[slot], slot)
        elif reset:
            home.held = True
        self._step(key, home, request)
        return home.slot

    def went(self, key: str, request: str, slot: int, client: object) -> None:
        """Note where vLLM-Omni sent a step, if it chose the replica itself."""
        home = self._homes.get(key)
        if home is not None and home.client is not client:
            self._lose(key, home)
            self._losses.clear(key)  # its step is on its way
            home = None
        if home is None:
            if self.full:
                return
            home = self._homes[key] = _Home(client, slot)
        self._step(key, home, request)

    def forget(self, key: str) -> None:
        """A session has ended, or its client does not want to go on with it."""
        self._losses.clear(key)
        self._remove(key)

    def doubt(self, key: str) -> None:
        """Have a session's home asked whether it has it."""
        if key in self._homes:
            self._doubted[key] = None

    def shed(self, live: Live) -> None:
        """Let go of old entries of which it is known that no replica has the session."""
        for key in self._oldest():
            home = self._homes[key]
            if not _is_live(home, live):
                self._lose(key, home)
            elif not home.held:
                self._remove(key)

    def quiet(self, keys: Iterable[str]) -> Asking:
        """Those of some sessions that have a home and no step under way."""
        return {key: self._homes[key].last for key in keys if key in self._homes and not self._busy(key)}

    def to_ask(self, live: Live, *, oldest: bool) -> dict[int, Asking]:
        """Which replica, by its slot, is to be asked for which sessions: those in doubt, or ``oldest`` too.

        A session with a step under way is none of them. That one is gone needs no answer.
        """
        for key in [key for key in self._doubted if not _is_live(self._homes[key], live)]:
            del self._doubted[key]
        old = [key for key in self._oldest() if self._homes[key].held] if oldest else []
        found: dict[int, Asking] = {}
        for key, last in self.quiet(dict.fromkeys([*self._doubted, *old])).items():
            home = self._homes[key]
            if _is_live(home, live) and len(found.get(home.slot, ())) < SLICE:
                found.setdefault(home.slot, {})[key] = last
        return found

    def heard(self, asked: Asking, found: Iterable[bool], lost: Iterable[bool]) -> None:
        """Whether a replica has each session that it was asked for, or knows it as lost.

        Of one that had a step meanwhile nothing is taken from that.
        """
        for (key, last), there, gone in zip(asked.items(), found, lost, strict=True):
            home = self._homes.get(key)
            if home is None or home.last != last:
                continue
            self._doubted.pop(key, None)
            # One that is lost has its next step fail, where that is asked for: its replica remembers it.
            if there or (gone and self._strict):
                home.held = there
                self._homes.move_to_end(key)
            else:
                self._remove(key)

    def drop_oldest(self) -> None:
        """Make room where nobody can be asked: such replicas keep few sessions themselves."""
        if self._homes:
            self._remove(next(iter(self._homes)))

    def _oldest(self) -> list[str]:
        return [key for key, _ in zip(self._homes, range(SLICE), strict=False)]

    def _busy(self, key: str) -> bool:
        home = self._homes[key]
        home.requests = {request for request in home.requests if self._under_way(request)}
        return bool(home.requests)

    def _step(self, key: str, home: _Home, request: str) -> None:
        self._homes.move_to_end(key)
        self._steps += 1
        home.last = self._steps
        home.requests = {other for other in home.requests if self._under_way(other)} | {request}

    def _remove(self, key: str) -> None:
        self._homes.pop(key, None)
        self._doubted.pop(key, None)

    def _lose(self, key: str, home: _Home) -> None:
        self._remove(key)
        self.lost[home.slot] += 1
        if self._strict:
            self._losses.record(key, Reason.REPLICA)
        LOGGER.warning(
            "session %s is lost (%s): it was on replica %d, which is gone; %s",
            display_id(key),
            Reason.REPLICA.value,
            home.slot,
            "its steps fail until it is reset, closed or begun anew"
            if self._strict
            else "its rollout starts over at another one",
        )

    def check(self) -> None:
        """Assert that doubts are of sessions that have a home, of which there are not too many."""
        assert self._doubted.keys() <= self._homes.keys(), "a session without a home is doubted"
        assert len(self._homes) <= self.most, f"{len(self._homes)} sessions have a home"


def _is_live(home: _Home, live: Live) -> bool:
    return live.get(home.slot) is home.client

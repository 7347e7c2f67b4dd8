"""Table entries: a session, where it is, who uses it and what waits for its last use to end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import chain

from vllm_omni_session_state.offload.parking import Parked
from vllm_omni_session_state.state.inspection import Whereabouts
from vllm_omni_session_state.state.session import SessionState


class Placement(Enum):
    """Where a session is. While it moves it counts where it came from."""

    NEW = "new"
    IDLE = "idle on the device"
    LEASED = "in use"
    LEAVING = "on its way from the device"
    ON_HOST = "in host memory"
    FROM_HOST = "on its way from host memory"
    ON_DISK = "on the disk"
    FROM_DISK = "on its way from the disk"
    DETACHED = "lost, and whoever holds it keeps what it holds"
    ENDED = "ended"

    @property
    def away(self) -> Placement:
        """What it is when it sets out from here."""
        return _AWAY[self]


_AWAY = {
    Placement.IDLE: Placement.LEAVING,
    Placement.ON_HOST: Placement.FROM_HOST,
    Placement.ON_DISK: Placement.FROM_DISK,
}
RESTING = frozenset(_AWAY)
"""Nobody uses it, and it stays there."""
MOVING = frozenset(_AWAY.values())
ON_DISK = frozenset({Placement.ON_DISK, Placement.FROM_DISK})
PARKED = ON_DISK | {Placement.ON_HOST, Placement.FROM_HOST}
OUT = frozenset({Placement.NEW, Placement.DETACHED, Placement.ENDED})
"""Not in the table."""


@dataclass(slots=True, eq=False)
class Lease:
    """One use of a session; it ends once, however often it is given back.

    Attributes:
        key: The session's.
        entry: The session's, from when the use begins.
    """

    key: str
    entry: Entry | None = None

    @property
    def session(self) -> SessionState:
        """The session, once the use has begun."""
        assert self.entry is not None, "it has begun"
        return self.entry.session


@dataclass(slots=True, eq=False)
class Entry:
    """One session of the table. Every field is read and written under the manager's lock.

    Attributes:
        session: The session.
        placement: Where it is; ``Table.transition()`` alone changes it.
        leases: Uses under way; while there is one, the session is neither moved nor evicted.
        ending: Whether a drop waits for the last lease to end.
        turn: The number of its last use among all uses of all sessions.
        used_at: When that was, by this process's monotonic clock; shown, and never decided by.
        stale: Whether the server has said that nobody has stepped it for long, and nobody has since.
        unwritable: Whether a file of what it holds now was refused for good.
    """

    session: SessionState
    placement: Placement = Placement.NEW
    leases: set[Lease] = field(default_factory=set)
    ending: bool = False
    turn: int = 0
    used_at: float = 0.0
    stale: bool = False
    unwritable: bool = False

    @property
    def key(self) -> str:
        """The session's."""
        return self.session.key

    @property
    def idle(self) -> bool:
        """Whether it is on the device, with nobody using or moving it."""
        return self.placement is Placement.IDLE

    @property
    def resting(self) -> bool:
        """Whether nobody uses or moves it, on the device or parked."""
        return self.placement in RESTING

    @property
    def moving(self) -> bool:
        """Whether it is on its way to a tier or back; whoever needs it waits."""
        return self.placement in MOVING

    @property
    def used(self) -> bool:
        """Whether somebody uses it, or it is on its way."""
        return self.placement not in RESTING

    @property
    def parked(self) -> bool:
        """Whether it is below the device, also while it is on its way from there."""
        return self.placement in PARKED

    @property
    def gone_to(self) -> Parked | None:
        """What brings it back; ``None`` where nothing has left the device."""
        gone_to = self.session.gone_to
        return gone_to if isinstance(gone_to, Parked) else None

    @property
    def tier(self) -> str:
        """The tier that has it, or ``"device"``."""
        if self.placement in ON_DISK:
            return "disk"
        return "host" if self.placement in PARKED else "device"

    @property
    def where(self) -> Whereabouts:
        """Where it is, for who lists it."""
        gone_to = self.gone_to
        if gone_to is None:
            return Whereabouts(self.tier, self.used, {}, ())
        in_place = tuple(chain(*gone_to.in_place(self.session)))
        return Whereabouts(self.tier, self.used, gone_to.nbytes_by_device, in_place)

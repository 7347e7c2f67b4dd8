"""Table entries: a session with who uses it, where it is and what waits for its last use to end."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from vllm_omni_session_state.offload.parking import Parked
from vllm_omni_session_state.state.inspection import Whereabouts
from vllm_omni_session_state.state.session import SessionState


@dataclass(slots=True, eq=False)
class Entry:
    """One session of the table. Every field is read and written under the manager's lock.

    Attributes:
        session: The session.
        leases: Uses under way; while there is one, the session is neither moved nor evicted.
        moving: Whether it is on its way to a tier or back; whoever needs it waits.
        parked: Where its device part is, ``None`` while it is on the device.
        ending: Whether a drop waits for the last lease to end.
        fresh: Whether nobody has used it yet.
        place: The number of its last use among all uses of all sessions.
        used_at: When that was, by this process's monotonic clock; shown, and never decided by.
        stale: Whether the server has said that nobody has stepped it for long, and nobody has since.
        unwritable: Whether a file of what it holds now was refused for good.
    """

    session: SessionState
    leases: set[object] = field(default_factory=set)
    moving: bool = False
    parked: Parked | None = None
    ending: bool = False
    fresh: bool = True
    place: int = 0
    used_at: float = 0.0
    stale: bool = False
    unwritable: bool = False

    @property
    def idle(self) -> bool:
        """Whether it is in the order: on the device, with nobody using or moving it."""
        return not self.leases and not self.moving and self.parked is None

    @property
    def resting(self) -> bool:
        """Whether nobody uses or moves it, on the device or parked."""
        return not self.leases and not self.moving

    @property
    def used(self) -> bool:
        """Whether somebody uses it, or it is on its way."""
        return bool(self.leases) or self.moving

    @property
    def tier(self) -> str:
        """The tier that has it, or ``"device"``."""
        return "device" if self.parked is None else self.parked.level.value

    @property
    def where(self) -> Whereabouts:
        """Where it is, for who lists it."""
        parked = self.parked
        if parked is None:
            return Whereabouts(self.tier, self.used, {}, ())
        in_place = tuple(chain(*parked.in_place(self.session)))
        return Whereabouts(self.tier, self.used, parked.nbytes_by_device, in_place)

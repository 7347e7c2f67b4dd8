"""The levels below the device: which there are, what they hold, and what room is left in each.

Several ranks count alike: by how many are parked and what the model declares of each, never by bytes of
their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_omni_session_state.base.errors import NotWritableError, TierFaultError, TierFullError
from vllm_omni_session_state.manager.consensus import AllGather, Ranks
from vllm_omni_session_state.manager.entry import Entry
from vllm_omni_session_state.manager.move_stats import MoveStats
from vllm_omni_session_state.manager.table import Table
from vllm_omni_session_state.offload.disk_tier import FIGURES, DiskTier
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.offload.parking import Level, Parked, overdraft_of
from vllm_omni_session_state.offload.spill import Spiller
from vllm_omni_session_state.state.session import Declaration, host_fields

_SETTINGS = {Level.HOST: "host_budget", Level.DISK: "disk.budget"}

_NO_SPACE = ("ENOSPC", "EDQUOT")


class Tiers:
    """The tiers of one manager.

    Args:
        table: Whose sessions.
        host: Host memory, ``None``: none is parked there.
        disk: Files, ``None``: none is parked there.
        max_parked: Sessions that may be parked at once.
        exchange: How the ranks tell each other; ``None`` where there is one.

    Attributes:
        spiller: Moves older items of a session's lists to the disk, where there is one.
        declaration: What the model declared of one session.
        engine_nbytes: What an engine keeps of one session in its pool at most, which moves with the rest.
        ranks: Of which this process is one.
        moves: How long moves between tiers took, and how much moved.
    """

    def __init__(
        self,
        table: Table,
        *,
        host: HostTier | None,
        disk: DiskTier | None,
        max_parked: int,
        exchange: AllGather | None,
    ) -> None:
        self.host = host
        self.disk = disk
        self.spiller = None if disk is None else Spiller(disk)
        self.max_parked = max_parked
        self.declaration: Declaration | None = None
        self.engine_nbytes = 0
        self.ranks = Ranks(exchange)
        self.moves = MoveStats()
        self._table = table

    def __bool__(self) -> bool:
        """Whether there is a tier at all."""
        return self.host is not None or self.disk is not None

    def figures(self) -> dict[str, int]:
        """Bytes in each tier, of these what sessions have spilled, and what is and was read ahead."""
        return {
            "host_parked_nbytes": 0 if self.host is None else self.host.nbytes,
            **(dict.fromkeys(FIGURES, 0) if self.disk is None else self.disk.figures()),
            "spilled_nbytes": 0 if self.spiller is None else self.spiller.nbytes,
        }

    @property
    def on_host(self) -> frozenset[str]:
        """Names of the values that the model keeps in host memory itself."""
        return host_fields(self.declaration)

    @property
    def declared_nbytes(self) -> int | None:
        """What one session counts on the device where ranks must agree; ``None`` where each is as it is."""
        if not self.ranks:
            return None
        return 0 if self.declaration is None else self.declaration.device_nbytes

    def too_small(self) -> Iterator[tuple[str, int, int]]:
        """Tiers that have no room for one session as the model declares it, with what an engine keeps of it.

        Returns:
            For each its setting, its budget, and the bytes that one session takes.
        """
        if self.declaration is None:
            return
        nbytes = self.declaration.device_nbytes + self.engine_nbytes
        for level, tier in ((Level.HOST, self.host), (Level.DISK, self.disk)):
            if tier is not None and tier.budget < tier.charge(nbytes):
                yield _SETTINGS[level], tier.budget, tier.charge(nbytes)

    def takes(
        self, entry: Entry, refused: Exception, *, gone: Sequence[Entry] = (), swap: Parked | None = None
    ) -> bool:
        """Whether a session that was refused would be parked now. Lock held.

        Args:
            entry: The session's, on the device.
            refused: What refused it.
            gone: Those who would not be there any more.
            swap: As for ``Offloader.offload()``.
        """
        parked = self._table.parked - (swap is not None) - sum(each.parked for each in gone)
        if entry.session.staging or parked >= self.max_parked:
            return False
        reasons: list[BaseException] = [refused]
        while (cause := reasons[-1].__cause__) is not None:
            reasons.append(cause)
        full = [each for each in reasons if isinstance(each, TierFullError)]
        if full:
            return any(each.wanted <= self._room(Level(each.tier), gone, swap) for each in full)
        if isinstance(refused, TierFaultError):
            return refused.why.startswith(_NO_SPACE)
        # They were too many, or the machine has no memory: what others gave back may be enough.
        return not isinstance(refused, NotWritableError)

    def _room(self, level: Level, gone: Sequence[Entry], swap: Parked | None) -> int:
        """Bytes that are left in a tier without some sessions."""
        tier = self.host if level is Level.HOST else self.disk
        assert tier is not None, "it has refused somebody"
        there = [parked for entry in gone if (parked := entry.gone_to) is not None and parked.level is level]
        if self.declared_nbytes is not None:
            count = self._count(level, swap) - len(there)
            return tier.budget - count * tier.charge(self.declared_nbytes + self.engine_nbytes)
        back = sum(parked.nbytes for parked in there) + overdraft_of(swap, level)
        if isinstance(tier, HostTier):
            live = self._table.accounts.host_nbytes(without=[entry.session.serial for entry in gone])
            return tier.room(live) + back
        assert self.spiller is not None, "there is a disk"
        return tier.room + back + sum(self.spiller.nbytes_of(entry.session.key) for entry in gone)

    def _live_nbytes(self) -> int:
        with self._table.lock:
            return self._table.accounts.host_nbytes()

    def _count(self, level: Level, swap: Parked | None) -> int:
        count = len(self._table.host_lru) if level is Level.HOST else self._table.on_disk
        return count - (swap is not None and swap.level is level)

    def _agree(self, level: Level, tier: HostTier | DiskTier, swap: Parked | None) -> None:
        """Refuse by declared sizes what every rank would refuse."""
        declared = self.declared_nbytes
        if declared is None:
            return
        wanted = tier.charge(declared + self.engine_nbytes)
        room = tier.budget - self._count(level, swap) * wanted
        if wanted > room:
            raise TierFullError(level.value, wanted=wanted, room=room, setting=_SETTINGS[level])

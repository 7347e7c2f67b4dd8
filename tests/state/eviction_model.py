"""Who is where and who is lost, as plain lists: sessions of one size, tiers that hold so many of them.

Everything is counted in sessions, and nothing ever fails; see ``test_eviction_machine.py``.
"""

from dataclasses import dataclass, field


class RefusedError(Exception):
    """A step that did not begin; its argument says how."""


@dataclass(kw_only=True)
class Model:
    """What the manager's users may rely on.

    Args:
        cap: Sessions on the device.
        budget: Idle ones on the device, ``None``: any.
        hard: Whether the device has no more than that.
        host: How many host memory holds, ``None``: there is none.
        disk: How many the disk holds, ``None``: there is none.
        strict: ``on_lost: error``.
        most: Of the parked ones.
        places: Of the engine's pool, ``None``: there is none.
    """

    cap: int
    budget: int | None
    hard: bool
    host: int | None
    disk: int | None
    strict: bool
    most: int
    places: int | None
    used: list = field(default_factory=list)  # every session, by its last use
    place: dict = field(default_factory=dict)
    leases: dict = field(default_factory=dict)
    stale: set = field(default_factory=set)
    mourned: set = field(default_factory=set)
    lost: list = field(default_factory=list)  # (key, whether it was stale), in their order

    @property
    def tiered(self):
        return self.host is not None or self.disk is not None

    @property
    def loses_nobody(self):
        return self.strict or self.disk is not None

    def at(self, place):
        return [key for key in self.used if self.place[key] == place]

    @property
    def idle(self):
        return [key for key in self.at("device") if not self.leases.get(key)]

    @property
    def parked(self):
        return len(self.used) - len(self.at("device"))

    def step(self, key):
        """A forward, with the runner's look for its session before it where there is a pool."""
        if self.places is not None:
            self.prepare(key)
        self.begin(key)
        self.end(key)
        self.enforce()

    def prepare(self, key):
        there = key in self.place
        if not there:
            self.refuse_the_lost(key)
        parked = there and self.place[key] != "device"
        if not parked and not self.reserve_kv_slot(key) and self.loses_nobody:
            raise RefusedError("no room")
        if parked or not there:
            self.begin(key)
            self.end(key)

    def begin(self, key):
        self.stale.discard(key)
        if key not in self.place:
            self.refuse_the_lost(key)
            paid = False
            while self.over_capacity(paid):
                paid = self.make_room() or paid
            self.used.append(key)
        elif self.place[key] != "device" and not self.reserve_kv_slot(key):
            raise RefusedError("stays parked")
        self.place[key] = "device"
        self.leases[key] = self.leases.get(key, 0) + 1

    def end(self, key):
        self.leases[key] -= 1
        if not self.leases[key]:
            self.used.remove(key)
            self.used.append(key)

    def forget(self, key):
        self.used.remove(key)
        del self.place[key]
        self.stale.discard(key)

    def refuse_the_lost(self, key):
        if self.strict and key in self.mourned:
            raise RefusedError("lost")

    def excess(self, *, coming=0, without=(), least=0):
        if self.budget is None:
            return 0
        count = len([key for key in self.idle if key not in without])
        if coming and self.hard:
            count, least = count + coming, 1
        return max(0, count - max(self.budget, least))

    def over_capacity(self, paid):
        if not self.idle:
            return False
        if len(self.at("device")) >= self.cap:
            return True
        return self.tiered and (self.hard or not paid) and self.excess(coming=1) > 0

    def make_room(self):
        asked = []
        while self.tiered and (self.excess(coming=1) or len(self.at("device")) + 1 > self.cap):
            key = next((key for key in self.idle if key not in asked), None)
            if key is None:
                break
            if self.down(key):
                return False
            asked.append(key)
        before = self.excess(coming=1)

        def met(gone):
            if set(self.idle) <= set(gone):
                return True
            over = self.excess(coming=1, without=gone)
            enough = not self.tiered or not over or (over < before and not self.hard)
            return enough and len([key for key in self.at("device") if key not in gone]) < self.cap

        if self.lose(met, asked):
            return True
        if self.loses_nobody:
            raise RefusedError("no room")
        return False

    def reserve_kv_slot(self, key):
        """Whether the session has a place in the pool now."""

        def has(gone=()):
            there = [each for each in self.at("device") if each not in gone]
            return self.places is None or key in there or len(there) < self.places

        if not self.tiered:
            return True
        swap = key if key in self.place else None
        asked = []
        while not has():
            other = next((each for each in self.idle if each not in asked), None)
            if other is None:
                break
            if not self.down(other, swap):
                asked.append(other)
        self.lose(has, asked, but=key, swap=swap)
        return has()

    def enforce(self):
        asked = []
        while self.tiered and (self.excess() or len(self.at("device")) > self.cap):
            key = next((key for key in self.idle if key not in asked), None)
            if key is None:
                break
            if not self.down(key):
                asked.append(key)
        if asked and self.hard:
            self.lose(lambda gone: not self.excess(without=gone, least=1), asked, but=[None, *self.idle][-1])

    def down(self, key, swap=None):
        """Park a session; whether there was room. The one that comes up in its place lends its own."""
        place = self.place
        if self.parked - (swap is not None) >= self.most:
            return False
        while self.host is not None:
            if len([each for each in self.at("host") if each != swap]) < self.host:
                place[key] = "host"
                return True
            others = [each for each in self.at("host") if each != swap]
            if self.disk is None or (others and self.full(swap)):
                return False
            if not others:
                break
            place[others[0]] = "disk"
        if self.full(swap):
            return False
        place[key] = "disk"
        return True

    def full(self, swap=None):
        return len([key for key in self.at("disk") if key != swap]) >= self.disk

    def lose(self, met, asked, *, but=None, swap=None):
        """Lose as many of the oldest as make room, or none; whether anybody was lost."""
        lost = False
        while not met(()):
            there = [key for key in self.used if not self.leases.get(key) and key != but]
            if self.loses_nobody:
                there = [key for key in there if key in self.stale]
            if not there or not (lost or self.would_do(met, asked, there, swap)):
                break
            self.lost.append((there[0], there[0] in self.stale))
            self.mourned.add(there[0])
            self.forget(there[0])
            lost = True
            for key in [key for key in asked if key in self.idle]:
                if not met(()) and self.down(key, swap):
                    asked.remove(key)
        return lost

    def would_do(self, met, asked, there, swap):
        """Whether there would be room without all of these, with those parked for whom there is room then."""
        parked = [key for key in there if self.place[key] != "device"]
        room = self.parked - len(parked) - (swap is not None) < self.most and bool(parked)
        return met([*there, *(key for key in asked if key not in there and room)])

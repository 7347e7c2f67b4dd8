"""Who watches a manager knows its listing, row by row, whatever is done to sessions and whatever fails."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test
from profiles import sized
from test_room_machine import RoomMachine
from test_room_machine import quiet as _quiet  # noqa: F401 - a fixture of this file too
from tiered import begin, manager_of

from vllm_omni_session_state.base.ids import redacted_id
from vllm_omni_session_state.manager.rows import in_order
from vllm_omni_session_state.manager.table import Table
from vllm_omni_session_state.offload.disk_tier import DiskTier


class Copy:
    """A watcher's copy of a listing."""

    def __init__(self, manager):
        self.manager = manager
        self.rows, self.told, self.ended, self.right = {}, 0, 0, True
        manager.watch.begin(self.notice, lambda: None)
        self.update()

    def notice(self, ended):
        self.told += 1
        self.ended += ended

    def update(self):
        """Take what has changed; returns the keys."""
        changed = self.manager.watch.changed_rows()
        for key, row in changed.items():
            if row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = row
        self.right = self.right and self.rows == self.manager.watch.rows()
        return changed.keys()

    def before(self, act):
        """``act``, with a look of another thread right before it."""

        def acting(*args, **kwargs):
            self.update()
            return act(*args, **kwargs)

        return acting


def in_all(nbytes, *more):
    """Bytes by device of all of these together."""
    found = {}
    for each in (nbytes, *more):
        for device, count in each.items():
            found[device] = found.get(device, 0) + count
    return found


class WatchMachine(RoomMachine):
    """All that the room's machine does, with a watcher that looks in the middle of moves and of ends too."""

    copy = None

    def watch(self):
        self.copy = Copy(self.manager)
        for tier in self.tiers:
            tier.put, tier.get = self.copy.before(tier.put), self.copy.before(tier.get)
        table = self.manager._table
        table.end_lease = self.copy.before(table.end_lease)

    @invariant()
    def the_copy_is_the_listing(self):
        if self.copy is None:
            self.watch()
        told = self.copy.told
        changed = self.copy.update()
        assert self.copy.right
        assert not changed or told, "it was told that something has changed"
        self.copy.told = 0
        listed = {entry.session: entry for entry in self.manager.listing()}
        assert {row.session for row in self.copy.rows.values()} == listed.keys()
        for row in self.copy.rows.values():
            entry = listed[row.session]
            assert (row.place, row.used) == (entry.place, entry.used)
            if not row.used:
                assert row.nbytes == in_all(entry.nbytes, entry.parked_nbytes)


TestWatchMachine = WatchMachine.TestCase
TestWatchMachine.settings = sized(1000, stateful_step_count=30)


def test_rows_are_in_the_order_of_use_and_have_all_bytes(tmp_path):
    manager = manager_of(
        DiskTier(tmp_path / "disk", budget=1 << 20), host=2 * 1024 + 4 * 650 - 600, device=1 << 20
    )
    begin(manager, "a", "b", "c", "d")
    with manager.lease("b"):
        pass
    for key in "cad":  # there is room in host memory for two of them
        manager.park(key)
    with manager.lease("b"):
        rows = in_order(manager.watch.rows().values())
        assert [(row.session, row.place, row.used) for row in rows] == [
            (redacted_id("a"), "host", False),
            (redacted_id("c"), "disk", False),
            (redacted_id("d"), "host", False),
            (redacted_id("b"), "device", True),
        ]
    nbytes = {row.session: row.nbytes for row in rows}
    assert nbytes[redacted_id("c")] == {"disk": manager.stats()["disk_nbytes"]}
    assert nbytes[redacted_id("a")]["cpu"] == 1024 + 640
    manager.drop_all()
    manager.offloader.disk.close()


def test_a_use_that_ends_is_told_of_as_such_and_others_are_not():
    manager = manager_of(None, host=1 << 20)
    copy = Copy(manager)
    with manager.lease("a") as session:
        session.attrs["x"] = torch.zeros(1)
        assert copy.ended == 0
    assert copy.ended == 1
    with pytest.raises(ZeroDivisionError), manager.lease("a"):
        raise ZeroDivisionError
    assert copy.ended == 2, "all ranks see it end"
    manager.park("a")
    manager.drop_session("a")
    assert copy.ended == 2


def test_while_nobody_watches_nothing_is_noted():
    manager = manager_of(None, host=1 << 20)
    begin(manager, "a", "b")
    assert manager._table.changed is None
    copy = Copy(manager)
    assert len(copy.rows) == 2
    manager.watch.end()
    manager.drop_session("a")
    assert manager._table.changed is None


FEW = settings(
    max_examples=100,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize(
    "forgets",
    ["transition", "use", "lend", "end_lease", "lose", "remove"],
)
def test_a_change_that_is_not_noted_is_missed(forgets, monkeypatch, capsys):
    """The machine can fail: each of the places that note a change is needed."""
    method, note = getattr(Table, forgets), Table.note

    def forgetful(self, *args, **kwargs):
        monkeypatch.setattr(Table, "note", lambda *_: None)
        try:
            return method(self, *args, **kwargs)
        finally:
            monkeypatch.setattr(Table, "note", note)

    monkeypatch.setattr(Table, forgets, forgetful)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(WatchMachine, settings=FEW)

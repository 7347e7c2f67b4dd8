"""Who is lost to a new session, who is refused, and what an operator is told of it; case by case."""

import logging

import pytest
import torch
from profiles import count
from test_pool import Places

from vllm_omni_session_state import SessionStateManager
from vllm_omni_session_state.base import settings
from vllm_omni_session_state.base.errors import CannotParkError, NoRoomError, SessionStateLostError
from vllm_omni_session_state.base.log import forget_said
from vllm_omni_session_state.offload.disk_tier import DiskTier
from vllm_omni_session_state.offload.host_tier import HostTier
from vllm_omni_session_state.omni.worker import budgets
from vllm_omni_session_state.state.session import Declaration

SIZE = 1024
ROBOTS = ("robot-A", "robot-B", "robot-C")


@pytest.fixture(autouse=True)
def quiet(caplog):
    """What is said once is said anew in each test."""
    forget_said()
    caplog.set_level(logging.WARNING, logger="vllm_omni.session_state")


@pytest.fixture
def disk(tmp_path):
    """A disk that has room for three sessions."""
    tier = DiskTier(tmp_path / "parked", budget=3 * SIZE + 2000)
    yield tier
    tier.close()


def manager_of(**bounds):
    return SessionStateManager(**{"device_budget": SIZE, **bounds})


def step(manager, key, *, size=SIZE):
    """One step, as vLLM-Omni takes it; how many the session has had."""
    manager.prepare(key)
    with manager.lease(key) as session:
        session.attrs.setdefault("x", torch.zeros(size, dtype=torch.uint8))
        session.attrs["steps"] = session.attrs.get("steps", 0) + 1
        steps = session.attrs["steps"]
    manager.check()
    return steps


def abandon(manager, number):
    names = [f"abandoned-{each}" for each in range(number)]
    for name in names:
        step(manager, name)
    return names


def losses(manager):
    return {name: n for name, n in manager.stats().items() if name.startswith("lost:")}


def said(caplog, words):
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


@pytest.mark.parametrize("abandoned", [0, 1, 4, 9])
def test_living_sessions_go_on_whatever_abandoned_ones_fill_host_memory(abandoned):
    """Room for one on the device and three in host memory: three robots by turns, ten rounds."""
    manager = manager_of(tier=HostTier(budget=3 * SIZE))
    abandon(manager, abandoned)
    lost = losses(manager)
    for round_ in range(1, 11):
        assert [step(manager, robot) for robot in ROBOTS] == [round_] * 3
    assert set(lost) | set(losses(manager)) <= {"lost:tier_full"}
    assert losses(manager).get("lost:tier_full", 0) <= max(0, abandoned - 1)


def test_a_newcomer_of_ten_bytes_costs_one_session_and_that_is_the_one_unused_for_longest():
    manager = manager_of(tier=HostTier(budget=6 * SIZE), device_budget=4 * SIZE)
    names = [f"s{number}" for number in range(10)]
    for name in names:
        step(manager, name)
    manager.capacity.device_budget = SIZE
    step(manager, "s9")
    assert losses(manager) == {}
    step(manager, "new", size=10)
    assert losses(manager) == {"lost:tier_full": 1}
    assert sorted(manager.keys()) == ["new", *names[1:]]
    assert manager.peek("s6").parked, "it has the room of the one that is lost"


def test_the_age_of_a_parked_session_is_that_of_its_last_use_and_not_of_its_park():
    manager = manager_of(tier=HostTier(budget=2 * SIZE), device_budget=None)
    for name in "abc":
        step(manager, name)
    manager.park("b")
    manager.park("a")
    manager.capacity.device_budget = 0
    step(manager, "c")
    step(manager, "d")
    assert sorted(manager.keys()) == ["b", "c", "d"]
    step(manager, "e")
    assert sorted(manager.keys()) == ["c", "d", "e"]


def test_who_was_refused_stands_where_it_stood():
    manager = manager_of(tier=HostTier(budget=SIZE), device_budget=None)
    for name in "abc":
        step(manager, name)
    manager.park("a")
    manager.capacity.device_budget = SIZE
    for _ in range(3):
        step(manager, "c")  # after each of them both are asked, and host memory has no room
        with pytest.raises(CannotParkError):
            manager.park("b")
        assert list(manager._table.order) == ["b", "c"]
    step(manager, "d")
    assert sorted(manager.keys()) == ["b", "c", "d"]
    assert manager.peek("b").parked


def test_a_session_that_is_too_large_for_host_memory_goes_in_its_turn_and_no_younger_one_before_it():
    manager = manager_of(tier=HostTier(budget=2 * SIZE), device_budget=None, max_sessions=2)
    step(manager, "large", size=3 * SIZE)
    step(manager, "b")
    step(manager, "c")
    assert manager.peek("b").parked, "it fits"
    step(manager, "d")
    assert manager.peek("c").parked
    step(manager, "e")
    assert sorted(manager.keys()) == ["b", "c", "d", "e"]


def test_as_many_are_lost_as_a_larger_session_needs_in_host_memory_and_no_more():
    manager = manager_of(tier=HostTier(budget=4 * SIZE), device_budget=None, max_sessions=1)
    for name in "abcd":
        step(manager, name)
    step(manager, "large", size=2 * SIZE)
    assert losses(manager) == {}
    step(manager, "e")
    assert sorted(manager.keys()) == ["c", "d", "e", "large"]
    assert losses(manager) == {"lost:tier_full": 2}


@pytest.mark.parametrize("on_lost", ["warn", "error"])
def test_where_as_many_are_parked_as_may_be_it_is_the_same(on_lost):
    manager = manager_of(tier=HostTier(budget=1 << 20), device_budget=None, max_sessions=1, max_parked=2)
    manager.capacity.eviction.on_lost = on_lost
    for name in "abc":
        step(manager, name)
    if on_lost == "error":
        with pytest.raises(NoRoomError, match=r"2 sessions are parked \(max_parked\)"):
            step(manager, "d")
        manager.mark_stale("b")
        step(manager, "d")
        assert sorted(manager.keys()) == ["a", "c", "d"]
    else:
        step(manager, "d")
        assert sorted(manager.keys()) == ["b", "c", "d"]


def test_a_place_in_the_pool_costs_an_abandoned_session_and_no_living_one():
    manager = manager_of(tier=HostTier(budget=3 * SIZE), device_budget=None)
    manager.capacity.pool = Places(manager, 3)
    abandon(manager, 6)
    for round_ in range(1, 6):
        assert [step(manager, robot) for robot in ROBOTS] == [round_] * 3
    assert losses(manager) == {"lost:tier_full": 3}


def test_where_everybody_in_the_pool_is_in_use_nobody_is_lost_for_a_place():
    manager = manager_of(tier=HostTier(budget=SIZE), device_budget=None)
    manager.capacity.pool = Places(manager, 1)
    step(manager, "a")
    step(manager, "b")
    with manager.lease("b"):
        assert manager.capacity.reserve_kv_slot("c") is not None
    assert sorted(manager.keys()) == ["a", "b"]
    manager.check()


def test_a_disk_that_is_full_of_abandoned_sessions_refuses_and_says_how_many_and_what_would_let_them_go(
    disk, caplog
):
    manager = manager_of(disk=disk)
    abandon(manager, 5)
    for robot in ROBOTS:
        with pytest.raises(NoRoomError) as refusal:
            step(manager, robot)
        assert "the disk tier has " in str(refusal.value)
        assert (
            "raise disk.budget. 3 sessions lie parked, the longest unused for less than two minutes; "
            in str(refusal.value)
        )
        assert "idle_drop_s would let those go that nobody has stepped for so long" in str(refusal.value)
    assert len(said(caplog, "no room for a new session")) == 1, "once a minute"
    assert losses(manager) == {}
    assert len(manager) == 5


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "less than two minutes"), (130, "2 minutes"), (7300, "2 hours"), (400_000, "5 days")],
)
def test_the_age_of_the_oldest_parked_session_is_told(disk, seconds, words):
    manager = manager_of(disk=disk)
    abandon(manager, 5)
    manager._table.entries["abandoned-0"].used_at -= seconds
    with pytest.raises(NoRoomError, match=f"the longest unused for {words};"):
        step(manager, "robot")


def test_the_warning_comes_again_after_a_minute(disk, caplog, monkeypatch):
    from vllm_omni_session_state.base import log

    manager = manager_of(disk=disk)
    abandon(manager, 5)
    now = [log.time.monotonic()]
    monkeypatch.setattr(log.time, "monotonic", lambda: now[0])
    for seconds, lines in ((0, 1), (59, 1), (2, 2)):
        now[0] += seconds
        with pytest.raises(NoRoomError):
            step(manager, "robot")
        assert len(said(caplog, "no room for a new session")) == lines


def test_what_the_setting_does_is_told_where_it_does_nothing(disk):
    manager = manager_of(disk=disk, idle_drop_s=60)
    abandon(manager, 5)
    with pytest.raises(
        NoRoomError, match="idle_drop_s=60 lets none of them go: no API server tells the time"
    ):
        step(manager, "robot")
    manager.capacity.eviction.clock = True
    with pytest.raises(NoRoomError, match="idle_drop_s=60 lets none of them go yet"):
        step(manager, "robot")


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_marked_sessions_go_when_room_is_wanted_the_oldest_first_and_nobody_else(disk, tier, caplog):
    tiers = {"disk": disk} if tier == "disk" else {"tier": HostTier(budget=3 * SIZE)}
    manager = manager_of(**tiers, on_lost="error" if tier == "host" else "warn")
    names = abandon(manager, 5)
    for name in (names[2], names[1]):
        assert manager.mark_stale(name)
    assert len(manager) == 5, "no room was wanted"
    assert [step(manager, name) for name in names[3:]] == [2, 2]
    assert len(manager) == 5, "these are there"
    step(manager, "robot-0")
    assert sorted(manager.keys()) == [names[0], *names[2:], "robot-0"]
    assert losses(manager) == {"lost:stale": 1}
    assert len(said(caplog, "is lost (stale)")) == 1
    step(manager, "robot-1")
    with pytest.raises(NoRoomError):
        step(manager, "robot-2")
    assert losses(manager) == {"lost:stale": 2}
    assert [step(manager, name) for name in (names[0], *names[3:])] == [2, 3, 3]
    assert [step(manager, name) for name in ("robot-0", "robot-1")] == [2, 2]


def test_a_use_unmarks(disk):
    manager = manager_of(disk=disk)
    names = abandon(manager, 5)
    for name in names:
        assert manager.mark_stale(name)
    for name in names[:3]:
        step(manager, name)
    step(manager, "robot")
    assert sorted(manager.keys()) == [*names[:3], names[4], "robot"]
    step(manager, "another")
    with pytest.raises(NoRoomError):
        step(manager, "one too many")
    assert sorted(manager.keys()) == [*names[:3], "another", "robot"]


def test_a_session_in_use_is_not_marked_nor_one_that_is_not_there(disk):
    manager = manager_of(disk=disk)
    with manager.lease("a"):
        assert not manager.mark_stale("a")
    assert not manager.mark_stale("b")
    assert manager.mark_stale("a")
    with pytest.raises(TypeError):
        manager.mark_stale(3)


def test_marked_sessions_stay_where_letting_them_go_would_make_no_room():
    manager = manager_of(tier=HostTier(budget=2 * SIZE), device_budget=None, max_sessions=2, on_lost="error")
    step(manager, "small")
    manager.park("small")
    for name in ("large", "larger"):
        step(manager, name, size=3 * SIZE)
    manager.mark_stale("small")
    with pytest.raises(NoRoomError):
        step(manager, "robot")
    assert losses(manager) == {}
    manager.mark_stale("large")
    step(manager, "robot")
    assert losses(manager) == {"lost:stale": 2}, "the one on the device makes room, the other one is older"


def test_a_client_whose_stale_session_went_is_told_with_error_and_costs_nobody():
    manager = manager_of(tier=HostTier(budget=SIZE), max_sessions=1, on_lost="error")
    manager.capacity.pool = Places(manager, 1)
    for name in "ab":
        step(manager, name)
        manager.mark_stale(name)
    step(manager, "c")
    with pytest.raises(SessionStateLostError, match=r"was lost \(stale\)"):
        step(manager, "a")
    assert sorted(manager.keys()) == ["b", "c"]


@pytest.mark.parametrize("on_lost", ["warn", "error"])
@pytest.mark.parametrize("budget", [0, 2 * SIZE])
def test_a_device_that_has_no_more_than_its_budget_never_holds_more(on_lost, budget):
    """Each session holds as much as its model declares; where nobody may be lost a newcomer is refused."""
    manager = manager_of(
        tier=HostTier(budget=2 * SIZE),
        device_budget=budget,
        on_lost=on_lost,
        declaration=Declaration(device_nbytes=SIZE, host_fields=frozenset()),
    )
    manager.capacity.fix_device_budget()
    allowed, refusals = max(budget, SIZE), 0
    for number in range(12):
        try:
            step(manager, f"s{number}")
        except NoRoomError:
            refusals += 1
        assert manager._table.accounts.idle_nbytes() <= allowed
    assert refusals == (12 - len(manager) if on_lost == "error" else 0)
    assert len(manager) == 2 + allowed // SIZE
    for key in manager.keys():  # noqa: SIM118 - a manager is no mapping
        assert step(manager, key) == 2, "those that are there go on"
        assert manager._table.accounts.idle_nbytes() <= allowed


def test_where_sessions_grow_beyond_what_the_tiers_hold_the_device_still_has_no_more():
    manager = manager_of(
        tier=HostTier(budget=3 * SIZE),
        device_budget=2 * SIZE,
        declaration=Declaration(device_nbytes=SIZE, host_fields=frozenset()),
    )
    manager.capacity.fix_device_budget()
    for number in range(8):
        step(manager, f"s{number}", size=SIZE // 2)
    for key in reversed(manager.keys()):
        with manager.lease(key) as session:
            session.attrs["x"] = torch.zeros(SIZE, dtype=torch.uint8)
        manager.check()
        assert manager._table.accounts.idle_nbytes() <= 2 * SIZE
        assert key in manager, "who has just stepped stays"


def test_a_tier_that_has_no_room_for_one_session_is_a_complaint_at_start(caplog, tmp_path):
    options = {
        "device_budget": "1MiB",
        "host_budget": "512KiB",
        "disk": {"path": str(tmp_path), "budget": "1MiB"},
    }
    resolved, complaints = settings.resolve(True, {}, options=options)
    assert complaints == ()
    bounds, ignored = budgets.bounds_of(resolved, several_ranks=False)
    assert ignored == ()
    disk, why = budgets.disk_tier(bounds, keep=False)
    assert not why
    manager = SessionStateManager(device_budget=bounds.device, tier=HostTier(budget=bounds.host), disk=disk)
    budgets.say(budgets.too_small(manager))
    assert caplog.records == [], "nothing is declared"
    for device, kv, lines in ((1 << 19, 0, 0), (1 << 19, 1, 1), (1 << 20, 1, 2)):
        manager.declaration = Declaration(device_nbytes=device, host_fields=frozenset())
        manager.offloader.engine_nbytes = kv
        for _ in range(2):
            budgets.say(budgets.too_small(manager))
        assert len(caplog.records) == lines
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition(" has room for no session")[0] for text in texts] == [
        "host_budget=524288",
        "disk.budget=1048576",
    ]
    assert "declares 524289 bytes" in texts[0]
    disk.close()


def test_rounds_of_robots_over_ever_more_abandoned_sessions_lose_none_that_lives():
    manager = manager_of(tier=HostTier(budget=5 * SIZE), device_budget=2 * SIZE)
    for round_ in range(1, count(400) + 1):
        abandon_one = f"abandoned-{round_}"
        step(manager, abandon_one)
        assert [step(manager, robot) for robot in ROBOTS] == [round_] * 3
    assert len(manager) <= 8

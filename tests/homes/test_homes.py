"""One thing after the other about the homes of sessions: who goes where, who is lost, who is asked for."""

import logging

import pytest

from vllm_omni_session_state.base.errors import NoRoomError, SessionStateLostError
from vllm_omni_session_state.base.ids import display_id
from vllm_omni_session_state.omni.replicas.homes import SLICE, Homes


class Table:
    """Homes over named clients, in slots; steps are over unless they are held."""

    def __init__(self, *, slots=2, strict=False, most=100):
        self.clients = {slot: object() for slot in range(slots)}
        self.all = dict(self.clients)
        self.running = {}
        self.homes = Homes(strict=strict, under_way=self.running.__contains__, most=most)
        self.requests = 0

    def step(self, key, *, reset=False, hold=False):
        self.requests += 1
        request = f"r{self.requests}"
        slot = self.homes.place(
            key, request, self.clients, lambda slot: list(self.running.values()).count(slot), reset=reset
        )
        if hold:
            self.running[request] = slot
        self.homes.check()
        return slot

    def answer(self, key, *, found=False, lost=False, oldest=False):
        """Its home is asked, and says this of it."""
        self.homes.doubt(key)
        for asking in self.homes.to_ask(self.clients, oldest=oldest).values():
            self.homes.heard(asking, [found] * len(asking), [lost] * len(asking))
        self.homes.check()


def test_a_new_session_goes_where_the_fewest_are_then_where_the_fewest_steps_run_then_to_the_first():
    table = Table(slots=3)
    assert table.step("a") == 0
    assert table.step("b", hold=True) == 1
    assert table.step("c") == 2
    table.homes.forget("c")
    assert table.step("d") == 2  # the fewest sessions
    assert table.step("e", hold=True) == 0  # among the same number, no step runs there, nor at 2: the first
    table.homes.forget("e")
    table.homes.forget("a")
    table.homes.forget("b")
    table.homes.forget("d")
    assert table.step("f") == 2  # a step still runs at 0 and at 1


def test_fewer_sessions_count_before_fewer_steps():
    table = Table()
    table.step("a")  # at 0
    table.step("b", hold=True)  # at 1
    table.step("c")  # at 0
    assert table.step("d", hold=True) == 1


def test_a_session_stays_where_it_is_whatever_comes():
    table = Table(slots=3)
    homes = {key: table.step(key) for key in "abcdef"}
    for _ in range(3):
        assert {key: table.step(key, reset=key in "ab") for key in "fbadec"} == homes


def test_the_slot_of_a_dead_replica_is_not_its_successor(caplog):
    table = Table()
    table.step("a")
    table.clients[0] = object()
    assert table.step("a") == 0
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"session {display_id('a')} is lost (replica): it was on replica 0, which is gone" in line
    assert "starts over" in line
    assert table.homes.lost == {0: 1}
    table.step("a")
    assert table.homes.lost == {0: 1}  # said once


@pytest.mark.parametrize("way", ["reset", "close"])
def test_steps_of_a_lost_session_fail_until_its_client_knows_where_that_is_asked_for(way, caplog):
    table = Table(strict=True)
    assert table.step("a") == 0
    del table.clients[0]
    for _ in range(3):
        with pytest.raises(SessionStateLostError, match=r"was lost \(replica\); reset or close it"):
            table.step("a")
    if way == "close":
        table.homes.forget("a")
    assert table.step("a", reset=way == "reset") == 1
    assert table.step("a") == 1
    assert table.homes.lost == {0: 1}
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "its steps fail until it is reset, closed or begun anew" in line


def test_a_reset_of_a_lost_session_counts_it_and_goes_on():
    table = Table(strict=True)
    table.step("a")
    del table.clients[0]
    assert table.step("a", reset=True) == 1
    assert table.homes.lost == {0: 1}
    assert not table.homes.is_lost("a")


def test_who_ends_after_its_replica_died_is_not_lost():
    table = Table()
    table.step("a")
    del table.clients[0]
    table.homes.forget("a")
    assert table.step("a") == 1
    assert not table.homes.lost


@pytest.mark.parametrize("lost", [False, True])
def test_a_session_that_its_worker_let_go_of_is_forgotten_once_that_is_known(lost):
    table = Table()
    table.step("a")
    assert table.step("b") == 1
    table.answer("a", lost=lost)
    assert "a" not in table.homes
    assert table.step("c") == 0  # it counts for nothing


def test_where_losses_make_steps_fail_a_lost_one_keeps_its_home_and_counts_for_nothing():
    table = Table(strict=True)
    table.step("a")
    table.step("b")
    table.answer("a", lost=True)
    assert table.homes.loads()[id(table.all[0])] == 0
    assert not table.homes.to_ask(table.clients, oldest=True).get(0)
    assert table.step("c") == 0
    assert table.step("a") == 0  # whose worker has that step fail
    assert table.homes.loads()[id(table.all[0])] == 1
    assert table.step("a", reset=True) == 0
    assert table.homes.loads()[id(table.all[0])] == 2
    table.answer("b")  # it was ended, not lost
    assert "b" not in table.homes
    table.answer("c", lost=True)
    table.answer("c", found=True)  # it began anew
    assert table.homes.loads()[id(table.all[0])] == 2
    table.answer("c", lost=True)
    table.answer("c")  # and was ended: a doubt of one that counts for nothing is settled too
    assert "c" not in table.homes
    assert not table.homes.doubts


def test_an_answer_that_a_step_overtook_is_not_heard():
    table = Table()
    table.step("a")
    asked = table.homes.to_ask(table.clients, oldest=True)
    table.step("a")
    table.homes.heard(asked[0], [False], [False])
    assert "a" in table.homes
    asked = table.homes.to_ask(table.clients, oldest=True)
    table.homes.forget("a")
    table.step("a")  # the first step of another life
    table.homes.heard(asked[0], [False], [False])
    assert "a" in table.homes


def test_nobody_is_asked_for_a_session_with_a_step_under_way():
    table = Table()
    table.step("a", hold=True)
    assert table.homes.to_ask(table.clients, oldest=True) == {}
    assert table.homes.quiet(["a", "nobody"]) == {}
    table.running.clear()
    assert list(table.homes.to_ask(table.clients, oldest=True)[0]) == ["a"]


def test_the_oldest_are_asked_for_first_and_so_many_at_once():
    table = Table(slots=1, most=2 * SLICE)
    keys = [f"s{number}" for number in range(SLICE + 10)]
    for key in keys:
        table.step(key)
    (asked,) = table.homes.to_ask(table.clients, oldest=True).values()
    assert list(asked) == keys[:SLICE]
    table.homes.heard(asked, [True] * SLICE, [False] * SLICE)
    (asked,) = table.homes.to_ask(table.clients, oldest=True).values()
    assert list(asked)[:10] == keys[SLICE:]


def test_a_doubt_is_settled_by_one_answer_and_by_the_death_of_who_would_answer():
    table = Table()
    table.step("a")
    table.step("b")
    table.answer("a", found=True)
    assert not table.homes.doubts
    assert "a" in table.homes
    table.homes.doubt("b")
    table.homes.doubt("nobody")
    assert table.homes.to_ask({0: table.all[0]}, oldest=False) == {}
    assert not table.homes.doubts


def test_a_full_table_refuses_a_new_session_and_nobody_is_guessed_away():
    table = Table(most=3)
    homes = {key: table.step(key) for key in "abc"}
    with pytest.raises(NoRoomError, match="3 sessions have a replica"):
        table.step("d")
    assert {key: table.step(key) for key in "abc"} == homes
    table.answer("b")
    table.step("d")


def test_what_is_known_to_be_gone_makes_room_and_is_counted(caplog):
    table = Table(slots=3, strict=True, most=4)
    for key in "abcd":
        table.step(key)  # at 0, 1, 2, 0
    del table.clients[1]
    table.answer("c", lost=True)
    table.homes.shed(table.clients)
    assert sorted(key for key in "abcd" if key in table.homes) == ["a", "d"]
    assert table.homes.lost == {1: 1}
    with pytest.raises(SessionStateLostError):
        table.step("b")


@pytest.mark.parametrize("strict", [False, True])
def test_a_step_that_the_host_sent_elsewhere_is_where_its_session_is(strict):
    table = Table(strict=strict)
    table.homes.went("a", "r", 1, table.all[1])
    assert table.step("a") == 1
    table.homes.went("a", "r", 1, table.all[1])
    assert not table.homes.lost
    del table.clients[1]
    table.homes.went("a", "r", 0, table.all[0])
    assert table.homes.lost == {1: 1}
    assert not table.homes.is_lost("a")  # its step is on its way
    assert table.step("a") == 0


def test_a_name_is_an_id_or_what_is_shown():
    table = Table()
    table.step("a")
    table.step("b")
    assert table.homes.named("a") == ["a"]
    assert table.homes.named(display_id("b")) == ["b"]
    table.step(display_id("b"))  # whoever calls itself so
    assert table.homes.named(display_id("b")) == ["b", display_id("b")]
    assert table.homes.named("c") == []

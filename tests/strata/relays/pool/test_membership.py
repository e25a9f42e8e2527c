from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.relays.conduct import Standing
from strata.relays.pool.membership import Membership
from strata.relays.pool.options import PoolOptions


class Opinions:
    def __init__(self) -> None:
        self.standings: dict[str, Standing] = {}
        self.scores: dict[str, float] = {}

    def standing(self, url: str) -> Standing:
        return self.standings.get(url, Standing.ACTIVE)

    def score(self, url: str) -> float:
        return self.scores.get(url, 0.5)


def members(urls="abcde", opinions=None, **options) -> Membership:
    opinions = opinions or Opinions()
    settings = PoolOptions(**{"connections": 3} | options)
    return Membership(
        urls, settings, standing=opinions.standing, score=opinions.score, random=random.Random(1).random
    )


def connect_all(it: Membership, now: float) -> list[str]:
    seats = it.seats(now)
    for url in seats:
        it.connected(url)
    return seats


def test_the_first_ones_get_the_seats_and_keep_them():
    opinions = Opinions()
    it = members(opinions=opinions)
    assert connect_all(it, 0) == ["a", "b", "c"]
    opinions.scores = {"d": 0.9, "e": 0.9}
    assert it.seats(1) == ["a", "b", "c"], "a better score elsewhere moves nothing"


@pytest.mark.req("C-272")
def test_one_that_was_not_reached_in_time_has_longer_the_next_time():
    it = members("abcd", connections=2)
    assert it.seats(0) == ["a", "b"]
    assert it.seats(2) == ["c", "d"], "they have not been reached within `replace_after`"
    assert it.seats(4) == ["a", "b"]
    assert it.seats(13.9) == ["a", "b"], "the time of an attempt"
    it.connected("a")
    assert it.seats(14) == ["a", "c"]
    it.disconnected("a", 20)
    assert it.seats(21.9) == ["a", "c"] and it.seats(22) == ["c", "d"], "it was reached meanwhile"


@pytest.mark.req("C-272")
def test_one_that_is_gone_for_a_while_is_replaced_and_has_its_turn_again():
    it = members()
    connect_all(it, 0)
    it.disconnected("b", 10)
    assert it.seats(11.9) == ["a", "b", "c"]
    assert it.seats(12) == ["a", "c", "d"]
    it.connected("d")
    it.disconnected("a", 20)
    assert it.seats(22) == ["c", "d", "e"]
    it.connected("e")
    it.disconnected("c", 30)
    assert it.seats(32) == ["b", "d", "e"], "the first to go is the first to come back"


def test_without_another_it_keeps_its_seat():
    it = members("abc")
    connect_all(it, 0)
    it.disconnected("b", 0)
    assert it.seats(999) == ["a", "b", "c"]


@pytest.mark.req("C-277")
def test_two_missed_pings_in_a_row_cost_the_seat():
    it = members()
    connect_all(it, 0)
    it.ping_missed("a")
    it.ping_answered("a")
    it.ping_missed("a")
    assert "a" in it.seats(1)
    it.ping_missed("a")
    assert it.readers(2, ["a"]) == ["b", "c"]
    assert it.seats(2) == ["b", "c", "d"]


@pytest.mark.req("R-344")
def test_a_blacklisted_relay_is_not_contacted_even_if_there_is_no_other():
    opinions = Opinions()
    it = members("ab", opinions)
    connect_all(it, 0)
    opinions.standings["a"] = Standing.BLACKLISTED
    assert it.targets() == ["b"] and it.readers(2, ["a"]) == ["b"]
    assert it.seats(1) == ["b"]
    opinions.standings["b"] = Standing.BLACKLISTED
    assert it.seats(2) == [] and it.targets() == [] and it.usable() == []


@pytest.mark.req("R-344")
def test_backups_are_used_when_active_ones_fail():
    opinions = Opinions()
    opinions.standings["a"] = Standing.BACKUP
    it = members("abcd", opinions)
    connect_all(it, 0)
    assert it.readers(2, []) == ["b", "c"]
    it.disconnected("b", 1)
    assert it.readers(2, ["b", "c"]) == ["c", "d"]
    it.disconnected("c", 1)
    assert it.seats(9) == ["a", "b", "c", "d"][1:] or "a" in it.seats(9)
    it.connected("a")
    assert "a" in it.targets()


def test_targets_are_the_connected_ones_by_score_then_the_others():
    opinions = Opinions()
    it = members("abc", opinions)
    connect_all(it, 0)
    opinions.scores = {"a": 0.1, "b": 0.2, "c": 0.3}
    assert it.targets() == ["c", "b", "a"]
    it.disconnected("c", 0)
    assert it.targets() == ["b", "a", "c"]
    it.ping_missed("b")
    it.ping_missed("b")
    assert it.targets() == ["a", "b", "c"]


def test_readers_are_kept_while_they_are_of_use():
    opinions = Opinions()
    it = members("abc", opinions)
    connect_all(it, 0)
    assert it.readers(2, []) == ["a", "b"]
    opinions.scores = {"c": 0.9}
    assert set(it.readers(2, ["a", "b"])) == {"a", "b"}


@pytest.mark.req("R-345")
def test_now_and_then_a_relay_not_in_use_is_tried_and_stays_if_it_is_better():
    opinions = Opinions()
    it = members("abcde", opinions, sample_interval=100.0)
    connect_all(it, 0)
    assert it.sample(0) is None
    tried = None
    now = 0.0
    while tried is None:
        now += 10
        tried = it.sample(now)
    assert tried in "de" and 50 <= now <= 150
    assert tried in it.seats(now) and len(it.seats(now)) == 4, "beside the others"
    it.connected(tried)
    opinions.scores = {tried: 0.9, "b": 0.1}
    assert len(it.seats(now + 59)) == 4
    assert set(it.seats(now + 60)) == {"a", "c", tried}


@pytest.mark.req("R-345", "C-279")
def test_trying_can_be_switched_off_and_needs_someone_to_try():
    assert members(sample_interval=None).sample(1e9) is None
    it = members("abc", sample_interval=1.0)
    connect_all(it, 0)
    it.sample(0)
    assert it.sample(100) is None


@pytest.mark.req("R-345", "C-272")
def test_one_that_cannot_be_reached_when_it_is_tried_leaves_no_seat_behind():
    it = members("abcde", sample_interval=100.0)
    connect_all(it, 0)
    assert it.sample(0) is None
    tried = it.sample(151)
    seats = it.seats(151)
    assert tried in seats and len(seats) == 4
    assert it.seats(155) == seats, "it has its minute"
    assert it.seats(211) == ["a", "b", "c"]


@pytest.mark.req("R-345")
def test_trials_that_are_over_at_once_leave_no_seat_behind():
    it = members("abcde", sample_interval=20.0)
    connect_all(it, 0)
    tried = [it.sample(float(now)) for now in range(61)]
    assert set("de") < set(tried)
    assert it.seats(121) == ["a", "b", "c"], "nobody looked meanwhile, as where the machine slept"


events = st.lists(
    st.tuples(
        st.sampled_from("abcdef"), st.sampled_from(["up", "down", "miss", "pong", "bad", "good", "slow"])
    )
)


@given(events, st.integers(1, 4))
def test_whatever_happens_seats_are_few_usable_and_as_many_as_there_can_be(some, connections):
    opinions = Opinions()
    it = members("abcdef", opinions, connections=connections, copies=1, readers=1, sample_interval=None)
    for step, (url, what) in enumerate(some):
        now = step * 1.5
        match what:
            case "up" if url in it.seats(now):
                it.connected(url)
            case "down":
                it.disconnected(url, now)
            case "miss":
                it.ping_missed(url)
            case "pong":
                it.ping_answered(url)
            case "bad":
                opinions.standings[url] = Standing.BLACKLISTED
            case "good":
                opinions.standings[url] = Standing.ACTIVE
            case "slow":
                opinions.standings[url] = Standing.BACKUP
        seats = it.seats(now)
        assert len(seats) == len(set(seats)) == min(connections, len(it.usable()))
        assert set(seats) <= set(it.usable())
        readers = it.readers(2, seats)
        assert set(readers) <= {url for url in seats if it.is_connected(url)}
        assert set(it.targets()) == set(seats)


@given(events, st.integers(1, 4))
def test_whatever_happens_no_more_seats_are_taken_beside_the_others_than_trials_run(some, connections):
    opinions = Opinions()
    it = members("abcdef", opinions, connections=connections, copies=1, readers=1, sample_interval=20.0)
    trials: list[float] = []
    for step, (url, what) in enumerate(some):
        now = step * 7.0
        match what:
            case "up" if url in it.seats(now):
                it.connected(url)
            case "down":
                it.disconnected(url, now)
            case "miss":
                it.ping_missed(url)
            case "bad":
                opinions.standings[url] = Standing.BLACKLISTED
            case "good":
                opinions.standings[url] = Standing.ACTIVE
        if it.sample(now) is not None:
            trials.append(now)
        running = sum(now - began < 60 for began in trials)
        assert min(connections, len(it.usable())) <= len(it.seats(now)) <= connections + running

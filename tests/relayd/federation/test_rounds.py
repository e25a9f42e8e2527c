"""When a peer is compared with, in virtual time."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from relayd.federation.rounds import Rounds

DAY = 86_400.0


def middle() -> float:
    return 0.5


def next_due(rounds: Rounds, now: float, step: float = 1.0, most: float = 3 * DAY) -> float:
    """The first second at which a comparison is due."""
    at = now
    while not rounds.is_due(at):
        at += step
        assert at < now + most, "never"
    return at


def test_the_last_day_each_interval_and_everything_once_a_day():
    now, rounds = 1000.0, Rounds(300.0, 1000.0, middle)
    whole, recent = list[float](), list[float]()
    while now < 3 * DAY:
        now = next_due(rounds, now)
        (whole if rounds.begin(now) else recent).append(now)
        rounds.ended(now + 5, 5, is_whole=True)
    assert whole[0] == 2950, "due at 2800, and no sooner than an interval after the one before"
    assert [round(b - a) for a, b in pairwise(whole)] == [DAY, DAY]
    every = sorted([*whole, *recent])
    assert every[0] == 1150
    assert {round(b - a) for a, b in pairwise(every[1:])} == {300}


def test_relays_do_not_compare_in_step():
    times = []
    for chance in (0.0, 1.0):
        rounds = Rounds(400.0, 0.0, partial(float, chance))
        first = next_due(rounds, 0.0)
        rounds.begin(first, whole=True)
        rounds.ended(first, 0, is_whole=True)
        times.append((first, next_due(rounds, first) - first))
    assert times == [(0.0, 300.0), (400.0, 500.0)]


def test_a_doubt_has_everything_compared_at_once_and_not_again_and_again():
    rounds = Rounds(300.0, 0.0, middle)
    rounds.doubt(10.0)
    assert rounds.is_due(10.0)
    assert rounds.begin(10.0) is True
    # A peer whose log begins anew each second is compared once in each interval, and no more.
    due = []
    now = 11.0
    while now < 2000:
        rounds.doubt(now)
        if rounds.is_due(now):
            assert rounds.begin(now)
            due.append(now)
            rounds.ended(now, 0, is_whole=True)
        now += 1
    assert due == [310.0, 610.0, 910.0, 1210.0, 1510.0, 1810.0]


def test_a_peer_that_never_comes_to_an_end_is_asked_half_as_often_each_time():
    rounds = Rounds(300.0, 0.0, middle)
    now, waits = next_due(rounds, 0.0), []
    for _ in range(12):
        rounds.begin(now)
        rounds.ended(now, 0, is_whole=False)
        rounds.doubt(now + 1)  # whatever happens meanwhile
        following = next_due(rounds, now)
        waits.append(following - now)
        now = following
    assert waits == [*(300.0 * 2**n for n in range(9)), DAY, DAY, DAY]
    assert rounds.begin(now) is True
    rounds.ended(now, 0, is_whole=True)
    assert next_due(rounds, now) == now + 300


def test_what_brings_packets_goes_on_and_a_long_one_lets_others_have_their_turn():
    rounds = Rounds(300.0, 0.0, middle)
    now = next_due(rounds, 0.0)
    for _ in range(5):
        rounds.begin(now)
        rounds.ended(now + 10, 10, is_whole=False, has_brought=True)
        following = next_due(rounds, now)
        assert following == now + 310
        now = following
    rounds.begin(now)
    rounds.ended(now + 3600, 3600, is_whole=True)
    assert next_due(rounds, now + 3600) == now + 7200


def test_packets_that_are_requested_in_vain_are_fewer_each_time_and_comparisons_as_frequent():
    rounds = Rounds(300.0, 0.0, middle, most_refused=5000)
    now, most = next_due(rounds, 0.0), []
    for _ in range(7):
        most.append(rounds.most_refused)
        rounds.begin(now)
        rounds.ended(now, 0, is_whole=True, has_unfetched=True)
        assert next_due(rounds, now) == now + 300
        now += 300
    assert most == [5000, 2500, 1250, 625, 312, 200, 200]
    rounds.ended(now, 0, is_whole=True, has_unfetched=True, has_brought=True)
    assert rounds.most_refused == 5000, "it was not all in vain"


def test_without_an_interval_nothing_is_due_by_itself():
    rounds = Rounds(0, 0.0, middle)
    rounds.doubt(5.0)
    assert not rounds.is_due(1e12)
    assert rounds.begin(5.0) is False
    assert rounds.begin(5.0, whole=True) is True
    rounds.ended(6.0, 1.0, is_whole=False)
    assert not rounds.is_due(1e12)

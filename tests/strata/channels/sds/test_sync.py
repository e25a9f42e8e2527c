"""The pace of syncs: a model of N participants, each with its own delays, in virtual time."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from strata.channels.sds import Participant, SdsMessage, SendSync
from strata.channels.sds.sync import Pace

from benches.channel_crowd import acknowledging, idle_syncs

T = 1_760_000_000_000
MINUTE = 60_000


@pytest.mark.slow
@pytest.mark.req("C-129", "C-133", "C-135")
@pytest.mark.parametrize(("people", "minutes"), [(1, 60), (2, 60), (10, 60), (100, 20), (1_000, 10)])
def test_idle_traffic_does_not_grow_with_the_number_of_people(people: int, minutes: int) -> None:
    """At most one sync in ten seconds, once the participants have learned how many they are."""
    syncs = idle_syncs(people, minutes, seed=people)
    settled = [at for at in syncs if at > 5 * MINUTE]
    seconds = (minutes - 5) * 60
    assert seconds / 40 < len(settled) < seconds / 10
    assert max(b - a for a, b in itertools.pairwise(settled)) < 3 * MINUTE
    assert len(syncs) - len(settled) < 100 + 5 * 60 / 10, "nor do they begin with a storm"


@pytest.mark.req("C-133", "C-136")
@pytest.mark.parametrize("people", [2, 10, 100, 1_000])
def test_a_few_acknowledge_for_all(people: int) -> None:
    """Up to 0.3 s from one participant to another, with a grace period of 2.5 s."""
    counts = [acknowledging(people, seed) for seed in range(20)]
    assert sum(counts) / len(counts) < 6
    assert max(counts) < 20


def test_a_room_that_empties_is_not_silent_for_long() -> None:
    pace = Pace(30_000, random.Random(1).random)
    for number in range(70):
        pace.heard(str(number), number * 100, 0)
        pace.passed(number * 100, needless=True)
    scale = pace.scale()
    assert scale > 300
    delays = [min(pace.delay(1.0), pace.delay(1.0)) for _ in range(200)]
    assert max(delays) < 30_000 * (2 + math.log2(scale))
    # After a long silence everybody knows that hardly anybody is left.
    pace.heard("the last", 11 * MINUTE, 0)
    pace.passed(11 * MINUTE, needless=True)
    assert pace.scale() == 1


def test_a_newcomer_and_a_lone_participant_sync() -> None:
    bob = Participant("room", "bob", now_ms=T, random=lambda: 0.5, receipts=True)
    hello = SdsMessage("alice", "hello", "room", T, content=b"x", receipts=b"").encode()
    bob.receive(hello, T)
    at = [T]
    while len(at) < 6:
        now = math.ceil(bob.get_timer())
        bob.handle_timer(now)
        at += [now for event in bob.events() if isinstance(event, SendSync)]
    assert at[1] - at[0] <= 2_500
    assert all(later - earlier <= 30_000 for earlier, later in itertools.pairwise(at[1:]))


def test_whoever_syncs_alone_gives_way_to_the_others() -> None:
    """A participant that has started anew knows nobody, and would otherwise always be first."""
    newcomer, old = Pace(30_000, lambda: 0.5), Pace(30_000, lambda: 0.5)
    for number in range(20):
        old.heard(str(number), 0, 0)
    for number in range(60):
        now = number * 15_000
        newcomer.passed(now, needless=True, own=True)
        old.heard("newcomer", now, now)
        old.passed(now, needless=True)
    assert newcomer.scale() > old.scale()


def test_copies_and_what_a_store_has_do_not_look_like_a_crowd() -> None:
    bob = Participant("room", "bob", now_ms=T, random=lambda: 0.5, receipts=True)
    bob.receive(SdsMessage("alice", "hello", "room", T, content=b"x", receipts=b"").encode(), T)
    for number in range(300):
        # Four copies of each sync of the last hour, read at once.
        lamport = T - 12_000 * (number // 4)
        bob.receive(SdsMessage("alice", "s", "room", lamport, receipts=b"").encode(), T + number)
    assert bob.get_timer() <= T + 30_300


def test_those_who_were_heard_are_forgotten_and_bounded() -> None:
    pace = Pace(30_000, lambda: 0.5)
    for number in range(10_000):
        pace.heard(str(number), 0, 0)
    assert pace.scale() == 1_024
    pace.heard("late", 11 * MINUTE, 0)
    assert pace.scale() == 1

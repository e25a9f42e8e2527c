from __future__ import annotations

import math
from typing import Any

import pytest
from strata.relays.pool.presence import Answer, Lookup, PresenceWatch, Resend

from tests.support.simulated_relays import packet

ALL = ["a", "b", "c"]


def watch(**changes: float) -> PresenceWatch:
    settings: dict[str, Any] = {"copies": 2, "delay": 2.0, "attempts": 3, "capacity": 100}
    return PresenceWatch(**settings | changes)


def ids(lookup: Lookup) -> set[str]:
    return {p.packet_id for p in lookup.packets}


@pytest.mark.req("C-274")
def test_present_on_enough_relays_ends_the_check():
    it = watch()
    it.claimed(packet(1), "a", 0)
    it.claimed(packet(1), "b", 0)
    assert it.due(1.9, ALL) == [] and it.get_timer() == 2
    lookups = it.due(2, ALL)
    assert {lookup.url for lookup in lookups} == {"a", "b"}
    assert it.due(2, ALL) == [], "asked once"
    for lookup in lookups:
        it.answered(lookup, ids(lookup), Answer.DENIAL)
    assert it.settle(3, ALL) == [] and len(it) == 0
    assert it.get_timer() == math.inf


@pytest.mark.req("C-274")
def test_a_relay_that_forgot_gets_it_again_and_so_does_another_until_it_is_given_up():
    it = watch()
    it.claimed(packet(1), "a", 0)
    sent = []
    for _ in range(3):
        now = it.get_timer()
        for lookup in it.due(now, ALL):
            it.answered(lookup, set(), Answer.DENIAL)
        resends = it.settle(now, ALL)
        sent.append([(r.url, now) for r in resends])
        for resend in resends:
            it.claimed(resend.packet, resend.url, now)
    assert sent == [
        [("b", 2), ("c", 2), ("a", 2)],
        [("a", 6), ("b", 6), ("c", 6)],
        [],
    ]
    assert (len(it), it.given_up) == (0, 1)


def test_an_absent_relay_is_believed_until_it_can_be_asked():
    it = watch()
    it.claimed(packet(1), "a", 0)
    it.claimed(packet(1), "b", 0)
    (lookup,) = it.due(2, ["b"])
    it.answered(lookup, ids(lookup), Answer.DENIAL)
    assert it.settle(2, ALL) == [], "its word stands"
    assert it.get_timer() == 6
    (lookup,) = it.due(6, ALL)
    it.answered(lookup, ids(lookup), Answer.DENIAL)
    it.settle(6, ALL)
    assert len(it) == 0 and it.given_up == it.thin == 0


def test_half_an_answer_counts_for_what_it_names():
    it = watch(copies=1)
    for number in (1, 2):
        it.claimed(packet(number), "a", 0)
    (lookup,) = it.due(2, ALL)
    it.answered(lookup, {packet(1).packet_id}, Answer.BROKEN)
    assert it.settle(2, ALL) == []
    assert len(it) == 1, "the other one is neither there nor denied"


def test_a_packet_that_a_relay_holds_back_is_looked_for_apart():
    it = watch(copies=1)
    it.claimed(packet(1), "a", 0, excused=True)
    it.claimed(packet(2), "a", 0)
    assert {(lookup.excused, *ids(lookup)) for lookup in it.due(2, ALL)} == {
        (True, packet(1).packet_id),
        (False, packet(2).packet_id),
    }
    it.claimed(packet(1), "a", 3)
    assert not any(it._watched[packet(n).packet_id].excused for n in (1, 2)), "by now it has taken effect"


def test_silence_is_enough_to_send_a_packet_again():
    it = watch(copies=1)
    it.claimed(packet(1), "a", 0)
    (lookup,) = it.due(2, ALL)
    it.answered(lookup, set(), Answer.SILENCE)
    assert Resend("a", packet(1)) in it.settle(2, ALL)


def test_requests_are_batched_and_the_watch_is_bounded():
    it = watch(capacity=200)
    for number in range(200):
        it.claimed(packet(number), "a", 0)
    assert it.is_full
    assert [len(lookup.packets) for lookup in it.due(2, ALL)] == [64, 64, 64, 8]


def test_with_fewer_relays_than_copies_all_there_are_is_enough():
    it = watch()
    it.claimed(packet(1), "a", 0)
    (lookup,) = it.due(2, ["a"])
    it.answered(lookup, ids(lookup), Answer.DENIAL)
    assert it.settle(2, ["a"]) == [] and len(it) == 0


def test_it_is_sent_to_another_relay_when_one_copy_never_came():
    it = watch()
    it.claimed(packet(1), "a", 0)
    (lookup,) = it.due(2, ALL)
    it.answered(lookup, ids(lookup), Answer.DENIAL)
    assert it.settle(2, ALL) == [Resend("b", packet(1))]


@pytest.mark.req("C-274")
def test_a_round_in_which_no_relay_could_be_asked_ends_all_the_same():
    it = watch(attempts=2)
    it.claimed(packet(1), "a", 0)
    assert it.due(2, ["b"]) == [], "the relay that said OK is away"
    assert it.settle(2.001, ["b"]) == [Resend("b", packet(1))], "time went on between the two calls"
    assert it.due(7, ["b"]) == [] and it.settle(7.001, ["b"]) == [] and it.given_up == 1


@pytest.mark.req("C-274")
def test_a_packet_for_which_nobody_could_be_asked_goes_to_others_before_it_is_given_up():
    it = watch(copies=2)
    for url in ("a", "b"):
        it.claimed(packet(1), url, 0)
    away = ["c", "a", "b"]  # their seats are kept
    assert it.due(2, ["c"]) == [] and it.settle(2, away) == [], "their word stands"
    assert it.due(6, ["c"]) == [] and it.settle(6, away) == [Resend("c", packet(1))]
    it.claimed(packet(1), "c", 6)
    (lookup,) = it.due(14, ["c"])
    it.answered(lookup, ids(lookup), Answer.DENIAL)
    assert it.settle(14, away) == [] and (len(it), it.given_up, it.thin) == (0, 0, 1)


@pytest.mark.req("C-274")
def test_time_without_any_relay_is_no_round():
    it = watch(attempts=2, copies=1)
    it.claimed(packet(1), "a", 0)
    for _ in range(100):
        now = it.get_timer()
        assert it.due(now, []) == [] and it.settle(now, ["a", "b"]) == []
    assert (len(it), it.given_up, now) == (1, 0, 200)
    (lookup,) = it.due(it.get_timer(), ["a"])
    it.answered(lookup, ids(lookup), Answer.DENIAL)
    assert it.settle(203, ["a"]) == [] and len(it) == it.given_up == 0

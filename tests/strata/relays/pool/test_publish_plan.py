from __future__ import annotations

import math

import pytest
from strata.protocol.errors import ConnectionFailed, RequestRefused, StrataError
from strata.relays.connection.values import Published
from strata.relays.pool.publish_plan import PublishPlan
from strata.relays.pool.values import Copy

TARGETS = ["a", "b", "c", "d"]


def plan(copies: int = 2, confirmations: int = 1) -> PublishPlan:
    return PublishPlan(
        "id", copies=copies, confirmations=confirmations, retry_interval=1, retry_cap=30, deadline=100
    )


def refusal_of(it: PublishPlan) -> StrataError | None:
    return it.refusal


def confirmed(it: PublishPlan) -> bool:
    return it.is_confirmed


def ok(received_at: int | None = 5, duplicate: bool = False) -> Published:
    return Published("id", received_at, duplicate)


@pytest.mark.req("C-270")
def test_it_goes_to_the_best_relays_at_once_and_is_done_when_they_have_it():
    it = plan()
    assert it.start(TARGETS, 0) == ["a", "b"]
    it.stored("b", ok(7))
    assert it.is_confirmed
    assert it.result().copies == {"a": Copy.PENDING, "b": Copy.STORED}
    it.stored("a", ok(5))
    assert it.result().received_at == 5, "R-106: the earliest"
    assert it.get_timer() == math.inf


@pytest.mark.req("C-272")
def test_a_failed_copy_goes_elsewhere_at_once():
    it = plan()
    it.start(TARGETS, 0)
    assert it.failed("a", ConnectionFailed("down"), TARGETS) == ["c"]
    assert it.failed("c", ConnectionFailed("down"), TARGETS) == ["d"]
    assert it.failed("d", ConnectionFailed("down"), TARGETS) == [], "the timer tries again"


@pytest.mark.req("C-273")
def test_silence_recruits_one_relay_more_after_1_s_then_after_longer_and_longer():
    it = plan()
    it.start(TARGETS, 0)
    assert it.get_timer() == 1
    assert it.handle_timer(TARGETS, 0.9) == []
    assert it.handle_timer(TARGETS, 1) == ["c"]
    assert it.get_timer() == 3
    assert it.handle_timer(TARGETS, 3) == ["d"]
    waits, now = [], 3.0
    for _ in range(6):
        waits.append(it.get_timer() - now)
        now = it.get_timer()
        assert it.handle_timer(TARGETS, now) == [], "every relay has it under way"
    assert waits == [4, 8, 16, 30, 30, 30]


def test_who_failed_without_a_final_word_is_tried_again_who_refused_is_not():
    it = plan()
    it.start(["a", "b"], 0)
    it.failed("a", ConnectionFailed("down"), ["a", "b"])
    it.failed("b", RequestRefused("policy_rejected", "no"), ["a", "b"])
    assert refusal_of(it) is None, "one of them has not refused"
    assert it.handle_timer(["a", "b"], 1) == ["a"]
    assert isinstance(it.last_error, RequestRefused), "what a relay said tells more than an absence"
    it.failed("a", RequestRefused("invalid_schema", "no"), ["a", "b"])
    refusal = refusal_of(it)
    assert isinstance(refusal, RequestRefused) and refusal.code == "invalid_schema"


def test_confirmations_may_be_more_than_one():
    it = plan(copies=3, confirmations=2)
    it.start(TARGETS, 0)
    it.stored("a", ok(duplicate=True))
    assert not confirmed(it)
    it.stored("b", ok())
    assert confirmed(it) and not it.result().duplicate
    assert it.get_timer() == 1, "the third copy is still wanted"

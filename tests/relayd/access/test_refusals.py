"""The budget of refusals of one connection."""

from __future__ import annotations

from strata.protocol.errors import ErrorCode

from relayd.access.refusals import Refusals

SCHEMA = ErrorCode.INVALID_SCHEMA


def test_a_burst_is_taken_and_one_more_is_one_too_many():
    refusals = Refusals(5, 60)
    assert [refusals.is_one_too_many(SCHEMA, 100.0) for _ in range(6)] == [False] * 5 + [True]


def test_who_errs_now_and_then_errs_for_ever():
    refusals = Refusals(5, 60)
    assert not any(refusals.is_one_too_many(SCHEMA, 100.0 + 12 * n) for n in range(1000))


def test_faults_of_the_relay_and_no_limit_count_for_nothing():
    refusals = Refusals(1, 60)
    assert not any(refusals.is_one_too_many(ErrorCode.INTERNAL_ERROR, 0.0) for _ in range(10))
    assert not any(Refusals(0, 60).is_one_too_many(SCHEMA, 0.0) for _ in range(1000))

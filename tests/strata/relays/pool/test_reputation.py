from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.relays.pool.reputation import (
    WINDOW_SECONDS,
    Aspect,
    Evidence,
    Observation,
    Reputation,
    Suspicion,
)
from strata.relays.pool.values import Standing

T = 1_760_000_000.0
R = "ws://r"
HOUR = 3600


def seen(*observations: Observation) -> Reputation:
    reputation = Reputation()
    for observation in observations:
        reputation.record(observation)
    return reputation


def saw(kind: Aspect, good: int = 0, bad: int = 0, value: float | None = None, at: float = T) -> Observation:
    return Observation(R, at, kind, good, bad, value)


observations = st.builds(
    Observation,
    st.just(R),
    st.floats(T - 2 * WINDOW_SECONDS, T),
    st.sampled_from(Aspect),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.none() | st.floats(0, 1e9),
)


@given(st.lists(observations, max_size=30))
def test_a_score_is_between_0_and_1_whatever_was_seen(some):
    score = seen(*some).score(R, T)
    assert 0 <= score.value <= 1 and 0 <= score.integrity <= 1
    assert score.uptime is None or 0 <= score.uptime <= 1


@pytest.mark.req("R-341")
def test_the_formula_is_the_documented_one():
    score = seen(
        saw(Aspect.CONNECT, 6, 2),
        saw(Aspect.PING, 2, 0, 0.1),
        saw(Aspect.PUBLISH, 2, 0, 0.3),
        saw(Aspect.HISTORY, 100, 0, 256 * 1024.0),
        saw(Aspect.VALIDITY, 60, 2),
        saw(Aspect.PRESENCE, 10, 1),
        saw(Aspect.CONSISTENCY, 10, 2),
    ).score(R, T)
    integrity = (80 / 120) * (40 / (40 + 20 + 10))
    assert score.integrity == pytest.approx(integrity)
    assert score.latency == pytest.approx(0.2)
    assert score.throughput == pytest.approx(256 * 1024)
    assert score.uptime == pytest.approx(0.8)
    assert score.value == pytest.approx(integrity * (10 / 12) * (0.7 / 1.4 + 0.3 * 0.5))


@pytest.mark.req("R-341")
@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (saw(Aspect.PING, 5, 0, 0.05), saw(Aspect.PING, 5, 0, 1.0)),
        (saw(Aspect.HISTORY, 99, 0, 1e6), saw(Aspect.HISTORY, 99, 0, 1e4)),
        (saw(Aspect.CONNECT, 9, 1), saw(Aspect.CONNECT, 5, 5)),
        (saw(Aspect.VALIDITY, 100, 0), saw(Aspect.VALIDITY, 100, 3)),
        (saw(Aspect.PRESENCE, 10, 0), saw(Aspect.PRESENCE, 10, 1)),
        (saw(Aspect.CONSISTENCY, 10, 0), saw(Aspect.CONSISTENCY, 10, 1)),
    ],
)
def test_each_metric_counts(better, worse):
    assert seen(better).score(R, T).value > seen(worse).score(R, T).value


@pytest.mark.req("R-341")
def test_what_is_older_than_seven_days_is_forgotten():
    reputation = seen(
        saw(Aspect.CONNECT, bad=40, at=T - WINDOW_SECONDS - 2 * HOUR),
        saw(Aspect.CONNECT, 1),
    )
    assert reputation.score(R, T).uptime == 1.0
    recent = seen(saw(Aspect.CONNECT, bad=1, at=T - WINDOW_SECONDS + HOUR), saw(Aspect.CONNECT, 1))
    assert recent.score(R, T).uptime == 0.5


@pytest.mark.req("R-343", "R-342")
def test_a_denial_weighs_more_than_a_gap():
    denied, missing = (
        seen(saw(kind, bad=1)).score(R, T).value for kind in (Aspect.PRESENCE, Aspect.CONSISTENCY)
    )
    assert denied < missing


@pytest.mark.req("R-344")
def test_a_slow_relay_becomes_a_backup_and_comes_back_only_when_clearly_better():
    reputation = seen(saw(Aspect.PING, 10, 0, 3.0))
    assert reputation.judge(R, T) is Standing.BACKUP
    reputation.record(saw(Aspect.PING, 20, 0, 0.8))  # 1.5 s on average: between the two thresholds
    assert 0.30 <= reputation.score(R, T).value < 0.40
    assert reputation.judge(R, T) is None
    reputation.record(saw(Aspect.PING, 200, 0, 0.1))
    assert reputation.judge(R, T) is Standing.ACTIVE
    assert reputation.judge(R, T) is None


def sentence_end(reputation: Reputation) -> float:
    """Until when the relay is blacklisted."""
    until = reputation.saved(R).blacklisted_until
    assert until is not None
    return until


@pytest.mark.req("R-344", "R-342")
def test_integrity_failures_blacklist_and_a_sentence_ends():
    reputation = seen(saw(Aspect.VALIDITY, 10, 4))
    assert reputation.judge(R, T) is Standing.BLACKLISTED
    assert reputation.saved(R).blacklisted_until == T + HOUR
    assert reputation.judge(R, T + HOUR - 1) is None
    assert reputation.judge(R, T + HOUR) is Standing.BACKUP, "with its offences forgotten"
    assert reputation.judge(R, T + HOUR) is Standing.ACTIVE, "and a chance"
    reputation.record(saw(Aspect.PRESENCE, 0, 3, at=T + HOUR))
    assert reputation.judge(R, T + HOUR) is Standing.BLACKLISTED
    assert reputation.saved(R).blacklisted_until == T + 5 * HOUR, "each further sentence is longer"
    for _ in range(20):
        until = sentence_end(reputation)
        reputation.judge(R, until)
        reputation.record(saw(Aspect.PRESENCE, 0, 3, at=until))
        assert reputation.judge(R, until) is Standing.BLACKLISTED
        assert sentence_end(reputation) <= until + WINDOW_SECONDS


@pytest.mark.req("R-344")
def test_a_relay_that_never_answers_comes_last_and_is_welcome_again_when_it_does():
    reputation = seen(saw(Aspect.CONNECT, 0, 49))
    assert reputation.judge(R, T) is Standing.BACKUP
    reputation.record(saw(Aspect.CONNECT, 0, 10**6))
    assert reputation.judge(R, T) is None, "silence is no lie"
    back = T + WINDOW_SECONDS + 2 * HOUR
    reputation.record(saw(Aspect.PING, 1, 0, 0.05, at=back))
    assert reputation.judge(R, back) is Standing.ACTIVE
    flaky = seen(saw(Aspect.CONNECT, 50, 50))
    assert flaky.judge(R, T) is not Standing.BLACKLISTED


def of_another(good: int, bad: int, hour: int) -> Observation:
    return Observation("wss://other.example/strata", T + hour * HOUR, Aspect.CONNECT, good, bad)


@pytest.mark.req("R-344")
def test_a_relay_that_is_gone_for_a_day_is_left_alone():
    reputation = Reputation()
    for hour in range(24):
        assert reputation.judge(R, T + hour * HOUR) is not Standing.BLACKLISTED
        reputation.record(saw(Aspect.CONNECT, 0, 3, at=T + hour * HOUR))
        reputation.record(of_another(1, 0, hour))
    now = T + 24 * HOUR
    assert reputation.judge(R, now) is Standing.BLACKLISTED
    assert reputation.judge(R, now + HOUR) is Standing.BACKUP, "after an hour it has another chance"


@pytest.mark.req("R-344")
def test_a_client_without_a_network_leaves_no_relay_alone():
    reputation = Reputation()
    for hour in range(72):
        reputation.record(saw(Aspect.CONNECT, 0, 3, at=T + hour * HOUR))
        reputation.record(of_another(0, 3, hour))
    assert reputation.judge(R, T + 72 * HOUR) is Standing.BACKUP


@pytest.mark.req("R-344")
def test_one_answer_within_the_window_and_a_relay_is_not_gone():
    reputation = seen(saw(Aspect.CONNECT, 1, at=T))
    for hour in range(72):
        reputation.record(saw(Aspect.CONNECT, 0, 3, at=T + hour * HOUR))
        reputation.record(of_another(1, 0, hour))
    assert reputation.judge(R, T + 72 * HOUR) is Standing.BACKUP


@given(st.lists(observations, max_size=30), st.sampled_from(get_args(Suspicion)), st.integers(0, 10**9))
def test_no_suspicion_changes_whether_a_relay_is_blacklisted(some, kind, bad):
    without, added = seen(*some), seen(*some, saw(kind, 0, bad))
    without.judge(R, T)
    added.judge(R, T)
    verdicts = {reputation.standing(R) is Standing.BLACKLISTED for reputation in (without, added)}
    assert len(verdicts) == 1


def test_every_aspect_is_either_evidence_or_suspicion():
    assert sorted([*get_args(Evidence), *get_args(Suspicion)]) == sorted(Aspect)


@given(st.integers(0, 10**7))
def test_an_honest_relay_is_never_blacklisted(good):
    reputation = seen(
        saw(Aspect.VALIDITY, good),
        saw(Aspect.PRESENCE, good),
        saw(Aspect.CONNECT, 1 + good // 9, good),
    )
    reputation.judge(R, T)
    assert reputation.standing(R) is not Standing.BLACKLISTED


@pytest.mark.req("R-340")
def test_relays_are_judged_apart_and_can_be_forgotten():
    reputation = seen(saw(Aspect.VALIDITY, 0, 9))
    reputation.judge(R, T)
    assert reputation.standing("ws://other") is Standing.ACTIVE
    saved = reputation.saved(R)
    reputation.forget(R)
    assert reputation.standing(R) is Standing.ACTIVE
    reputation.restore(R, saved)
    assert reputation.saved(R) == saved and reputation.judge(R, T + 10) is None

"""What one relay has done, and the standing that it has earned."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.relays.conduct import WINDOW_SECONDS, Aspect, Conduct, Evidence, Standing, Suspicion

T = 1_760_000_000.0
HOUR = 3600


Seen = tuple[float, Aspect, int, int, float | None]


def seen(*observations: Seen) -> Conduct:
    conduct = Conduct()
    for observation in observations:
        conduct.record(*observation)
    return conduct


def saw(kind: Aspect, good: int = 0, bad: int = 0, value: float | None = None, at: float = T) -> Seen:
    return at, kind, good, bad, value


observations = st.tuples(
    st.floats(T - 2 * WINDOW_SECONDS, T),
    st.sampled_from(Aspect),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.none() | st.floats(0, 1e9),
)


@given(st.lists(observations, max_size=30))
def test_a_score_is_between_0_and_1_whatever_was_seen(some):
    score = seen(*some).score(T)
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
    ).score(T)
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
    assert seen(better).score(T).value > seen(worse).score(T).value


@pytest.mark.req("R-341")
def test_what_is_older_than_seven_days_is_forgotten():
    conduct = seen(
        saw(Aspect.CONNECT, bad=40, at=T - WINDOW_SECONDS - 2 * HOUR),
        saw(Aspect.CONNECT, 1),
    )
    assert conduct.score(T).uptime == 1.0
    recent = seen(saw(Aspect.CONNECT, bad=1, at=T - WINDOW_SECONDS + HOUR), saw(Aspect.CONNECT, 1))
    assert recent.score(T).uptime == 0.5


@pytest.mark.req("R-343", "R-342")
def test_a_denial_weighs_more_than_a_gap():
    denied, missing = (
        seen(saw(kind, bad=1)).score(T).value for kind in (Aspect.PRESENCE, Aspect.CONSISTENCY)
    )
    assert denied < missing


@pytest.mark.req("R-344")
def test_a_slow_relay_becomes_a_backup_and_comes_back_only_when_clearly_better():
    conduct = seen(saw(Aspect.PING, 10, 0, 3.0))
    assert conduct.judge(T) is Standing.BACKUP
    conduct.record(*saw(Aspect.PING, 20, 0, 0.8))  # 1.5 s on average: between the two thresholds
    assert 0.30 <= conduct.score(T).value < 0.40
    assert conduct.judge(T) is None
    conduct.record(*saw(Aspect.PING, 200, 0, 0.1))
    assert conduct.judge(T) is Standing.ACTIVE
    assert conduct.judge(T) is None


def sentence_end(conduct: Conduct) -> float:
    """Return when the relay's blacklisting ends."""
    until = conduct.saved.blacklisted_until
    assert until is not None
    return until


@pytest.mark.req("R-344", "R-342")
def test_integrity_failures_blacklist_and_a_sentence_ends():
    conduct = seen(saw(Aspect.VALIDITY, 10, 4))
    assert conduct.judge(T) is Standing.BLACKLISTED
    assert conduct.saved.blacklisted_until == T + HOUR
    assert conduct.judge(T + HOUR - 1) is None
    assert conduct.judge(T + HOUR) is Standing.BACKUP, "with its offences forgotten"
    assert conduct.judge(T + HOUR) is Standing.ACTIVE, "and a chance"
    conduct.record(*saw(Aspect.PRESENCE, 0, 3, at=T + HOUR))
    assert conduct.judge(T + HOUR) is Standing.BLACKLISTED
    assert conduct.saved.blacklisted_until == T + 5 * HOUR, "each further sentence is longer"
    for _ in range(20):
        until = sentence_end(conduct)
        conduct.judge(until)
        conduct.record(*saw(Aspect.PRESENCE, 0, 3, at=until))
        assert conduct.judge(until) is Standing.BLACKLISTED
        assert sentence_end(conduct) <= until + WINDOW_SECONDS


@pytest.mark.req("R-344")
def test_a_relay_that_never_answers_comes_last_and_is_welcome_again_when_it_does():
    conduct = seen(saw(Aspect.CONNECT, 0, 49))
    assert conduct.judge(T) is Standing.BACKUP
    conduct.record(*saw(Aspect.CONNECT, 0, 10**6))
    assert conduct.judge(T) is None, "silence is no lie"
    back = T + WINDOW_SECONDS + 2 * HOUR
    conduct.record(*saw(Aspect.PING, 1, 0, 0.05, at=back))
    assert conduct.judge(back) is Standing.ACTIVE
    flaky = seen(saw(Aspect.CONNECT, 50, 50))
    assert flaky.judge(T) is not Standing.BLACKLISTED


@given(st.lists(observations, max_size=30), st.sampled_from(get_args(Suspicion)), st.integers(0, 10**9))
def test_no_suspicion_changes_whether_a_relay_is_blacklisted(some, kind, bad):
    without, added = seen(*some), seen(*some, saw(kind, 0, bad))
    without.judge(T)
    added.judge(T)
    verdicts = {conduct.standing is Standing.BLACKLISTED for conduct in (without, added)}
    assert len(verdicts) == 1


def test_every_aspect_is_either_evidence_or_suspicion():
    assert sorted([*get_args(Evidence), *get_args(Suspicion)]) == sorted(Aspect)


@given(st.integers(0, 10**7))
def test_an_honest_relay_is_never_blacklisted(good):
    conduct = seen(
        saw(Aspect.VALIDITY, good),
        saw(Aspect.PRESENCE, good),
        saw(Aspect.CONNECT, 1 + good // 9, good),
    )
    conduct.judge(T)
    assert conduct.standing is not Standing.BLACKLISTED


def test_a_record_goes_on_from_what_was_kept():
    before = seen(
        saw(Aspect.PING, 5, 1, 0.2), saw(Aspect.VALIDITY, 30, 2), saw(Aspect.CLOCK, 0, 3, at=T - 2 * HOUR)
    )
    before.judge(T)
    after = Conduct()
    after.restore(before.saved, before.counts)
    assert (after.saved, after.score(T), after.offences(T)) == (before.saved, before.score(T), 2)
    assert sorted(after.counts) == sorted(before.counts)


@pytest.mark.req("R-381")
@pytest.mark.parametrize("kind", get_args(Evidence))
def test_the_third_piece_of_evidence_ends_a_stranger_and_a_good_name_has_credit(kind):
    for verified, most in [(0, 2), (5, 2), (1000, 119)]:
        conduct = seen(saw(kind, verified, most))
        conduct.judge(T)
        assert conduct.standing is not Standing.BLACKLISTED
        conduct.record(T, kind, 0, 1)
        assert conduct.judge(T) is Standing.BLACKLISTED


@pytest.mark.req("R-369")
def test_a_false_clock_costs_score_and_nothing_more():
    conduct = seen(saw(Aspect.VALIDITY, 100), saw(Aspect.CLOCK, 0, 10**6))
    assert conduct.score(T).value < 0.01
    assert (conduct.judge(T), conduct.offences(T)) == (Standing.BACKUP, 0)

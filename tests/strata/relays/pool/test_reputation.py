"""Many relays of one client: each is judged by its actions, and a lost one by how the others fared."""

from __future__ import annotations

import pytest
from strata.relays.conduct import Aspect, Standing
from strata.relays.pool.reputation import Observation, Reputation

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


@pytest.mark.req("R-340", "R-344")
def test_offences_whose_sentence_is_served_are_forgotten_by_the_next_session_too():
    offences = saw(Aspect.VALIDITY, 0, 9)
    earlier = seen(offences, saw(Aspect.PING, 1, value=0.1))
    assert earlier.judge(R, T) is Standing.BLACKLISTED
    assert earlier.judge(R, T + HOUR) is Standing.BACKUP
    later = Reputation()
    later.restore(R, earlier.saved(R), [offences, saw(Aspect.PING, 1, value=0.1)])
    assert later.judge(R, T + HOUR + 1) is not Standing.BLACKLISTED
    assert later.score(R, T + HOUR + 1).value == earlier.score(R, T + HOUR + 1).value
    later.record(saw(Aspect.VALIDITY, 0, 9, at=T + HOUR + 2))
    assert later.judge(R, T + HOUR + 2) is Standing.BLACKLISTED
    assert later.saved(R).strikes == 2


@pytest.mark.req("R-344")
def test_a_sentence_goes_on_in_the_next_session():
    offences = saw(Aspect.VALIDITY, 0, 9)
    earlier = seen(offences)
    earlier.judge(R, T)
    later = Reputation()
    later.restore(R, earlier.saved(R), [offences])
    assert later.judge(R, T + HOUR - 1) is None and later.standing(R) is Standing.BLACKLISTED
    assert later.score(R, T).value == earlier.score(R, T).value
    assert later.judge(R, T + HOUR) is Standing.BACKUP and later.saved(R).strikes == 1

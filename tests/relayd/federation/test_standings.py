"""The standing of a peer, from one process to the next."""

from __future__ import annotations

import pytest
from strata.relays.conduct import Aspect

from relayd.federation.standings import JUDGE_SECONDS, KeptConduct, Standings

T = 1_760_000_000.0
HOUR = 3600
NOBODY = KeptConduct(0, 0, 0, None)


def made(kept: KeptConduct = NOBODY, now: float = T) -> Standings:
    standings = Standings()
    standings.take_up(1, kept, now)
    return standings


def forge(standings: Standings, times: int, now: float = T) -> None:
    for _ in range(times):
        standings.note(1, Aspect.VALIDITY, now, 0, 1, None)


def written(standings: Standings, now: float = T) -> KeptConduct:
    kept = standings.to_write(1, now)
    assert kept is not None
    return kept


@pytest.mark.req("R-381")
def test_three_forged_packets_bar_a_peer_and_each_time_for_longer():
    standings = made()
    forge(standings, 2)
    assert not standings.is_barred(1, T)
    forge(standings, 1)
    assert (standings.is_barred(1, T + HOUR - 1), standings.is_barred(1, T + HOUR)) == (True, False)
    ends: list[int] = []
    for _ in range(8):
        since = max([int(T) + HOUR, *ends])
        forge(standings, 3, since)
        ends.append(standings.barred_until(1))
        assert standings.is_barred(1, ends[-1] - 1) and not standings.is_barred(1, ends[-1])
    lengths = [end - since for since, end in zip([int(T) + HOUR, *ends], ends, strict=False)]
    assert lengths == [4 * HOUR, 16 * HOUR, 64 * HOUR, *[7 * 86_400] * 5]


def test_a_record_outlives_the_process_that_made_it():
    standings = made()
    standings.note(1, Aspect.VALIDITY, T, 50, 0, None)
    standings.note(1, Aspect.PING, T, 1, 0, 0.01)
    standings.note(1, Aspect.PRESENCE, T, 0, 1, None)
    kept = written(standings)
    assert (kept.offences, kept.bars, kept.barred_until) == (1, 0, 0)
    assert written(made(kept)) == kept
    forge(standings, 20)
    assert standings.is_barred(1, T)
    kept = written(standings)
    assert (kept.bars, kept.barred_until) == (1, T + HOUR)
    after = made(kept)
    assert after.is_barred(1, T + HOUR - 1) and not after.is_barred(1, T + HOUR)


def test_a_record_of_numbers_alone_goes_on_as_well():
    """Of a program that kept nothing else, and of a newer one that this one cannot read."""
    for conduct in (None, '{"saved": {"standing": "exiled"}}'):
        barred = made(KeptConduct(0, 2, int(T) + 100, conduct))
        assert barred.is_barred(1, T + 99) and not barred.is_barred(1, T + 100)
        forge(barred, 3, T + 100)
        assert barred.barred_until(1) == T + 100 + 16 * HOUR, "the third time"
        offended = made(KeptConduct(2, 0, 0, conduct))
        forge(offended, 1)
        assert offended.is_barred(1, T)


def test_what_is_wrong_is_written_at_once_and_the_rest_now_and_then():
    standings = made()
    written(standings)
    standings.note(1, Aspect.VALIDITY, T, 9, 0, None)
    standings.note(1, Aspect.CONNECT, T, 0, 9, None)
    assert standings.to_write(1, T + JUDGE_SECONDS - 1) is None
    before = standings.score(1)
    written(standings, T + JUDGE_SECONDS)
    after = standings.score(1)
    assert before is not None and after is not None and after.value < before.value
    standings.note(1, Aspect.CLOCK, T + JUDGE_SECONDS, 0, 1, None)
    assert written(standings, T + JUDGE_SECONDS).offences == 0
    forge(standings, 1, T + JUDGE_SECONDS)
    assert written(standings, T + JUDGE_SECONDS).offences == 1
    standings.not_written(1)
    assert written(standings, T + JUDGE_SECONDS).offences == 1


def test_what_is_not_written_yet_is_not_forgotten():
    standings = made()
    standings.take_up(2, NOBODY, T)
    for number in (1, 2):
        assert standings.to_write(number, T) is not None
    forge(standings, 1)
    standings.forget_written()
    assert (standings.knows(1), standings.knows(2)) == (True, False)
    standings.forget(1)
    assert standings.to_write(1, T) is None and not standings.is_barred(1, T)

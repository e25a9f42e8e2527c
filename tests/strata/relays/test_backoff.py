from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.relays.backoff import Backoff, after_retry_after, full_jitter, retry_delay


@pytest.mark.req("R-339")
@given(attempt=st.integers(0, 10_000), draw=st.floats(0, 1, exclude_max=True))
def test_a_wait_is_within_its_bound(attempt, draw):
    delay = full_jitter(attempt, base=0.5, cap=30, random=lambda: draw)
    assert 0 <= delay < min(30, 0.5 * 2 ** min(attempt, 20))


def test_the_bound_doubles_up_to_the_cap_and_begins_again():
    backoff = Backoff(base=1, cap=10, random=lambda: 0.5)
    assert [backoff.next_delay() for _ in range(6)] == [0.5, 1, 2, 4, 5, 5]
    backoff.reset()
    assert backoff.next_delay() == 0.5


@pytest.mark.req("R-338")
def test_a_relay_that_says_when_to_come_back_is_taken_at_its_word_with_jitter():
    source = random.Random(1).random
    delays = {after_retry_after(3, random=source) for _ in range(100)}
    assert min(delays) >= 3 and max(delays) <= 3.6 and len(delays) == 100


def test_a_request_waits_for_what_the_relay_asked_for_and_for_its_own_backoff():
    def wait(retry_after: int | None, drawn: float) -> float:
        return retry_delay(3, retry_after, base=1, cap=30, random=lambda: drawn)

    assert (wait(None, 0.5), wait(2, 0.5), wait(10, 0.5), wait(0, 0.5)) == (4, 4, 11, 4)

"""The budgets hold for any load, and nothing that was queued is lost."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata.channels.persistence import ChannelState, StoredState
from strata.channels.rate_limit import (
    DEFAULT_RATE_LIMIT_CONFIG,
    EphemeralDropReason,
    Priority,
    RateLimitConfig,
    RateLimiter,
    SendQueueFull,
    Transmission,
)

EPOCH = 10_000
START = 1_760_000_000_000  # a whole number of epochs


def limiter(**settings: object) -> RateLimiter:
    return RateLimiter(RateLimitConfig(epoch_size_ms=EPOCH, **settings))  # type: ignore[arg-type]


def drain(limit: RateLimiter, now: int) -> list[str]:
    """Dispatch all that may leave now, and return the ids."""
    found = []
    while (transmission := limit.take(now)) is not None:
        limit.sent(transmission)
        found.append(transmission.message_id)
    return found


def take(limit: RateLimiter, now: int) -> Transmission:
    transmission = limit.take(now)
    assert transmission is not None
    return transmission


@pytest.mark.req("C-220", "C-226")
def test_what_would_exceed_the_limit_waits_for_the_next_epoch() -> None:
    limit = limiter(messages_per_epoch=2)
    for message in ("a", "b", "c"):
        limit.offer("room", [message])
    assert drain(limit, START + 1) == ["a", "b"]
    assert limit.get_timer() == START + EPOCH
    assert drain(limit, START + EPOCH - 1) == []
    assert drain(limit, START + EPOCH) == ["c"]
    assert limit.get_timer() is None


@pytest.mark.req("C-226")
def test_the_budget_is_used_to_the_last_unit() -> None:
    limit = limiter(messages_per_epoch=10)
    for number in range(11):
        limit.offer("room", [str(number)])
    assert len(drain(limit, START)) == 10
    assert drain(limit, START + EPOCH) == ["10"]


@pytest.mark.req("C-220")
def test_disabled_delays_nothing() -> None:
    limit = limiter(enabled=False, messages_per_epoch=1, segments_per_epoch=1)
    limit.offer("room", ["a"])
    limit.offer("room", ["b"])
    limit.offer_again("room", "c", Priority.RETRANSMISSION)
    assert drain(limit, START) == ["a", "b", "c"]
    assert limit.admit_ephemeral(START) is None
    assert limit.utilisation(START) == 0


@pytest.mark.req("C-220", "C-029")
def test_no_limit_known_delays_nothing() -> None:
    limit = RateLimiter()
    for number in range(1000):
        limit.offer("room", [str(number)])
    assert len(drain(limit, START)) == 1000
    config = DEFAULT_RATE_LIMIT_CONFIG
    assert (config.enabled, config.epoch_size_ms, config.messages_per_epoch) == (True, 600_000, None)
    assert (config.segments_per_epoch, config.chunk_accounting) == (None, "first")
    assert config.approach_threshold == 0.9


@pytest.mark.req("C-222")
def test_epochs_are_aligned_to_unix_time() -> None:
    limit = limiter(messages_per_epoch=1)
    limit.offer("room", ["a"])
    limit.offer("room", ["b"])
    assert drain(limit, START + EPOCH - 1) == ["a"]
    assert drain(limit, START + EPOCH) == ["b"]


@pytest.mark.req("C-223")
def test_further_chunks_are_exempt() -> None:
    limit = limiter(messages_per_epoch=1)
    limit.offer("room", ["a0", "a1", "a2", "a3", "a4"])
    limit.offer("room", ["b0", "b1"])
    assert drain(limit, START) == ["a0", "a1", "a2", "a3", "a4"]
    assert drain(limit, START + EPOCH) == ["b0", "b1"]


@pytest.mark.req("C-224")
def test_every_chunk_counts_if_told() -> None:
    limit = limiter(messages_per_epoch=1, chunk_accounting="each")
    limit.offer("room", ["a0", "a1", "a2", "a3", "a4"])
    assert [drain(limit, START + epoch * EPOCH) for epoch in range(5)] == [
        ["a0"],
        ["a1"],
        ["a2"],
        ["a3"],
        ["a4"],
    ]


@pytest.mark.req("C-225")
def test_the_limit_of_the_transport_holds_whatever_the_accounting() -> None:
    limit = limiter(messages_per_epoch=10, segments_per_epoch=3)
    limit.offer("room", ["a0", "a1", "a2", "a3", "a4"])
    assert drain(limit, START) == ["a0", "a1", "a2"]
    assert limit.get_timer() == START + EPOCH
    assert drain(limit, START + EPOCH) == ["a3", "a4"]


@pytest.mark.req("C-225", "C-221")
def test_a_limit_that_a_relay_told_is_kept_in_every_window() -> None:
    limit = limiter()
    limit.learn_limit(3, 1000)
    for number in range(8):
        limit.offer("room", [str(number)])
    assert drain(limit, START) == ["0", "1", "2"]
    assert limit.get_timer() == START + 1000
    assert drain(limit, START + 999) == []
    assert drain(limit, START + 1000) == ["3", "4", "5"]
    limit.learn_limit(100, 1000)  # a looser limit changes nothing
    limit.learn_limit(0, 1000)
    assert drain(limit, START + 1500) == []
    assert drain(limit, START + 2000) == ["6", "7"]


@pytest.mark.req("C-225")
@given(
    gaps=st.lists(st.integers(0, 700), max_size=60),
    most=st.integers(1, 5),
    window=st.integers(1, 1000),
)
def test_no_window_holds_more_than_the_limit(gaps: list[int], most: int, window: int) -> None:
    limit = limiter()
    limit.learn_limit(most, window)
    limit.offer("room", [str(number) for number in range(1000)])
    now, times = START, list[int]()
    for gap in gaps:
        now += gap
        times += [now] * len(drain(limit, now))
    for end in times:
        assert sum(end - window < at <= end for at in times) <= most


@pytest.mark.req("C-069", "C-232")
def test_rate_limited_pauses_and_costs_no_attempt() -> None:
    limit = limiter(messages_per_epoch=2)
    limit.offer("room", ["a0", "a1"])
    limit.offer("room", ["b"])
    first, second = take(limit, START), take(limit, START)
    limit.put_back(second)
    limit.put_back(first)
    limit.pause(START, 3000)
    assert limit.get_timer() == START + 3000
    assert drain(limit, START + 2999) == []
    # In order again, and the message is charged once: there is budget left for b.
    assert drain(limit, START + 3000) == ["a0", "a1", "b"]


def test_a_message_put_back_is_charged_in_the_epoch_it_leaves_in() -> None:
    limit = limiter(messages_per_epoch=1)
    limit.offer("room", ["a"])
    limit.offer("room", ["b"])
    limit.put_back(take(limit, START))
    limit.pause(START, EPOCH)
    assert drain(limit, START + EPOCH) == ["a"]
    assert drain(limit, START + 2 * EPOCH) == ["b"]


@pytest.mark.req("C-232", "C-302")
def test_a_pause_is_bounded_and_applies_without_own_limits_too() -> None:
    limit = limiter(enabled=False, max_pause_ms=5000)
    limit.offer("room", ["a"])
    limit.pause(START, 10**12)
    limit.pause(START, -5)
    assert limit.get_timer() == START + 5000
    assert limit.admit_ephemeral(START) is EphemeralDropReason.REACHED
    assert drain(limit, START + 5000) == ["a"]


@pytest.mark.req("C-227")
def test_the_queue_is_bounded_and_takes_a_message_whole_or_not() -> None:
    limit = limiter(messages_per_epoch=1, max_queued=4)
    limit.offer("room", ["a0", "a1", "a2"])
    with pytest.raises(SendQueueFull) as caught:
        limit.offer("room", ["b0", "b1"])
    assert (caught.value.waiting, caught.value.max_queued) == (3, 4)
    assert "3 of at most 4" in str(caught.value)
    assert limit.queued("room") == 3
    limit.offer("room", ["c"])
    assert drain(limit, START) == ["a0", "a1", "a2"]


@pytest.mark.req("C-082", "C-227")
def test_a_full_lane_hinders_no_other() -> None:
    limit = limiter(messages_per_epoch=2, max_queued=2)
    limit.offer("full", ["a"])
    limit.offer("full", ["b"])
    limit.offer("other", ["c"])
    assert drain(limit, START) == ["a", "c"]


@pytest.mark.req("C-227")
def test_the_queue_survives_a_restart_in_order() -> None:
    state = StoredState()
    before = limiter(messages_per_epoch=1)
    for message in ("a", "b", "c", "d"):
        before.offer("room", [f"{message}0", f"{message}1"])
    for _ in range(2):
        before.sent(take(before, START))
    before.withdraw("room", "c1")
    state.apply(before.changes_to_store("room"))
    before.sent(take(before, START + EPOCH))
    unfinished = take(before, START + EPOCH)
    assert unfinished.message_id == "b1"
    state.apply(before.changes_to_store("room"))

    after = limiter()
    after.restore("room", ChannelState.read(state).queue.values())
    after.offer("room", ["e"])
    assert drain(after, START + EPOCH) == ["b1", "c0", "d0", "d1", "e"]
    state.apply(after.changes_to_store("room"))
    assert state.records == {}


@pytest.mark.req("C-235")
def test_the_count_of_the_epoch_survives_a_restart() -> None:
    state = StoredState()
    before = limiter(messages_per_epoch=3)
    assert before.counts_to_store() == []
    before.offer("room", ["a"])
    before.offer("room", ["b"])
    assert drain(before, START) == ["a", "b"]
    state.apply(before.counts_to_store())
    assert before.counts_to_store() == []

    counted = ChannelState.read(state).epochs["current"]
    config = RateLimitConfig(epoch_size_ms=EPOCH, messages_per_epoch=3)
    for now, sent in ((START + 1, ["c"]), (START + EPOCH, ["c", "d"])):
        after = RateLimiter(config, counted=counted)
        after.offer("room", ["c"])
        after.offer("room", ["d"])
        assert drain(after, now) == sent


@pytest.mark.req("C-228", "C-181", "C-182", "C-229")
@pytest.mark.parametrize(("threshold", "admitted"), [(0.9, 9), (0.5, 5), (1.0, 10), (0.89, 9)])
def test_ephemerals_are_dropped_from_the_threshold_on(threshold: float, admitted: int) -> None:
    limit = limiter(messages_per_epoch=10, approach_threshold=threshold)
    reasons = [limit.admit_ephemeral(START) for _ in range(admitted + 1)]
    assert reasons[:-1] == [None] * admitted
    assert reasons[-1] is (EphemeralDropReason.APPROACHED if admitted < 10 else EphemeralDropReason.REACHED)
    assert limit.dropped_ephemerals == 1
    assert limit.get_timer() is None  # nothing was queued


@pytest.mark.req("C-181", "C-057")
@pytest.mark.parametrize("limited", ["messages_per_epoch", "segments_per_epoch"])
def test_ephemerals_are_dropped_when_the_limit_is_reached(limited: str) -> None:
    limit = limiter(**{limited: 1})
    limit.offer("room", ["a"])
    drain(limit, START)
    assert limit.admit_ephemeral(START) is EphemeralDropReason.REACHED
    assert limit.admit_ephemeral(START + EPOCH) is None


@pytest.mark.req("C-233")
def test_utilisation_is_that_of_the_fuller_budget() -> None:
    limit = limiter(messages_per_epoch=10, segments_per_epoch=100)
    for number in range(5):
        limit.offer("room", [str(number)])
    drain(limit, START)
    assert limit.utilisation(START) == 50
    limit.offer("room", [f"big{number}" for number in range(75)])
    drain(limit, START)
    assert limit.utilisation(START) == 80
    assert limit.utilisation(START + EPOCH) == 0


@pytest.mark.req("C-230")
def test_first_transmissions_precede_retransmissions_precede_background() -> None:
    limit = limiter(segments_per_epoch=100)
    limit.offer_again("room", "sync", Priority.BACKGROUND)
    limit.offer_again("room", "again", Priority.RETRANSMISSION)
    limit.offer("other", ["first"])
    assert drain(limit, START) == ["first", "again", "sync"]


@pytest.mark.req("C-091")
def test_retransmissions_wait_at_the_threshold_and_are_not_dropped() -> None:
    limit = limiter(messages_per_epoch=10)
    for number in range(9):
        limit.offer("room", [str(number)])
    drain(limit, START)
    assert limit.utilisation(START) == 90
    assert limit.offer_again("room", "again", Priority.RETRANSMISSION)
    assert drain(limit, START) == []
    assert limit.get_timer() == START + EPOCH
    assert drain(limit, START + EPOCH) == ["again"]


@pytest.mark.req("C-230")
def test_background_counts_against_the_hard_limit_only() -> None:
    limit = limiter(messages_per_epoch=1, segments_per_epoch=3)
    limit.offer("room", ["a"])
    limit.offer("room", ["b"])
    for number in range(3):
        limit.offer_again("room", f"sync{number}", Priority.BACKGROUND)
    # b waits for the next epoch; two syncs fit under the limit of the transport, the third does not.
    assert drain(limit, START) == ["a", "sync0", "sync1"]
    assert drain(limit, START + EPOCH) == ["b", "sync2"]


def test_background_is_queued_once_and_bounded() -> None:
    limit = limiter(max_queued=2)
    assert limit.offer_again("room", "m1", Priority.RETRANSMISSION)
    assert not limit.offer_again("room", "m1", Priority.RETRANSMISSION)
    assert limit.offer_again("room", "m1", Priority.BACKGROUND)
    assert limit.offer_again("room", "m2", Priority.RETRANSMISSION)
    assert not limit.offer_again("room", "m3", Priority.RETRANSMISSION)
    assert limit.refused_background == 1
    assert limit.changes_to_store("room") == []
    limit.withdraw("room", "m1")
    assert drain(limit, START) == ["m2"]
    assert limit.offer_again("room", "m1", Priority.RETRANSMISSION)


@pytest.mark.req("C-234")
def test_channels_share_the_budget_and_take_turns() -> None:
    limit = limiter(messages_per_epoch=4)
    for number in range(4):
        limit.offer("one", [f"one{number}"])
    limit.offer("two", ["two0"])
    limit.offer("two", ["two1"])
    assert drain(limit, START) == ["one0", "two0", "one1", "two1"]
    assert drain(limit, START + EPOCH) == ["one2", "one3"]


def test_closing_a_lane_forgets_it() -> None:
    limit = limiter()
    limit.offer("room", ["a", "b"])
    taken = take(limit, START)
    limit.close_lane("room")
    limit.sent(taken)
    limit.put_back(taken)
    limit.withdraw("room", "b")
    assert limit.take(START) is None
    assert limit.queued("room") == 0 and limit.changes_to_store("room") == []


@pytest.mark.req("C-222")
def test_a_clock_set_back_gives_no_budget_again_and_stretches_no_wait() -> None:
    limit = limiter(messages_per_epoch=2)
    limit.learn_limit(2, 500)
    for number in range(6):
        limit.offer("room", [str(number)])
    assert drain(limit, START) == ["0", "1"]
    back = START - 100 * EPOCH
    assert drain(limit, back) == []
    limit.pause(back, 1000)
    assert drain(limit, back - EPOCH) == []
    assert limit.get_timer() == back
    assert drain(limit, back) == ["2", "3"]


@pytest.mark.req("C-222", "C-235")
@pytest.mark.parametrize("restarts", [False, True])
def test_an_epoch_that_the_clock_comes_back_to_has_no_second_budget(restarts: bool) -> None:
    limit, stored = limiter(messages_per_epoch=3), StoredState()
    for number in range(9):
        limit.offer("room", [str(number)])
    assert take(limit, START).message_id == "0"
    assert take(limit, START - 1).message_id == "1", "the clock was set back"
    if restarts:
        stored.apply(limit.counts_to_store())
        counted = ChannelState.read(stored).epochs["current"]
        limit = RateLimiter(limit.config, counted=counted)
        for number in range(2, 9):
            limit.offer("room", [str(number)])
    assert drain(limit, START) == ["2"]
    assert drain(limit, START - 1) == drain(limit, START + 1) == []
    assert drain(limit, START + EPOCH) == ["3", "4", "5"]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    messages=st.integers(1, 6),
    segments=st.integers(1, 9),
    each=st.booleans(),
)
def test_random_traffic_keeps_the_limits_and_loses_nothing(
    seed: int, messages: int, segments: int, each: bool
) -> None:
    """No epoch exceeds the limits; everything offered leaves once; the chunks of a lane leave in order."""
    source = random.Random(seed)
    limit = limiter(
        messages_per_epoch=messages,
        segments_per_epoch=segments,
        chunk_accounting="each" if each else "first",
    )
    offered: dict[str, list[str]] = {"one": [], "two": []}
    left: dict[str, list[str]] = {"one": [], "two": []}
    opened, used, again = Counter[int](), Counter[int](), 0
    now, number = START, 0
    while now < START + 400 * EPOCH:
        if number < 40 and source.random() < 0.3:
            lane, number = source.choice(["one", "two"]), number + 1
            chunks = [f"{number}.{index}" for index in range(source.randrange(1, 4))]
            limit.offer(lane, chunks)
            offered[lane] += chunks
            again += limit.offer_again(lane, f"again{number}", source.choice(list(Priority)[1:]))
        while (transmission := limit.take(now)) is not None:
            used[now // EPOCH] += 1
            if transmission.priority is not Priority.CONTENT:
                again -= 1
            else:
                opened[now // EPOCH] += transmission.opens_message or each
                left[transmission.lane].append(transmission.message_id)
            limit.sent(transmission)
        now += source.randrange(1, 2 * EPOCH)
    assert left == offered
    # With a budget of one, the first transmission of each epoch reaches the threshold.
    assert again == 0
    assert max(opened.values(), default=0) <= messages
    assert max(used.values(), default=0) <= segments


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch_size_ms", 0),
        ("messages_per_epoch", 0),
        ("segments_per_epoch", -1),
        ("max_queued", 0),
        ("max_pause_ms", 0),
        ("approach_threshold", 0.0),
        ("approach_threshold", 1.1),
        ("approach_threshold", float("nan")),
        ("chunk_accounting", "none"),
    ],
)
def test_settings_that_cannot_work(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        RateLimitConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.req("C-086", "C-232")
@pytest.mark.parametrize("priority", list(Priority))
def test_what_was_put_back_can_be_withdrawn_and_does_not_block_its_lane(priority: Priority) -> None:
    limit = limiter()
    if priority is Priority.CONTENT:
        limit.offer("room", ["a"])
    else:
        limit.offer_again("room", "a", priority)
    limit.put_back(take(limit, START))
    limit.withdraw("room", "a")
    assert not limit.waits("room") and limit.take(START) is None


@pytest.mark.req("C-227")
def test_what_is_queued_after_a_restart_stands_behind_what_was_queued_before() -> None:
    first, store = limiter(messages_per_epoch=1), StoredState()
    first.offer("room", ["a", "b"])
    store.apply(first.changes_to_store("room"))
    again = limiter()
    again.restore("room", ChannelState.read(store).queue.values())
    again.offer("room", ["c"])
    store.apply(again.changes_to_store("room"))
    assert [each.message_id for each in ChannelState.read(store).queue.values()] == ["a", "b", "c"]
    again.withdraw("room", "c")
    assert drain(again, START) == ["a", "b"]

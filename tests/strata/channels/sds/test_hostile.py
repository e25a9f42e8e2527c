"""What strangers may send, and how much it may cost."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata.channels.sds import (
    BloomFilter,
    BloomParameters,
    Delivered,
    HistoryEntry,
    Lost,
    Participant,
    SdsConfig,
    SdsMessage,
)

from tests.support.sds_network import delivered

T = 1_760_000_000_000
TIGHT = SdsConfig(
    bloom_filter_size=100,
    max_history=20,
    max_known_ids=30,
    max_waiting=10,
    max_missing=12,
    max_repair_buffer=5,
    max_received_history=8,
    max_message_bytes=4_000,
    sync_min_interval_ms=0,
)


def victim(config: SdsConfig = TIGHT) -> Participant:
    return Participant("room", "victim", config, now_ms=T, random=lambda: 0.5)


def forged(message_id: str, *history: str, lamport: int = T, content: bytes | None = b"x") -> bytes:
    entries = tuple(HistoryEntry(each) for each in history)
    return SdsMessage("mallory", message_id, "room", lamport, entries, content=content).encode()


@pytest.mark.req("C-302", "C-095")
def test_a_history_of_a_hundred_thousand_is_dropped() -> None:
    bob = victim(SdsConfig(max_message_bytes=1 << 24))
    bob.receive(forged("m", *(str(number) for number in range(100_000))), T)
    assert (bob.statistics.undecodable, bob.events(), bob.missing()) == (1, [], [])
    bob = victim()
    bob.receive(forged("m", content=b"x" * 5_000), T)
    assert (bob.statistics.oversized, bob.events()) == (1, [])


@pytest.mark.req("C-302")
@pytest.mark.parametrize("bad", ["", "x" * 257])
def test_ids_that_are_empty_or_too_long_are_dropped(bad: str) -> None:
    bob = victim()
    bob.receive(forged(bad), T)
    bob.receive(forged("m", bad), T)
    bob.receive(SdsMessage(bad, "m", "room", T, content=b"x").encode(), T)
    bob.receive(SdsMessage("a", "m", "room", T, (), None, (HistoryEntry(bad),), b"x").encode(), T)
    assert (bob.statistics.undecodable, bob.events()) == (4, [])


@pytest.mark.req("C-126")
def test_messages_that_wait_for_each_other_are_freed_in_time() -> None:
    bob = victim()
    bob.receive(forged("self", "self"), T)
    assert delivered(bob) == ["self"]
    bob.receive(forged("a", "c"), T)
    bob.receive(forged("b", "a"), T)
    bob.receive(forged("c", "b"), T)
    assert (delivered(bob), bob.missing()) == ([], [])
    for seconds in range(5, 700, 5):
        bob.handle_timer(T + seconds * 1_000)
    assert delivered(bob) == ["a", "b", "c"]


@pytest.mark.req("C-095", "C-302")
def test_what_does_not_fit_is_refused_and_so_not_acknowledged() -> None:
    bob = victim()
    for number in range(50):
        bob.receive(forged(f"m{number}", f"gap {number}"), T)
    assert len(bob.missing()) == 10
    assert bob.statistics.refused_full == 40
    held = BloomFilter(BloomParameters(100, 0.001))
    for number in range(10):
        held.insert(f"m{number}")
    assert bob.wrap(b"x", T, 1).bloom_filter == held.to_bytes()
    bob.receive(forged("free"), T)
    assert delivered(bob) == ["free"]


@pytest.mark.req("C-095", "C-302")
def test_what_is_held_is_bounded_in_bytes_and_twice_that_for_what_others_wait_for() -> None:
    bob = victim(replace(TIGHT, max_waiting_bytes=1_000))
    big = b"x" * 400
    for number in range(3):
        bob.receive(forged(f"m{number}", "gap", content=big), T)
    assert (len(bob.waiting()), bob.statistics.refused_full) == (2, 1)
    bob.receive(forged("m3", "wanted", content=b"x"), T)
    for number in range(3):
        bob.receive(forged("wanted", "gap", content=big if number else b"x" * 1_200), T)
    assert [each.message_id for each in bob.waiting()] == ["m0", "m1", "m3", "wanted"]
    bob.receive(forged("gap", lamport=T - 1), T)
    assert sorted(delivered(bob)) == ["gap", "m0", "m1", "m3", "wanted"]
    # Releasing them has made room for as much again.
    for number in range(5, 8):
        bob.receive(forged(f"m{number}", "hole", content=big), T)
    assert len(bob.waiting()) == 2


@pytest.mark.req("C-153", "C-302")
def test_what_others_ask_for_is_not_kept_with_all_that_they_say_of_it() -> None:
    bob = victim(SdsConfig(bloom_filter_size=100))
    gaps = [f"gap {number}" for number in range(20)]
    bob.receive(forged("m", *gaps), T)
    tracemalloc.start()
    try:
        for gap in gaps:
            asks = (HistoryEntry(gap, bytes(200_000)),)
            bob.receive(SdsMessage("mallory", "", "room", T, (), None, asks).encode(), T)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bob.repair_requests() == {}
    assert kept_bytes < 1_000_000


@pytest.mark.req("C-116", "C-152")
def test_what_is_held_waits_for_nothing_that_nobody_looks_for() -> None:
    bob = victim(replace(TIGHT, max_missing=2))
    bob.receive(forged("last", "second", "third"), T)
    bob.receive(forged("third", "first", "other", lamport=T - 1), T)
    assert [entry.message_id for entry in bob.missing()] == ["second", "first", "other"]
    for number, id_ in enumerate(("first", "second", "other")):
        bob.receive(forged(id_, lamport=T - 9 + number), T)
    assert delivered(bob) == ["first", "second", "other", "third", "last"]


def test_syncs_may_take_half_the_room_for_gaps_at_most() -> None:
    bob = victim()
    for number in range(50):
        bob.receive(forged("s", f"gap {number}", lamport=number, content=None), T)
    assert len(bob.missing()) == 6
    bob.receive(forged("m", "gap"), T)
    assert len(bob.missing()) == 7


def test_nothing_is_delivered_twice_however_old() -> None:
    bob = victim()
    everything = [forged(f"m{number:03}", lamport=T + number) for number in range(100)]
    for data in everything:
        bob.receive(data, T)
    assert len(delivered(bob)) == 100
    assert len(bob.log()) == 20
    for data in everything:
        bob.receive(data, T)
    assert delivered(bob) == []
    assert bob.statistics.refused_old == 70
    assert bob.statistics.duplicates == 30


@pytest.mark.req("C-119")
def test_extreme_times_do_not_hold_the_log_for_ever() -> None:
    bob = victim()
    for number in range(100):
        bob.receive(forged(f"evil {number}", lamport=2**64 - 1 - number), T)
    for number in range(20):
        bob.receive(forged(f"good {number:02}", lamport=T + number), T)
    assert [entry.message_id for entry in bob.log()] == [f"good {number:02}" for number in range(20)]
    assert [entry.message_id for entry in bob.wrap(b"x", T, 1).causal_history] == ["good 18", "good 19"]


def test_bytes_kept_are_bounded_and_unacknowledged_messages_outlive_the_log() -> None:
    config = SdsConfig(sync_min_interval_ms=0, max_history_bytes=200_000)
    bob = victim(config)
    own = bob.wrap(b"own", T, 1)
    bob.dispatched(own.message_id, T)
    source = random.Random(1)
    for number in range(100):
        noise = source.randbytes(18_752)  # an incompressible filter
        data = SdsMessage("mallory", str(number), "room", T, (), noise, content=b"x").encode()
        bob.receive(data, T)
    assert bob._history.archive.size_bytes < 250_000
    assert len(bob.log()) < 12
    bob.events()
    bob.handle_timer(T + 5_000)
    assert own.encode() in [event.data for event in bob.events() if hasattr(event, "data")]


ids = st.sampled_from([f"id {number}" for number in range(12)])
entries = st.builds(HistoryEntry, ids, st.none() | st.just(b"h"), st.none() | st.just("victim"))
forgeries = st.builds(
    SdsMessage,
    st.sampled_from(["mallory", "carol", "victim"]),
    ids,
    st.sampled_from(["room", "room", "room", "other"]),
    st.sampled_from([None, 0, 1, T, T + 1, T + 24 * 3_600_000, 2**64 - 1]),
    st.lists(entries, max_size=9).map(tuple),
    st.none() | st.binary(max_size=3) | st.just(b"\xff" * BloomParameters(100, 0.001).size_bytes),
    st.lists(entries, max_size=9).map(tuple),
    st.none() | st.sampled_from([b"", b"x"]),
)
steps = st.lists(st.tuples(st.integers(-60_000, 200_000), forgeries | st.binary(max_size=60)), max_size=60)


@pytest.mark.req("C-302", "C-112", "C-298")
@settings(max_examples=200, deadline=None)
@given(steps)
def test_whatever_comes_it_is_bounded_once_and_in_causal_order(script: list[Any]) -> None:
    bob, now = victim(), T
    seen: list[str] = []
    gone: set[str] = set()
    histories: dict[str, set[str]] = {}
    for number, (elapsed, item) in enumerate(script):
        now += elapsed
        data = item if isinstance(item, bytes) else item.encode()
        if isinstance(item, SdsMessage) and item.sender_id != "victim" and item.content:
            histories.setdefault(item.message_id, {entry.message_id for entry in item.causal_history})
        bob.receive(data, now)
        bob.handle_timer(now)
        if number % 7 == 0:
            message = bob.wrap(b"own", now, number)
            bob.dispatched(message.message_id, now)
        for event in bob.events():
            if isinstance(event, Delivered):
                assert event.message_id not in seen
                seen.append(event.message_id)
            elif isinstance(event, Lost):
                gone.add(event.entry.message_id)
        assert bob.get_timer() > now or bob.get_timer() <= now + 1
        assert len(bob.log()) <= TIGHT.max_history
        assert len(bob.missing()) <= TIGHT.max_missing
    state_of = [entry.message_id for entry in bob.log()]
    assert len(set(state_of)) == len(state_of)

"""The ordered log, the memory of ids, and messages kept at a fraction of their size."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.channels.sds import BloomFilter, BloomParameters, SdsMessage
from strata.channels.sds.bodies import Archive, Body
from strata.channels.sds.log import KnownIds, LoggedMessage, MessageLog, SortedKeys

keys = st.tuples(st.integers(0, 50), st.text("ab", max_size=3))


@given(st.lists(st.tuples(st.booleans(), keys), max_size=200), keys)
def test_sorted_keys_are_a_sorted_list(
    steps: list[tuple[bool, tuple[int, str]]], bound: tuple[int, str]
) -> None:
    made, naive = SortedKeys(), []
    for adding, key in steps:
        if adding and key not in naive:
            made.add(key)
            naive.append(key)
        elif not adding and key in naive:
            made.remove(key)
            naive.remove(key)
    naive.sort()
    assert list(made) == naive
    assert len(made) == len(naive)
    assert list(made.down_from(bound)) == [key for key in reversed(naive) if key <= bound]


def test_sorted_keys_in_many_chunks() -> None:
    made, naive = SortedKeys(), [(number, "") for number in range(2_000)]
    shuffled = naive.copy()
    random.Random(1).shuffle(shuffled)
    for key in shuffled:
        made.add(key)
    assert list(made) == naive
    assert list(made.down_from((2_500, ""))) == naive[2_500::-1]
    for key in shuffled[:4_900]:
        made.remove(key)
    assert list(made) == sorted(shuffled[4_900:])


def entry(number: int, lamport: int, *, dispatched: bool = True) -> LoggedMessage:
    return LoggedMessage(f"{number:03}", "alice", lamport, Body(b""), arrival=number, dispatched=dispatched)


@pytest.mark.req("C-118")
@given(st.permutations([entry(number, lamport) for number, lamport in enumerate((5, 5, 3, 9, 5, 0))]))
def test_the_order_is_that_of_time_then_id_whatever_came_first(entries: list[LoggedMessage]) -> None:
    log = MessageLog()
    for each in entries:
        log.add(each)
    assert [each.message_id for each in log.ordered()] == ["005", "002", "000", "001", "004", "003"]


@pytest.mark.req("C-106")
def test_the_most_recent_entries_oldest_first_and_none_from_the_far_future() -> None:
    log = MessageLog()
    for number, lamport in enumerate((10, 20, 30, 2**64 - 1)):
        log.add(entry(number, lamport, dispatched=number != 1))
    assert [each.message_id for each in log.recent(2, 30, dispatched_only=False)] == ["001", "002"]
    assert [each.message_id for each in log.recent(2, 30, dispatched_only=True)] == ["000", "002"]
    assert [each.message_id for each in log.recent(9, 2**64, dispatched_only=False)][-1] == "003"


def test_forgotten_ids_leave_a_horizon_unless_they_are_from_the_far_future() -> None:
    known = KnownIds(2)
    for number, lamport in enumerate((10, 2**64 - 1, 20, 30)):
        known.add(str(number), lamport, number)
    assert known.trim(30) == ["0", "1"]
    assert known.horizon == 10
    assert list(known) == ["2", "3"]


def test_while_a_store_is_read_the_ids_of_later_messages_are_kept() -> None:
    known = KnownIds(3)
    for number, lamport in enumerate((90, 10, 99, 20)):
        known.add(str(number), lamport, number)
    assert (known.trim(100, reading=20), known.horizon) == (["1"], 10)
    known.add("4", 30, 4)
    assert known.trim(100, reading=30, kept={"3"}) == ["4"]
    known.add("5", 40, 5)
    assert (known.trim(100), known.horizon) == (["0"], 90)


@pytest.mark.parametrize("later", [1_100, 4_096])
def test_however_many_ids_of_later_messages_there_are_what_is_still_to_be_read_is_taken(later: int) -> None:
    known = KnownIds(10_000)
    for number in range(later):
        known.add(f"ours {number}", 10**6, number)
    for number in range(12_000):
        known.add(f"{number}", number, later + number)
        known.trim(10**6, reading=number)
        assert known.horizon < number
        assert len(known._known) <= 11_000
    assert all(f"ours {number}" in known for number in range(later))
    for number in range(12_000, 30_000):
        known.add(f"{number}", 10**6 + number, later + number)
        known.trim(10**7)
    assert len(known._known) == 10_000 and "ours 0" not in known


def test_after_a_reading_the_oldest_ids_are_forgotten_first_again() -> None:
    known = KnownIds(2_000)
    for number in range(2_100):
        known.add(f"{number}", 10**6 + number, number)
        assert known.trim(10**7, reading=5) == []
    assert known.trim(10**7) == [f"{number}" for number in range(100)]


def test_if_ids_of_later_messages_must_be_forgotten_it_is_the_earliest_that_are_not_kept() -> None:
    known = KnownIds(10)
    for number in range(12):
        known.add(f"{number}", 100 - number, number)
    assert known.trim(200, reading=5, kept={"11"}) == ["10", "9"]
    assert known.horizon == 91


def test_ids_of_later_messages_without_end_are_forgotten_all_the_same() -> None:
    known = KnownIds(1_000)
    for number in range(2_000):
        known.add(f"{number}", 10**6, number)
        known.trim(10**6, reading=5)
    assert len(known._known) <= 1_100 and known.horizon == 10**6


PARAMETERS = BloomParameters(10_000, 0.001)


def wire_messages(sender: str, count: int, seed: int) -> list[tuple[bytes, bytes]]:
    source, bloom_filter = random.Random(seed), BloomFilter(PARAMETERS)
    made = []
    for number in range(count):
        for _ in range(source.randrange(4)):
            bloom_filter.insert(str(source.random()))
        data = bloom_filter.to_bytes()
        made.append((SdsMessage(sender, str(number), "c", number, (), data, (), b"x").encode(), data))
    return made


@pytest.mark.req("C-145")
def test_bodies_are_restored_byte_for_byte_in_any_order() -> None:
    archive, kept = Archive(), []
    streams = [wire_messages(sender, 100, seed) for seed, sender in enumerate(("alice", "bob"))]
    for pair in zip(*streams, strict=True):
        for sender, (data, bloom_filter) in zip(("alice", "bob"), pair, strict=True):
            kept.append((data, archive.keep(sender, data, bloom_filter)))
    random.Random(1).shuffle(kept)
    assert archive.size_bytes < 200 * 18_752 / 8
    for data, body in kept:
        assert body.restore() == data
        archive.release(body)
    assert archive.size_bytes == 0
    assert sorted(archive.died) == [keyframe.number for keyframe in archive.born]


@pytest.mark.parametrize("senders", [3, 65, 300])
def test_a_message_costs_the_same_however_many_speak(senders: int) -> None:
    """With more than 64 senders, nearly every message used to start a keyframe of 18 KB."""
    archive, count = Archive(), 600
    received = BloomFilter(BloomParameters(10_000, 0.001))
    for number in range(1_000):
        received.insert(f"before {number}")
    for number in range(count):
        received.insert(f"message {number}")
        bloom_filter = received.to_bytes()
        data = b"head" + bloom_filter + b"tail"
        assert archive.keep(f"sender {number % senders}", data, bloom_filter).restore() == data
    assert archive.size_bytes / count < 2_000
    assert len(archive.born) < count / 20


@given(st.binary(max_size=60), st.none() | st.binary(min_size=1, max_size=3))
def test_bodies_of_anything(data: bytes, bloom_filter: bytes | None) -> None:
    archive = Archive()
    if bloom_filter is not None:
        data += bloom_filter + data
    assert archive.keep("alice", data, bloom_filter).restore() == data


def test_the_first_to_leave_is_the_first_that_is_still_there() -> None:
    log = MessageLog()
    for number, lamport in enumerate((5, 1, 9, 3)):
        log.add(entry(number, lamport))
    log.remove("000")
    assert log.first_logged().message_id == "001"
    log.remove("001")
    assert log.first_logged().message_id == "002"
    assert (log.remove("000"), len(log)) == (None, 2)


def test_what_leaves_before_its_turn_leaves_nothing_behind() -> None:
    """A program whose messages are all refused withdraws each of them, in a log that is never full."""
    log, known = MessageLog(), KnownIds(100_000)
    for number in range(3_000):
        log.add(entry(number, number))
        known.add(f"{number:03}", number, number)
        if number != 7:
            log.remove(f"{number:03}")
            known.discard(f"{number:03}")
    assert len(log._arrivals) < 600 and len(known._arrivals) < 600
    assert (log.first_logged().message_id, known.trim(0)) == ("007", [])

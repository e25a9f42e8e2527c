from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.relays.connection.values import Delivery
from strata.relays.pool.merging import Merging
from strata.relays.pool.older_ids import OlderIdsOnDisk
from strata.relays.pool.values import Position

from tests.support.simulated_relays import packet
from tests.support.virtual_time import START


class Shelf:
    """A store of older ids that can be full."""

    def __init__(self) -> None:
        self.ids: set[bytes] = set()
        self.is_full = False
        self.asked = 0

    def add(self, digests):
        if self.is_full:
            raise OSError("disk full")
        self.ids |= set(digests)

    def __contains__(self, digest):
        self.asked += 1
        return digest in self.ids


def merging(*, window=10_000, hold_back=0.0, older_ids=None, capacity=100) -> Merging:
    return Merging(
        capacity=capacity, dedup_packets=window, hold_back=hold_back, older_ids=older_ids or Shelf()
    )


def copy(n: int, received_at: int = START + 100, cursor: str | None = None) -> Delivery:
    return Delivery(packet(n), received_at, cursor or str(n), None)


def taken(it: Merging) -> list[Delivery]:
    return list(iter(it.take, None))


@pytest.mark.req("C-271", "R-106")
@pytest.mark.parametrize("times", [(START + 7, START + 5), (START + 5, START + 7)])
def test_one_of_several_copies_is_handed_on_and_the_earliest_time_is_kept(times):
    it = merging()
    assert it.offer("a", copy(1, times[0]), 0)
    (first,) = taken(it)
    assert first.received_at == times[0], "at once, with what is known by then"
    assert not it.offer("b", copy(1, times[1]), 1)
    assert taken(it) == []
    assert it.received_at(packet(1).digest) == START + 5
    assert (it.merged, it.dropped) == (1, 1)


@pytest.mark.req("R-106", "C-278")
def test_no_position_lies_in_the_future_whatever_the_relay_says():
    it = merging()
    it.offer("a", copy(1, 2**60), 0, unix_now=START + 9)
    assert it.positions == {"a": Position("1", START + 9)}
    assert [each.received_at for each in taken(it)] == [2**60], "by the word of the relay"
    assert it.taken_positions == it.positions


@pytest.mark.req("R-106")
@pytest.mark.parametrize("times", [(START + 7, START + 5), (START + 5, START + 7)])
def test_held_back_a_packet_carries_the_earliest_time_itself(times):
    it = merging(hold_back=2.0)
    it.offer("a", copy(1, times[0]), 0, readers=2)
    assert taken(it) == [] and it.get_timer() == 2
    it.offer("b", copy(1, times[1]), 1, readers=2)
    assert [d.received_at for d in taken(it)] == [START + 5], "all readers have brought it: no more waiting"
    it.offer("a", copy(2), 1, readers=2)
    it.handle_timer(2.9)
    assert taken(it) == []
    it.handle_timer(3)
    assert [d.packet for d in taken(it)] == [packet(2)]


@pytest.mark.req("R-106")
def test_a_time_no_relay_can_have_seen_does_not_count():
    it = merging()
    it.offer("a", copy(1, START + 9), 0)
    it.offer("liar", copy(1, 3), 0)
    assert it.received_at(packet(1).digest) == START + 9


def test_ids_too_many_for_memory_go_to_the_older_ids_which_live_packets_never_ask():
    shelf = Shelf()
    it = merging(window=10, older_ids=shelf, capacity=10**6)
    old, new = range(0, 5000, 50), range(49, 5000, 50)  # timestamps START and START + 49
    for n in list(old) * 2:
        it.offer("a", copy(n), 0)
    for n in range(1, 5000, 50):
        it.offer("a", copy(n), 0)
    for n in range(2, 5000, 50):
        it.offer("a", copy(n), 0)
    assert it.merged == 300 and len(shelf.ids) == 256
    shelf.asked = 0
    for n in new:
        assert it.offer("a", copy(n), 0)
    assert shelf.asked == 0
    for n in old:
        assert not it.offer("b", copy(n), 0), "nothing is forgotten"


def test_a_full_disk_costs_memory_and_no_promise():
    shelf = Shelf()
    shelf.is_full = True
    it = merging(window=10, older_ids=shelf, capacity=10**6)
    for n in range(600):
        it.offer("a", copy(n), 0)
    assert it.older_ids_failures == 2 and it.merged == 600
    shelf.is_full = False
    for n in range(600):
        assert not it.offer("b", copy(n), 0)
    assert it.offer("a", copy(600), 0)


def test_positions_for_programs_follow_what_was_taken_and_ours_what_was_queued():
    it = merging()
    it.offer("a", copy(1), 0)
    it.offer("b", copy(1, cursor="b1"), 0)
    it.offer("a", copy(2), 0)
    assert {url: p.cursor for url, p in it.positions.items()} == {"a": "2", "b": "b1"}
    assert it.taken_positions == {}
    it.take()
    assert {url: p.cursor for url, p in it.taken_positions.items()} == {"a": "1", "b": "b1"}
    it.take()
    it.offer("b", copy(2, cursor="b2"), 0)
    assert it.taken_positions["b"] == Position("b2", START + 100), "nothing is queued before it"
    it.offer("c", copy(3), 0, in_stream=False)
    assert "c" not in it.positions, "a sweep is no stream"


def test_readers_wait_while_the_queue_is_full():
    it = merging(capacity=2)
    for n in range(2):
        assert not it.must_wait
        it.offer("a", copy(n), 0)
    assert it.must_wait
    it.take()
    assert not it.must_wait


steps = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(0, 30),
        st.integers(START, START + 40),
        st.sampled_from(["offer", "offer", "offer", "take", "tick"]),
    ),
    max_size=120,
)


@pytest.mark.req("C-271", "R-106")
@given(steps, st.sampled_from([1, 5, 1000]), st.sampled_from([0.0, 3.0]))
def test_against_a_set(some, window, hold_back):
    it = merging(window=window, hold_back=hold_back, capacity=10**6)
    offered: dict[int, int] = {}
    handed_on: list[int] = []
    streams: dict[str, list[int]] = {url: [] for url in "abc"}
    by_id = {packet(n).packet_id: n for n in range(31)}

    def check(delivery):
        n = by_id[delivery.packet.packet_id]
        handed_on.append(n)
        # R-106; and a position never covers a packet that has not been taken.
        for url, position in it.taken_positions.items():
            assert position.cursor is not None
            before = streams[url][: int(position.cursor) + 1]
            assert set(before) <= set(handed_on)

    for now, (url, n, received_at, what) in enumerate(some):
        if what == "take":
            if (delivery := it.take()) is not None:
                check(delivery)
        elif what == "tick":
            it.handle_timer(now)
        else:
            cursor = str(len(streams[url]))
            streams[url].append(n)
            is_first = it.offer(url, copy(n, received_at, cursor), now, readers=3)
            assert is_first == (n not in offered)
            # As with real relays, all times are later than the packet's own, minus the skew.
            offered[n] = min(offered.get(n, received_at), received_at)
            assert it.received_at(packet(n).digest) == offered[n]
    it.release_all()
    for delivery in iter(it.take, None):
        check(delivery)
    assert sorted(handed_on) == sorted(offered)


def test_the_disk_older_ids_keeps_what_it_is_given():
    older_ids = OlderIdsOnDisk()
    assert b"x" * 32 not in older_ids
    older_ids.add(packet(n).digest for n in range(300))
    older_ids.add(packet(n).digest for n in range(10))
    assert all(packet(n).digest in older_ids for n in range(300))
    assert packet(300).digest not in older_ids
    older_ids.close()
    older_ids.close()
    assert packet(1).digest not in older_ids, "closed, it is empty"

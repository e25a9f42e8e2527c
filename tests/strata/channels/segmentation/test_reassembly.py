"""Segments in any order, from anybody, with any losses: each message comes out once or is accounted for."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata.channels.persistence import ChannelState, Put, StoredState
from strata.channels.persistence.records import PartialSegment
from strata.channels.segmentation import (
    Abandoned,
    AbandonReason,
    DropReason,
    Reassembled,
    Reassembler,
    Segment,
    SegmentationConfig,
    SegmentFault,
    encode_segment,
    message_hash,
    segment_message,
)
from strata.channels.segmentation.instances import _segment_sizes
from strata.channels.segmentation.parity import load_codec

CONFIG = SegmentationConfig(segment_size_bytes=4, reassembly_timeout_ms=1000)
PAYLOAD = b"abcdefghij"
needs_codec = pytest.mark.skipif(load_codec() is None, reason="the parity extra is not installed")


class Wire:
    """Gives every segment an SDS message id, as if each were sent in a separate message."""

    def __init__(self, reassembler: Reassembler) -> None:
        self.reassembler = reassembler
        self.sent = 0

    def send(
        self, segments: Iterable[Segment], sender: str = "bob", now: int = 0
    ) -> list[Reassembled | Abandoned]:
        for segment in segments:
            self.sent += 1
            self.reassembler.receive(sender, f"m{self.sent}", encode_segment(segment), now)
        return self.reassembler.events_received()


@pytest.fixture
def wire() -> Wire:
    return Wire(Reassembler(CONFIG))


def cut(payload: bytes = PAYLOAD, request_id: str | None = None, **settings: object) -> list[Segment]:
    config = dataclasses.replace(CONFIG, **settings)  # type: ignore[arg-type]
    return list(segment_message(payload, config, request_id=request_id))


def payloads(events: Iterable[Reassembled | Abandoned]) -> list[bytes]:
    return [event.payload for event in events if isinstance(event, Reassembled)]


@pytest.mark.req("C-202", "C-203", "C-206")
def test_segments_in_reverse(wire: Wire) -> None:
    a, b, c = cut()
    assert wire.send([c, b]) == []
    assert wire.reassembler.statistics.partial_messages == 1
    assert wire.reassembler.statistics.partial_bytes == 6
    (event,) = wire.send([a])
    assert event == Reassembled(
        sender_id="bob",
        payload=PAYLOAD,
        message_hash=message_hash(PAYLOAD),
        request_id=None,
        message_ids=("m1", "m2", "m3"),
        data_segment_count=3,
    )
    assert wire.reassembler.statistics.partial_bytes == wire.reassembler.statistics.partial_messages == 0


@pytest.mark.req("C-188")
def test_a_single_segment_is_whole_at_once(wire: Wire) -> None:
    assert payloads(wire.send(cut(b"hi"))) == [b"hi"]
    assert wire.reassembler.changes_to_store() == []
    assert wire.reassembler.get_timer() is None


@pytest.mark.req("C-050")
def test_the_request_id_comes_through(wire: Wire) -> None:
    (event,) = wire.send(cut(request_id="r-1"))
    assert isinstance(event, Reassembled) and event.request_id == "r-1"


@pytest.mark.req("C-204")
def test_a_flipped_byte_discards_the_message(wire: Wire) -> None:
    a, b, c = cut()
    events = wire.send([a, dataclasses.replace(b, payload=b"eFgh"), c])
    (event,) = events
    assert isinstance(event, Abandoned) and event.reason is AbandonReason.CORRUPT
    assert wire.reassembler.statistics.partial_messages == 0
    (single,) = wire.send([dataclasses.replace(cut(b"hi")[0], payload=b"ho")])
    assert isinstance(single, Abandoned) and single.reason is AbandonReason.CORRUPT


@pytest.mark.req("C-205", "C-208")
def test_the_same_sds_message_again_changes_nothing(wire: Wire) -> None:
    reassembler = wire.reassembler
    for segment, message_id in zip(cut(), "xyz", strict=True):
        for _ in range(3):
            reassembler.receive("bob", message_id, encode_segment(segment), 0)
    assert payloads(reassembler.events_received()) == [PAYLOAD]
    reassembler.receive("bob", "x", encode_segment(cut()[0]), 0)
    assert reassembler.events_received() == []
    assert reassembler.statistics.partial_messages == 0
    assert reassembler.statistics.dropped[DropReason.REPEATED] == 7


@pytest.mark.req("C-207")
def test_equal_payloads_are_delivered_as_often_as_they_were_sent(wire: Wire) -> None:
    assert payloads(wire.send(cut(b"ok") + cut(b"ok"))) == [b"ok", b"ok"]
    a, b, c = cut()
    assert payloads(wire.send([a, a, c, b, b, c])) == [PAYLOAD, PAYLOAD]
    assert wire.reassembler.statistics.partial_messages == 0


@pytest.mark.req("C-050", "C-207")
def test_requests_are_not_mixed(wire: Wire) -> None:
    one, two = cut(request_id="1"), cut(request_id="2")
    # By their indices the first three form a whole payload, but they belong to two requests.
    assert wire.send([one[0], two[1], two[2]]) == []
    events = wire.send([two[0], one[1], one[2]])
    assert [event.request_id for event in events] == ["2", "1"]
    assert payloads(events) == [PAYLOAD, PAYLOAD]


@pytest.mark.req("C-207")
def test_senders_are_apart(wire: Wire) -> None:
    a, b, c = cut()
    assert wire.send([a, b], "bob") == []
    assert wire.send([c], "mallory") == []
    assert payloads(wire.send([c], "bob")) == [PAYLOAD]


@pytest.mark.req("C-207")
@given(data=st.data())
def test_any_interleaving_delivers_each_message_once(data: st.DataObject) -> None:
    """The segments of messages of several senders, some with equal contents, are shuffled together."""
    sends = data.draw(
        st.lists(
            st.tuples(st.sampled_from("ab"), st.sampled_from([b"ok", PAYLOAD, b"12345678", b"zz" * 9])),
            max_size=8,
        )
    )
    segments = [
        (sender, segment)
        for number, (sender, payload) in enumerate(sends)
        for segment in cut(payload, request_id=str(number) if data.draw(st.booleans()) else None)
    ]
    wire = Wire(Reassembler(CONFIG))
    events = [
        event
        for sender, segment in data.draw(st.permutations(segments))
        for event in wire.send([segment], sender)
    ]
    found = sorted((event.sender_id, event.payload) for event in events if isinstance(event, Reassembled))
    assert found == sorted(sends)
    assert wire.reassembler.statistics.partial_messages == wire.reassembler.statistics.partial_bytes == 0


@pytest.mark.req("C-200")
def test_a_segment_that_claims_other_counts_is_dropped(wire: Wire) -> None:
    a, b, c = cut()
    events = wire.send([a, dataclasses.replace(b, data_segment_count=7), b, c])
    assert payloads(events) == [PAYLOAD]
    assert wire.reassembler.statistics.dropped[DropReason.COUNTS_DIFFER] == 1
    assert wire.reassembler.statistics.partial_messages == 0


@pytest.mark.req("C-209")
def test_what_gets_nothing_new_is_given_up(wire: Wire) -> None:
    a, _, c = cut(request_id="r")
    wire.send([c], now=100)
    wire.send([a], now=600)
    assert wire.reassembler.get_timer() == 1600
    wire.reassembler.handle_timer(1599)
    assert wire.reassembler.events_received() == []
    wire.reassembler.changes_to_store()
    wire.reassembler.handle_timer(1600)
    (event,) = wire.reassembler.events_received()
    assert event == Abandoned(
        sender_id="bob",
        message_hash=message_hash(PAYLOAD),
        request_id="r",
        reason=AbandonReason.TIMEOUT,
        missing=(1,),
        data_segment_count=3,
        message_ids=("m1", "m2"),
        first_received_at=100,
    )
    assert len(wire.reassembler.changes_to_store()) == 2
    assert wire.reassembler.get_timer() is None
    assert wire.reassembler.statistics.partial_bytes == 0


@pytest.mark.req("C-210")
def test_a_sender_beyond_the_limit_loses_the_oldest_of_his_own() -> None:
    config = dataclasses.replace(CONFIG, max_partial_messages_per_sender=2)
    wire = Wire(Reassembler(config))
    first = [cut(b"%8d" % number)[0] for number in range(3)]
    assert wire.send(first[:1], "honest") == []
    events = wire.send(first, "flood")
    assert [(e.sender_id, e.reason) for e in events if isinstance(e, Abandoned)] == [
        ("flood", AbandonReason.LIMIT)
    ]
    assert events[0].message_hash == message_hash(b"%8d" % 0)
    assert payloads(wire.send(cut(b"%8d" % 0)[1:], "honest")) == [b"%8d" % 0]


@pytest.mark.req("C-210")
def test_bytes_of_a_sender_are_limited() -> None:
    wire = Wire(Reassembler(dataclasses.replace(CONFIG, max_partial_bytes_per_sender=11)))
    for number in range(20):
        wire.send(cut(b"%12d" % number)[:2])
        assert wire.reassembler.statistics.partial_bytes <= 11
    assert wire.reassembler.statistics.abandoned[AbandonReason.LIMIT] == 19


@pytest.mark.req("C-210")
@pytest.mark.parametrize("limit", ["max_partial_messages", "max_partial_bytes"])
def test_a_flood_costs_the_flooder(limit: str) -> None:
    size = {"max_partial_messages": 10, "max_partial_bytes": 40}[limit]
    config = dataclasses.replace(CONFIG, **{limit: size})  # type: ignore[arg-type]
    wire = Wire(Reassembler(config))
    wire.send(cut()[:1], "honest")
    for number in range(100):
        wire.send(cut(b"%8d" % number)[:1], "flood")
    assert wire.reassembler.statistics.partial_messages <= 10
    assert wire.reassembler.statistics.partial_bytes <= 40
    assert payloads(wire.send(cut()[1:], "honest")) == [PAYLOAD]


def test_bad_bytes_are_counted_and_harm_nobody(wire: Wire) -> None:
    a, b, c = cut()
    wire.send([a])
    wire.reassembler.receive("bob", "x1", b"\xff garbage", 0)
    wire.reassembler.receive("bob", "x2", encode_segment(dataclasses.replace(b, entire_message_hash=b"h")), 0)
    large = Wire(Reassembler(dataclasses.replace(CONFIG, max_segment_bytes=3)))
    large.send([a])
    assert large.reassembler.statistics.dropped[DropReason.TOO_LARGE] == 1
    assert payloads(wire.send([b, c])) == [PAYLOAD]
    assert wire.reassembler.statistics.invalid == {SegmentFault.UNDECODABLE: 1, SegmentFault.HASH_LENGTH: 1}


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(0, 5),
            st.integers(0, 5),
            st.integers(0, 3),
            st.booleans(),
            st.integers(0, 2),
        ),
        max_size=40,
    )
)
def test_any_segments_keep_the_books(claims: list[tuple[str, int, int, int, bool, int]]) -> None:
    """Segments with false claims of every kind: no exception, and the statistics count only what is held."""
    config = dataclasses.replace(CONFIG, max_partial_messages=4, max_partial_messages_per_sender=3)
    reassembler = Reassembler(config)
    for number, (sender, index, count, parity, is_parity, which) in enumerate(claims):
        segment = Segment(
            entire_message_hash=bytes([which]) * 32,
            data_segment_count=count,
            parity_segment_count=parity,
            payload=b"x" * (1 + which),
            data_segment_index=0 if is_parity else index,
            parity_segment_index=index if is_parity else 0,
            is_parity=is_parity,
        )
        reassembler.receive(sender, str(number), encode_segment(segment), number)
        assert reassembler.statistics.partial_messages <= 4
    assert payloads(reassembler.events_received()) == []
    reassembler.handle_timer(10**6)
    assert reassembler.statistics.partial_messages == reassembler.statistics.partial_bytes == 0
    state = StoredState()
    state.apply(reassembler.changes_to_store())
    assert state.records == {}


def restarted(state: StoredState, config: SegmentationConfig = CONFIG) -> Reassembler:
    known = ChannelState.read(state)
    return Reassembler(config, segments=known.segments.values(), finished=known.segments_finished.values())


@pytest.mark.req("C-211", "C-257")
def test_reassembly_goes_on_after_a_restart() -> None:
    state = StoredState()
    one, two = cut(request_id="1"), cut(b"0123456789AB")
    before = Wire(Reassembler(CONFIG))
    before.send([one[2]], now=50)
    before.send([two[0], one[0]], now=60)
    state.apply(before.reassembler.changes_to_store())
    after = restarted(state)
    assert after.statistics.partial_messages == 2
    assert after.get_timer() == 1060
    after.receive("bob", "m1", encode_segment(one[2]), 70)  # seen before the restart
    wire = Wire(after)
    wire.sent = before.sent
    (event,) = wire.send([one[1]], now=80)
    assert isinstance(event, Reassembled)
    assert (event.payload, event.request_id, event.message_ids) == (PAYLOAD, "1", ("m1", "m3", "m4"))
    assert payloads(wire.send(two[1:], now=90)) == [b"0123456789AB"]
    state.apply(after.changes_to_store())
    assert state.records == {}


def test_a_damaged_stored_segment_is_left_out() -> None:
    state = StoredState()
    before = Wire(Reassembler(CONFIG))
    before.send(cut()[:1])
    state.apply(before.reassembler.changes_to_store())
    known = ChannelState.read(state)
    damaged = PartialSegment("bad", "bob", 9, 0, b"\xff")
    after = Reassembler(CONFIG, segments=[*known.segments.values(), damaged])
    assert after.statistics.partial_messages == 1
    assert len(after.changes_to_store()) == 1


def with_parity(payload: bytes, rate: float = 0.5, size: int = 64) -> list[Segment]:
    return cut(payload, segment_size_bytes=size, enable_reed_solomon=True, parity_rate=rate)


@needs_codec
@pytest.mark.req("C-212", "C-213", "C-215")
@settings(max_examples=60, deadline=None)
@given(
    payload=st.binary(min_size=1, max_size=700),
    size=st.sampled_from([64, 100, 128]),
    rate=st.sampled_from([0.125, 0.5, 1.0]),
    told=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_as_many_segments_as_parity_may_be_lost(
    payload: bytes, size: int, rate: float, told: bool, order: random.Random
) -> None:
    """Any `data_segment_count` of the segments are enough, with and without `original_length`."""
    segments = with_parity(payload, rate, size)
    if not told:
        segments = [dataclasses.replace(segment, original_length=None) for segment in segments]
    order.shuffle(segments)
    wire = Wire(Reassembler(CONFIG))
    count = segments[0].data_segment_count
    assert payloads(wire.send(segments[:count])) == [payload]
    # The other segments come late, and start no new message.
    assert wire.send(segments[count:]) == []
    assert wire.reassembler.statistics.partial_messages == 0


@needs_codec
@pytest.mark.req("C-207")
def test_late_segments_belong_to_the_message_they_are_of() -> None:
    segments = with_parity(bytes(range(200)))
    wire = Wire(Reassembler(CONFIG))
    assert len(segments) == 6
    assert payloads(wire.send(segments[1:5])) == [bytes(range(200))]
    assert wire.reassembler.statistics.recovered_by_parity == 1
    # A second sending: a late segment of the first sending does not count towards it.
    assert payloads(wire.send([segments[0], segments[5]])) == []
    assert payloads(wire.send(segments)) == [bytes(range(200))]
    assert wire.reassembler.statistics.dropped[DropReason.LATE] == 4


@needs_codec
@pytest.mark.req("C-211")
def test_late_segments_after_a_restart() -> None:
    segments = with_parity(bytes(range(200)))
    before = Wire(Reassembler(CONFIG))
    before.send(segments[2:])
    before.send(segments[1:2])
    state = StoredState()
    state.apply(before.reassembler.changes_to_store())
    after = Wire(restarted(state))
    after.sent = before.sent
    assert after.send(segments[:1]) == []
    assert after.reassembler.statistics.dropped[DropReason.LATE] == 1
    state.apply(after.reassembler.changes_to_store())
    assert state.records == {}


@needs_codec
def test_finished_messages_are_forgotten_in_time() -> None:
    wire = Wire(Reassembler(CONFIG))
    wire.send(with_parity(bytes(200))[1:5], now=10)
    assert wire.reassembler.get_timer() == 1010
    wire.reassembler.handle_timer(1010)
    assert wire.reassembler.events_received() == []
    assert wire.reassembler.get_timer() is None


@needs_codec
@pytest.mark.req("C-204", "C-213")
def test_foreign_parity_fails_and_the_data_still_arrives() -> None:
    """Parity of another code gives garbage, which the hash reveals; the data segments are kept."""
    payload = bytes(range(200))
    segments = [
        dataclasses.replace(s, payload=bytes(b ^ 0x55 for b in s.payload)) if s.is_parity else s
        for s in with_parity(payload)
    ]
    wire = Wire(Reassembler(CONFIG))
    assert wire.send(segments[2:]) == []
    assert payloads(wire.send(segments[:2])) == [payload]


@needs_codec
@pytest.mark.parametrize("width", [1, 63, 65, 32])
def test_parity_of_impossible_width_is_no_help_and_no_harm(width: int) -> None:
    payload = bytes(range(200))
    segments = [
        dataclasses.replace(s, payload=b"x" * width) if s.is_parity else s for s in with_parity(payload)
    ]
    wire = Wire(Reassembler(CONFIG))
    assert wire.send(segments[2:]) == []
    assert payloads(wire.send(segments[:2])) == [payload]


@needs_codec
@pytest.mark.req("C-215")
def test_zeros_at_the_end_of_a_payload_are_not_taken_for_padding() -> None:
    payload = b"\x01" * 70 + b"\x00" * 30
    segments = [dataclasses.replace(s, original_length=None) for s in with_parity(payload, 0.5)]
    wire = Wire(Reassembler(CONFIG))
    assert payloads(wire.send([segments[0], segments[2]])) == [payload]


@pytest.mark.req("C-213")
def test_without_the_library_parity_is_validated_counted_and_left_unused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("strata.channels.segmentation.reassembly.load_codec", lambda: None)
    wire = Wire(Reassembler(CONFIG))
    digest = message_hash(b"abcdefgh")
    parity = Segment(
        entire_message_hash=digest,
        data_segment_count=2,
        parity_segment_count=1,
        is_parity=True,
        payload=b"p" * 64,
    )
    data = [
        Segment(
            entire_message_hash=digest,
            data_segment_count=2,
            parity_segment_count=1,
            data_segment_index=index,
            payload=piece,
        )
        for index, piece in enumerate([b"abcd", b"efgh"])
    ]
    assert payloads(wire.send([data[0], parity, data[1]])) == [b"abcdefgh"]
    invalid = dataclasses.replace(parity, parity_segment_index=1)
    wire.send([invalid])
    assert wire.reassembler.statistics.dropped[DropReason.PARITY_UNUSED] == 1
    assert wire.reassembler.statistics.invalid == {SegmentFault.INDEX_OUT_OF_RANGE: 1}


def test_what_was_given_up_is_taken_up_again_when_the_rest_comes():
    """SDS has acknowledged the first segments: if the sender returns an hour later, nothing is lost."""
    options = SegmentationConfig(segment_size_bytes=4, reassembly_timeout_ms=1000)
    contents = {
        f"m{number}": encode_segment(segment)
        for number, segment in enumerate(segment_message(b"abcdefghij", options, request_id="r"))
    }
    reassembler = Reassembler(options, fetch=contents.get)
    store = StoredState()
    for message_id in ("m0", "m1"):
        reassembler.receive("bob", message_id, contents[message_id], 0)
    reassembler.handle_timer(5000)
    store.apply(reassembler.changes_to_store())
    (lost,) = reassembler.events_received()
    assert isinstance(lost, Abandoned) and lost.reason == AbandonReason.TIMEOUT
    state = ChannelState.read(store)
    assert not state.segments

    again = Reassembler(options, given_up=state.segments_given_up.values(), fetch=contents.get, now=9000)
    again.receive("bob", "m2", contents["m2"], 9000)
    store.apply(again.changes_to_store())
    (whole,) = again.events_received()
    assert isinstance(whole, Reassembled) and whole.payload == b"abcdefghij"
    assert not ChannelState.read(store).segments_given_up
    assert again.statistics.partial_messages == again.statistics.partial_bytes == 0


@pytest.mark.req("C-209")
def test_each_message_is_given_up_in_its_own_time_and_the_longest_untouched_first(wire: Wire) -> None:
    one, two, three = cut(), cut(b"0123456789AB"), cut(b"another one")
    wire.send([one[0]], now=0)
    wire.send([two[0]], now=100)
    wire.send([one[1]], now=600)
    assert wire.reassembler.get_timer() == 1100
    wire.reassembler.handle_timer(1100)
    (lost,) = wire.reassembler.events_received()
    assert (lost.message_hash, wire.reassembler.get_timer()) == (two[0].entire_message_hash, 1600)

    few = Wire(Reassembler(dataclasses.replace(CONFIG, max_partial_messages_per_sender=2)))
    (lost,) = few.send([one[0], two[0], one[1], three[0]])
    assert lost.message_hash == two[0].entire_message_hash


def test_whatever_became_of_a_message_its_sender_and_its_hash_are_forgotten(wire: Wire) -> None:
    reassembler = wire.reassembler
    for number in range(3):
        wire.send(cut(b"whole %4d" % number), sender=f"whole {number}")
        assert wire.send(cut(b"lost %5d" % number)[:2], sender=f"lost {number}") == []
    reassembler.handle_timer(1000)
    assert len(reassembler.events_received()) == 3
    assert (reassembler.statistics.reassembled, reassembler.statistics.partial_messages) == (3, 0)
    assert not (reassembler._instances or reassembler._by_message or reassembler._senders)
    # An abandoned message does not absorb the segments of a new sending.
    assert payloads(wire.send(cut(b"lost %5d" % 0), sender="lost 0", now=2000)) == [b"lost     0"]
    assert wire.reassembler.statistics.partial_bytes == 0


def test_what_was_given_up_is_taken_up_again_in_the_same_run_and_no_segment_counts_twice() -> None:
    contents: dict[str, bytes] = {}
    reassembler = Reassembler(CONFIG, fetch=contents.get)

    def receive(message_id: str, segment: Segment, now: int) -> list[Reassembled | Abandoned]:
        contents[message_id] = encode_segment(segment)
        reassembler.receive("bob", message_id, contents[message_id], now)
        return reassembler.events_received()

    a, b, c = cut(request_id="r")
    receive("m0", a, 0)
    receive("m1", b, 0)
    reassembler.handle_timer(1000)
    reassembler.events_received()
    assert receive("again", a, 2000) == []
    assert (reassembler.statistics.partial_bytes, reassembler.statistics.partial_messages) == (8, 1)
    (whole,) = receive("m2", c, 2000)
    assert isinstance(whole, Reassembled) and whole.payload == PAYLOAD and "m1" in whole.message_ids
    assert reassembler.statistics.partial_bytes == 0


class Logged:
    """A reassembler, the log behind it, and its store."""

    def __init__(self, **settings: object) -> None:
        self.contents: dict[str, bytes] = {}
        config = dataclasses.replace(CONFIG, **settings)  # type: ignore[arg-type]
        self.reassembler = Reassembler(config, fetch=self.contents.get)
        self.store = StoredState()
        self.segments_stored = 0
        self.events: list[Reassembled | Abandoned] = []

    def receive(self, segment: Segment, now: int = 0) -> None:
        message_id = f"m{len(self.contents)}"
        self.contents[message_id] = encode_segment(segment)
        self.reassembler.receive("bob", message_id, self.contents[message_id], now)
        self._take()

    def wait(self, now: int) -> None:
        self.reassembler.handle_timer(now)
        self._take()

    def restart(self, now: int) -> None:
        known = ChannelState.read(self.store)
        self.reassembler = Reassembler(
            self.reassembler._options,
            segments=known.segments.values(),
            given_up=known.segments_given_up.values(),
            fetch=self.contents.get,
            now=now,
        )

    def _take(self) -> None:
        changes = self.reassembler.changes_to_store()
        self.segments_stored += sum(isinstance(each, Put) and each.kind == "segment" for each in changes)
        self.store.apply(changes)
        self.events += self.reassembler.events_received()


@pytest.mark.req("C-210")
def test_what_had_no_room_is_taken_up_once_all_of_it_is_there_and_not_with_each_segment() -> None:
    one, two = bytes(range(36)), bytes(range(36, 72))
    logged = Logged(max_partial_bytes_per_sender=40)
    for pair in zip(cut(one), cut(two), strict=True):
        for segment in pair:
            logged.receive(segment)
    assert payloads(logged.events) == [one, two]
    assert len(logged.events) == 3, "one of them was given up once"
    assert logged.segments_stored < 2 * 18
    assert logged.store.records == {}
    assert logged.reassembler.statistics.partial_bytes == 0 and not logged.reassembler._crowded_out


@pytest.mark.req("C-210")
def test_a_message_that_is_too_large_by_itself_costs_what_it_is_once() -> None:
    logged = Logged(max_partial_bytes_per_sender=40)
    for segment in cut(bytes(range(120))):
        logged.receive(segment)
    assert payloads(logged.events) == [] and len(logged.events) == 2
    assert logged.segments_stored == 30
    assert "segments_given_up" not in logged.store.records


@pytest.mark.req("C-200", "C-207")
@pytest.mark.parametrize("restarts", [False, True])
def test_a_sending_in_other_pieces_does_not_make_one_forgotten_that_was_given_up(restarts: bool) -> None:
    logged, two = Logged(), cut(segment_size_bytes=5)
    a, b, c = cut()
    logged.receive(a)
    logged.receive(b)
    logged.wait(1000)
    logged.receive(two[0], 1100)
    if restarts:
        logged.restart(1100)
    logged.wait(2100)  # this one is given up too
    if restarts:
        logged.restart(2100)
    logged.receive(c, 2200)
    assert payloads(logged.events) == [PAYLOAD]
    logged.receive(two[1], 2300)
    assert payloads(logged.events) == [PAYLOAD, PAYLOAD]
    assert logged.store.records == {}
    assert logged.reassembler.statistics.partial_bytes == 0


@pytest.mark.req("C-207", "C-209")
def test_equal_messages_that_were_given_up_at_a_time_are_both_taken_up_again() -> None:
    logged = Logged()
    a, b, c = cut()
    for segment in (a, b, a, b):
        logged.receive(segment)
    logged.wait(1000)
    logged.receive(c, 1100)
    logged.receive(c, 1100)
    assert payloads(logged.events) == [PAYLOAD, PAYLOAD]
    assert logged.store.records == {}


@pytest.mark.req("C-207", "C-209")
def test_an_equal_message_that_comes_whole_costs_the_one_that_was_given_up_nothing() -> None:
    logged = Logged()
    a, b, c = cut()
    logged.receive(a)
    logged.receive(b)
    logged.wait(1000)
    for segment in (a, b, c):
        logged.receive(segment, 1100)
    assert payloads(logged.events) == [PAYLOAD]
    logged.wait(3000)
    logged.receive(c, 4000)
    assert payloads(logged.events) == [PAYLOAD, PAYLOAD]
    assert logged.store.records == {}


@pytest.mark.req("C-207", "C-209", "C-211")
@given(data=st.data())
def test_each_sending_arrives_however_long_its_segments_take(data: st.DataObject) -> None:
    """Equal payloads in any order, given up repeatedly, and with restarts in between."""
    sendings = data.draw(st.integers(1, 4))
    logged, now = Logged(), 0
    for segment in data.draw(st.permutations(cut() * sendings)):
        now += data.draw(st.sampled_from([1, 400, 600, 1500]))
        logged.wait(now)
        if data.draw(st.booleans()):
            logged.restart(now)
        logged.receive(segment, now)
    assert payloads(logged.events) == [PAYLOAD] * sendings
    assert logged.store.records == {}


def test_the_memory_of_one_message_is_bounded_however_often_it_is_sent_and_given_up() -> None:
    logged = Logged()
    segments = cut(bytes(range(200)))
    for number in range(20):
        for segment in segments[:-1]:
            logged.receive(segment, 2000 * number)
        logged.wait(2000 * number + 1000)
    (record,) = ChannelState.read(logged.store).segments_given_up.values()
    assert len(record.message_ids) <= 512
    logged.receive(segments[-1], 50_000)
    assert payloads(logged.events) == [bytes(range(200))]


def test_few_messages_that_were_given_up_are_remembered_and_their_records_go_with_them() -> None:
    reassembler, store = Reassembler(CONFIG, fetch=lambda message_id: None), StoredState()
    wire = Wire(reassembler)
    for number in range(300):
        wire.send(cut(b"%9d" % number)[:1], now=number)
    reassembler.handle_timer(5000)
    store.apply(reassembler.changes_to_store())
    kept = ChannelState.read(store).segments_given_up
    assert len(kept) == len(reassembler._given_up) == 256
    assert {each.message_hash for each in kept.values()} == {key[1] for key in reassembler._given_up}


@pytest.mark.req("C-209", "C-211")
def test_after_a_restart_what_was_stored_counts_once_and_has_its_whole_time_again() -> None:
    state, before = StoredState(), Wire(Reassembler(CONFIG))
    a, b, c = cut(request_id="r")
    before.send([a, b], now=0)
    state.apply(before.reassembler.changes_to_store())
    known = ChannelState.read(state)
    after = Reassembler(CONFIG, segments=known.segments.values(), now=90_000)
    assert after.statistics.partial_bytes == 8
    assert after.get_timer() == 91_000
    after.receive("bob", "m2", encode_segment(b), 90_000)
    assert after.statistics.dropped[DropReason.REPEATED] == 1
    after.receive("bob", "m3", encode_segment(c), 90_000)
    assert payloads(after.events_received()) == [PAYLOAD]
    assert after.statistics.partial_messages == after.statistics.partial_bytes == 0


@needs_codec
def test_a_finished_message_is_forgotten_with_its_last_late_segment(wire: Wire) -> None:
    segments = with_parity(bytes(range(200)))
    wire.send(segments[1:5], now=10)
    wire.send([segments[0]], now=20)
    assert wire.reassembler.statistics.partial_messages == 1
    wire.send([segments[5]], now=30)
    assert (wire.reassembler.statistics.partial_messages, wire.reassembler.get_timer()) == (0, None)


def test_records_of_what_was_given_up_before_and_after_a_restart_stay_apart() -> None:
    state = StoredState()
    for number, payload in enumerate((b"the first!", b"the second", b"the third!")):
        known = ChannelState.read(state)
        wire = Wire(Reassembler(CONFIG, given_up=known.segments_given_up.values(), fetch=lambda _: None))
        wire.send(cut(payload)[:1], now=0)
        wire.reassembler.handle_timer(1000)
        state.apply(wire.reassembler.changes_to_store())
        assert len(ChannelState.read(state).segments_given_up) == number + 1
    # The log no longer has their first segments: the rest comes to nothing, and harms no other message.
    wire.reassembler.events_received()
    assert wire.send(cut(b"the first!")[1:]) == []
    assert wire.reassembler.statistics.partial_bytes == 6


def test_what_was_corrupt_is_not_looked_for_again() -> None:
    reassembler = Reassembler(CONFIG, fetch=lambda message_id: None)
    a, b, c = cut()
    (lost,) = Wire(reassembler).send([a, b, dataclasses.replace(c, payload=b"XX")])
    assert isinstance(lost, Abandoned) and lost.reason is AbandonReason.CORRUPT
    assert not reassembler._given_up


def test_partial_messages_are_kept_as_long_when_the_clock_is_set(wire: Wire) -> None:
    wire.send(cut()[:1], now=100)
    wire.reassembler.clock_stepped(-90)
    assert wire.reassembler.get_timer() == 1010
    wire.reassembler.clock_stepped(5000)
    assert wire.reassembler.get_timer() == 6010


def test_a_clock_that_is_set_while_nothing_can_come_changes_no_timeout_either(wire: Wire) -> None:
    wire.send(cut()[:1], now=100)
    wire.reassembler.set_online(False, 300)
    assert wire.reassembler.get_timer() is None
    wire.reassembler.clock_stepped(50_000)
    wire.reassembler.set_online(False, 60_000)
    wire.reassembler.set_online(True, 70_000)
    assert wire.reassembler.get_timer() == 70_000 + 800


@pytest.mark.req("C-208")
def test_the_last_ids_are_remembered_and_no_more(wire: Wire) -> None:
    content = encode_segment(cut(b"hi")[0])
    for number in range(5000):
        wire.reassembler.receive("bob", str(number), content, 0)
    for known in ("4999", "904"):
        wire.reassembler.receive("bob", known, content, 0)
    assert wire.reassembler.statistics.dropped == {DropReason.REPEATED: 2}
    assert (len(wire.reassembler._seen), wire.reassembler.statistics.reassembled) == (4096, 5000)


@needs_codec
@pytest.mark.req("C-215")
def test_a_length_that_is_told_takes_no_zeros_for_padding_however_many() -> None:
    payload = bytes(range(1, 201)) * 50 + bytes(9_000)
    segments = cut(payload, segment_size_bytes=10_000, enable_reed_solomon=True)
    assert [segment.is_parity for segment in segments] == [False, False, True]
    assert payloads(Wire(Reassembler(CONFIG)).send([segments[0], segments[2]])) == [payload]


@pytest.mark.req("C-302")
def test_the_search_for_an_unknown_length_costs_no_more_for_a_large_message() -> None:
    assert len(list(_segment_sizes(3, 128, {}))) == 64
    assert len(list(_segment_sizes(16, 1 << 20, {}))) == 4
    assert list(_segment_sizes(200, 1 << 20, {})) == [1 << 20]
    assert list(_segment_sizes(200, 1 << 20, {5: bytes(100), 199: bytes(7)})) == [100]


@needs_codec
def test_parity_that_is_no_help_is_tried_once() -> None:
    class Counting:
        def __init__(self) -> None:
            self.tries = 0

        def encode(self, data: list[bytes], parity_count: int) -> list[bytes]:
            raise AssertionError

        def recover(self, *args: object) -> dict[int, bytes]:
            self.tries += 1
            raise ValueError

    codec = Counting()
    segments = cut(bytes(range(200)), segment_size_bytes=40, enable_reed_solomon=True, parity_rate=1.0)
    wire = Wire(Reassembler(CONFIG, codec=codec))  # type: ignore[arg-type]
    assert wire.send(segments[1:]) == []
    assert codec.tries == 1
    assert payloads(wire.send(segments[:1])) == [bytes(range(200))]

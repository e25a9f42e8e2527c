"""What subscribers get for packets whose origin was downgraded, and for packets that policy declines."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import packets
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from strata.protocol.provenance import Downgrade, restore, served
from strata.protocol.wire import Event, decode_relay_message

from relayd.cursor import CursorCodec
from relayd.feed import events
from relayd.feed.events import annotated_tail, event_frames, event_head, event_tail, row_frames
from relayd.feed.fanout import Fanout
from relayd.feed.filters import CompiledFilter
from relayd.feed.subscription import FeedPhase, FeedSubscription, SubscriptionRequest
from relayd.store.types import Declined, LogEntry, NewPacket, StoredPacket

CODEC = CursorCodec(bytes(32))
NOW = 1000
ALICE, BOB = Identity(bytes(31) + b"a"), Identity(bytes(31) + b"b")
ATTESTATION = {"client_id": "did:strata:z6Mk", "client_version": "1", "client_signature": "0x" + "0" * 128}
HEADER: dict[str, object] = {
    "origin_type": "SOFTWARE",
    "genesis_media_hash": None,
    "edit_history": [],
    "client_attestation": ATTESTATION,
}
FOUND = Downgrade("SOFTWARE", "UNKNOWN", "client_attestation_invalid", True)
_numbers = itertools.count(1)


def make(author: Identity = ALICE, type: str = "POST", *, header: dict[str, Any] | None = None) -> Packet:
    content = {"type": type, "text": "hello"}
    return packets.build(author, content, timestamp=NOW, nonce=str(next(_numbers)), provenance_header=header)


CLAIMED, PLAIN = make(header=HEADER), make()


def entry(sequence: int, packet: Packet, annotation: Downgrade | None = None) -> LogEntry:
    stored = NewPacket(
        packet.digest,
        packet.author_id,
        packet.content_type,
        packet.timestamp,
        packet.expires_at,
        packet.canonical,
        annotation=None if annotation is None else annotation.encode(),
    )
    return LogEntry(sequence, NOW + sequence, stored)


def row(logged: LogEntry) -> StoredPacket:
    return StoredPacket(logged.sequence, logged.received_at, logged.packet.body, logged.packet.annotation)


class Reader:
    """A subscription that has begun, and the output on its socket."""

    def __init__(self, *, name: str = "s", at: int = 0, **request: Any) -> None:
        made = SubscriptionRequest(name, CompiledFilter(), **request)
        self.subscription = FeedSubscription(made, CODEC)
        self.subscription.start(at)
        self.data = b""

    def deliver(self, frames: bytes, events: int) -> bool:
        self.data += frames
        return True

    def fell_behind(self, subscription: FeedSubscription) -> None:
        raise AssertionError("it reads as fast as we send")

    def go_live(self, fanout: Fanout) -> Reader:
        while self.subscription.phase is not FeedPhase.LIVE:
            read = self.subscription.next_read(fanout.position, 10)
            if read is not None:
                self.subscription.rows_read(read, [], True, fanout.form)
        fanout.join(self.subscription, self)
        return self

    @property
    def events(self) -> list[Event]:
        found, data = [], self.data
        while data:
            length, start = data[1], 2
            if length == 126:
                length, start = int.from_bytes(data[2:4], "big"), 4
            message = decode_relay_message(data[start : start + length])
            assert isinstance(message, Event)
            found.append(message)
            data = data[start + length :]
        return found


LOG = [entry(1, PLAIN), entry(2, CLAIMED, FOUND), entry(3, PLAIN)]


def by_history(form: events.Form, **request: Any) -> list[Event]:
    reader = Reader(at=3, limit=10, **request)
    read = reader.subscription.next_read(3, 10)
    assert read is not None
    reader.data, _ = reader.subscription.rows_read(read, [row(logged) for logged in LOG], True, form)
    return reader.events


def by_catching_up(form: events.Form, **request: Any) -> list[Event]:
    reader = Reader(limit=0, **request)
    read = reader.subscription.next_read(3, 10)
    assert read is not None
    reader.subscription.rows_read(read, [], True, form)
    read = reader.subscription.next_read(3, 10)
    assert read is not None
    reader.data, _ = reader.subscription.rows_read(read, [row(logged) for logged in LOG], True, form)
    return reader.events


def by_memory(form: events.Form, **request: Any) -> list[Event]:
    reader = Reader(limit=0, **request)
    read = reader.subscription.next_read(3, 10)
    assert read is not None
    reader.subscription.rows_read(read, [], True, form)
    reader.data, _ = reader.subscription.entries_read(LOG, NOW, 3, form)
    return reader.events


def by_fan_out(form: events.Form, **request: Any) -> list[Event]:
    fanout = Fanout(CODEC, 0, form=form)
    reader = Reader(**request).go_live(fanout)
    fanout.dispatch(LOG, NOW)
    return reader.events


every_way = pytest.mark.parametrize("way", [by_history, by_catching_up, by_memory, by_fan_out])


@pytest.mark.req("R-206", "R-208", "R-209")
@every_way
def test_a_downgraded_packet_is_served_rewritten_with_what_restores_it(way):
    first, middle, last = way("rewrite")
    for event in (first, last):
        assert (bytes(event.packet), event.relay_annotations) == (PLAIN.canonical, None)
    served = bytes(middle.packet)
    assert b'"origin_type":"UNKNOWN"' in served and b"client_attestation" not in served
    assert middle.received_at == NOW + 2
    assert middle.relay_annotations == {
        "provenance": {
            "effective_origin_type": "UNKNOWN",
            "claimed_origin_type": "SOFTWARE",
            "reason": "client_attestation_invalid",
            "original_provenance_header": HEADER,
        }
    }
    packet, origin = restore(served, middle.relay_annotations)
    packet.verify()
    assert (packet.packet_id, origin) == (CLAIMED.packet_id, "UNKNOWN")


@pytest.mark.req("R-210")
@every_way
def test_where_the_relay_annotates_the_packet_is_as_signed(way):
    middle = way("annotate")[1]
    assert bytes(middle.packet) == CLAIMED.canonical
    assert middle.relay_annotations is not None
    assert middle.relay_annotations["provenance"]["effective_origin_type"] == "UNKNOWN"


@pytest.mark.req("R-211")
@every_way
@pytest.mark.parametrize("form", ["rewrite", "annotate"])
def test_a_peer_gets_what_was_signed_and_judges_it_itself(way, form):
    for event, logged in zip(way(form, signed=True), LOG, strict=True):
        assert (bytes(event.packet), event.relay_annotations) == (logged.packet.body, None)


@pytest.mark.req("R-208", "R-211")
def test_one_batch_goes_out_in_every_form_at_once_each_made_once(monkeypatch):
    made = []

    def recorded(*arguments, **options):
        made.append(arguments)
        return served(*arguments, **options)

    monkeypatch.setattr(events, "served", recorded)
    fanout = Fanout(CODEC, 0)
    asked = itertools.product(range(3), [False, True], [False, True])
    readers = {}
    for number, signed, live_cursors in asked:
        reader = Reader(name=f"s{number}", signed=signed).go_live(fanout)
        reader.subscription.live_cursors = live_cursors
        readers[number, signed, live_cursors] = reader
    fanout.dispatch(LOG, NOW)
    for (_, signed, live_cursors), reader in readers.items():
        assert len(reader.events) == 3
        for event, logged in zip(reader.events, LOG, strict=True):
            annotated = logged is LOG[1] and not signed
            assert (bytes(event.packet) == logged.packet.body) is not annotated
            assert (event.relay_annotations is not None) is annotated
            assert event.cursor == (CODEC.encode(logged.sequence) if live_cursors else None)
    assert len(made) == 2, "with and without a cursor"


@pytest.mark.req("R-167", "R-170")
def test_who_has_no_room_for_a_batch_reads_on_from_before_it():
    behind = []

    class Full(Reader):
        def deliver(self, frames: bytes, events: int) -> bool:
            return False

        def fell_behind(self, subscription: FeedSubscription) -> None:
            behind.append(subscription)

    fanout = Fanout(CODEC, 0)
    full, quick = Full().go_live(fanout), Reader().go_live(fanout)
    assert fanout.dispatch([entry(1, PLAIN), entry(2, PLAIN)], NOW) == 2
    assert behind == [full.subscription] and len(quick.events) == 2
    assert full.subscription.phase is FeedPhase.CATCHING_UP and full.subscription.position == 0
    fanout.dispatch([entry(3, PLAIN)], NOW)
    assert len(quick.events) == 3 and len(behind) == 1


@given(
    rows=st.lists(
        st.tuples(
            st.integers(1, 2**62),
            st.integers(0, 2**40),
            st.sampled_from([PLAIN.canonical, CLAIMED.canonical, b"{}", b"x" * 200, b"x" * 70_000]),
            st.booleans(),
        ),
        max_size=8,
    ),
    with_cursor=st.booleans(),
    ascending=st.booleans(),
    form=st.sampled_from(["rewrite", "annotate", "signed"]),
)
def test_a_page_is_the_same_frames_as_its_rows_one_by_one(rows, with_cursor, ascending, form):
    stored = [
        StoredPacket(n, at, body, FOUND.encode() if downgraded and body == CLAIMED.canonical else None)
        for n, at, body, downgraded in rows
    ]
    head, expected = event_head("s"), b""
    for n, at, body, annotation in stored:
        cursor = CODEC.encode_bytes(n, ascending=ascending) if with_cursor else None
        if annotation is None:
            tail = event_tail(body, at, cursor)
        else:
            tail = annotated_tail(body, annotation, at, cursor, form)
        expected += event_frames(head, [tail])
    cursors = CODEC if with_cursor else None
    assert row_frames(head, stored, cursors, ascending=ascending, form=form) == expected


# Policy.


def ids(reader: Reader) -> list[str]:
    return [packets.Packet.parse(bytes(event.packet)).packet_id for event in reader.events]


@pytest.mark.req("R-323")
@pytest.mark.parametrize(
    "declined",
    [
        Declined(authors=frozenset({BOB.did})),
        Declined(types=frozenset({"VOTE"})),
        Declined(packet_ids=frozenset({(UNWANTED := make(BOB, "VOTE")).digest})),
    ],
)
def test_what_is_declined_passes_by_and_the_feed_goes_on(declined):
    fanout = Fanout(CODEC, 0)
    reader = Reader().go_live(fanout)
    fanout.declined = declined
    assert fanout.dispatch([entry(1, PLAIN), entry(2, UNWANTED)], NOW) == 1
    assert fanout.dispatch([entry(3, UNWANTED)], NOW) == 0
    assert fanout.position == 3
    assert ids(reader) == [PLAIN.packet_id]


@pytest.mark.req("R-323")
def test_media_on_the_list_are_declined_by_the_packets_that_refer_to_them():
    wanted, unwanted = ("0x" + digit * 64 for digit in "12")
    made = [
        packets.build(
            ALICE,
            {"type": "POST", "media": [{"media_hash": hash_} for hash_ in hashes]},
            timestamp=NOW,
            provenance_header={"origin_type": "UNKNOWN", "genesis_media_hash": unwanted, "edit_history": []},
        )
        for hashes in ([wanted], [wanted, unwanted])
    ]
    fanout = Fanout(CODEC, 0)
    reader = Reader().go_live(fanout)
    fanout.declined = Declined(media_hashes=frozenset({unwanted}))
    fanout.dispatch([entry(n, packet) for n, packet in enumerate(made, 1)], NOW)
    assert ids(reader) == [made[0].packet_id]


@pytest.mark.req("R-323")
def test_a_new_policy_binds_the_next_batch_and_what_memory_still_holds():
    fanout = Fanout(CODEC, 0)
    fanout.dispatch([entry(1, PLAIN), entry(2, UNWANTED)], NOW)
    reader = Reader(at=2).go_live(fanout)
    fanout.declined = Declined(authors=frozenset({BOB.did}))
    assert [logged.sequence for logged in fanout.recent_after(0) or ()] == [1]
    fanout.dispatch([entry(3, UNWANTED), entry(4, PLAIN)], NOW)
    assert ids(reader) == [PLAIN.packet_id]
    # A reader behind the skipped entry still stands where the feed does.
    assert fanout.recent_after(3) == [entry(4, PLAIN)]
    fanout.declined = Declined()
    assert [logged.sequence for logged in fanout.recent_after(0) or ()] == [1, 2, 3, 4]

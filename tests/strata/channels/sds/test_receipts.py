"""Receipts: what a participant has received, in a few bytes, where filters are not needed (decision 0046)."""

from __future__ import annotations

import math

import pytest
from strata.channels.messaging.binding import build_packet
from strata.channels.messaging.values import MessageEnvelope
from strata.channels.sds import (
    AckedBy,
    Acknowledged,
    BloomParameters,
    Delivered,
    HistoryEntry,
    Kind,
    OutgoingState,
    Participant,
    SdsConfig,
    SdsEvent,
    SdsMessage,
    SendSync,
)
from strata.channels.sds.bodies import Body
from strata.channels.sds.log import LoggedMessage, MessageLog, Unreferenced
from strata.channels.sds.receipts import Debts, read_receipts, receipt, write_receipts
from strata.protocol.ids import Identity

T = 1_760_000_000_000
HOUR = 3_600_000


def join(
    name: str, *, receipts: bool = True, config: SdsConfig | None = None, chance: float = 0.5
) -> Participant:
    return Participant(
        "room", name, config or SdsConfig(), now_ms=T, random=lambda: chance, receipts=receipts
    )


def say(sender: Participant, text: str, now: int = T) -> SdsMessage:
    message = sender.wrap(text.encode(), now, hash((sender.sender_id, text)))
    sender.dispatched(message.message_id, now)
    return message


def next_sync(participant: Participant, *, within: int = 120_000, now: int = T) -> SdsMessage:
    """The next sync that a participant sends on its own."""
    while (at := math.ceil(participant.get_timer())) <= now + within:
        participant.handle_timer(at)
        for event in participant.events():
            if isinstance(event, SendSync):
                message = SdsMessage.decode(event.data)
                assert message is not None
                return message
    raise AssertionError("no sync came")


def acknowledged(events: list[SdsEvent]) -> dict[str, AckedBy]:
    return {event.message_id: event.by for event in events if isinstance(event, Acknowledged)}


@pytest.mark.req("C-093", "C-136")
def test_one_list_acknowledges_all_that_was_received() -> None:
    alice, bob = join("alice"), join("bob")
    sent = [say(alice, f"message {number}") for number in range(100)]
    for message in sent:
        assert message.bloom_filter is None
        bob.receive(message.encode(), T)
    sync = next_sync(bob, within=2_500)
    assert sync.bloom_filter is None
    assert len(sync.encode()) < 1_100
    alice.receive(sync.encode(), T + 2_500)
    assert alice.outgoing() == {}
    found = acknowledged(alice.events())
    assert set(found) == {message.message_id for message in sent}
    assert found[sent[0].message_id] is AckedBy.RECEIPT
    assert found[sent[-1].message_id] is AckedBy.HISTORY


def test_a_reply_lists_what_it_acknowledges_and_spares_the_sync() -> None:
    alice, bob = join("alice"), join("bob")
    sent = [say(alice, f"message {number}").message_id for number in range(20)]
    for message_id in sent:
        data = alice.encoded(message_id)
        assert data is not None
        bob.receive(data, T)
    alice.receive(say(bob, "reply").encode(), T)
    assert alice.outgoing() == {}
    assert bob.get_timer() > T + 2_500


@pytest.mark.req("C-096", "C-103", "C-121")
def test_whoever_does_not_list_reads_everything_and_gets_filters_from_its_first_word_on() -> None:
    new, old = join("new"), join("old", receipts=False)
    first = say(new, "first")
    assert first.bloom_filter is None
    old.receive(first.encode(), T)
    assert [event.content for event in old.events() if isinstance(event, Delivered)] == [b"first"]
    word = say(old, "word")
    assert word.receipts is None
    new.receive(word.encode(), T)
    assert new.outgoing() == {}
    for later in (T + 1, T + HOUR):
        answer = say(new, f"answer {later}", later)
        assert answer.bloom_filter is not None
        assert answer.receipts is not None
    old.receive(answer.encode(), T + HOUR)
    assert old.outgoing() == {}
    # Not heard from for an hour: it has left, or has learned to list.
    assert say(new, "later", T + HOUR + 1).bloom_filter is None


def test_messages_of_old_from_the_store_bring_no_filters_back() -> None:
    new = join("new")
    old = Participant("room", "old", now_ms=T - 2 * HOUR, random=lambda: 0.5)
    new.receive(old.wrap(b"long ago", T - 2 * HOUR, 1).encode(), T)
    assert say(new, "now").bloom_filter is None


def test_a_message_that_is_sent_again_is_listed_again() -> None:
    alice, bob = join("alice"), join("bob")
    data = say(alice, "one").encode()
    bob.receive(data, T, b"first packet")
    next_sync(bob)  # alice never gets it
    bob.receive(data, T + 5_000, b"first packet")
    assert bob.get_timer() > T + 8_000, "a copy of the same packet asks for nothing"
    bob.receive(data, T + 5_000, b"second packet")
    sync = next_sync(bob, within=2_500, now=T + 5_000)
    alice.receive(sync.encode(), T + 7_500)
    assert alice.outgoing() == {}


@pytest.mark.req("C-093")
def test_a_message_that_was_passed_over_is_not_acknowledged_when_it_comes_again() -> None:
    alice, bob = join("alice"), join("bob")
    before = say(alice, "before bob's time")
    bob.pass_over([before.message_id], T)
    bob.receive(say(alice, "in his time").encode(), T)
    bob.receive(before.encode(), T + 5_000, b"second packet")
    assert [event.content for event in bob.events() if isinstance(event, Delivered)] == [b"in his time"]
    alice.receive(next_sync(bob, now=T + 5_000).encode(), T + 7_500)
    assert list(alice.outgoing()) == [before.message_id]


def test_more_than_a_list_may_hold_takes_a_filter() -> None:
    alice, bob = join("alice"), join("bob")
    for number in range(1_100):
        bob.receive(say(alice, f"message {number}").encode(), T)
    sync = next_sync(bob)
    assert sync.bloom_filter is not None
    alice.receive(sync.encode(), T + 2_500)
    alice.receive(next_sync(bob).encode(), T + 5_000)
    assert set(alice.outgoing().values()) <= {OutgoingState.POSSIBLY_ACKNOWLEDGED}
    alice.receive(next_sync(bob).encode(), T + 9_000)
    assert alice.outgoing() == {}


def test_a_list_shows_what_a_peer_lacks_as_a_filter_does() -> None:
    bob, carol = join("bob"), join("carol")
    for number, text in enumerate(("m1", "m2", "m3")):
        data = stranger(text, T + number)
        bob.receive(data, T)
        if text != "m1":  # no message names m1, because a history has two entries
            carol.receive(data, T)
    now = T + 20_000
    next_sync(bob, now=now)
    bob.receive(next_sync(carol).encode(), now)
    named = [entry.message_id for entry in next_sync(bob, now=now).causal_history]
    assert named == ["m1", "m2", "m3"]


def test_what_peers_lack_is_bounded_for_whoever_sends_no_syncs() -> None:
    log = MessageLog()
    lacking = Unreferenced(log, BloomParameters(10_000, 0.001), 0, limit=8, mark=lambda kind, key: None)
    for number in range(2_000):
        named = [] if not number else [str(number - 1)]
        log.add(LoggedMessage(str(number), "alice", number, Body(b""), arrival=number))
        lacking.logged(str(number), named, number)
        lacking.compare_receipts(frozenset(), number)
    assert len(lacking._lacked) == 1_024
    assert lacking.take_lacked([]) == [str(number) for number in range(8)]
    lacking.compare_receipts(frozenset(), 2_000)
    assert lacking.take_lacked([]) == ["1999"]


def stranger(message_id: str, lamport: int = T, receipts: bytes | None = b"") -> bytes:
    return SdsMessage("mallory", message_id, "room", lamport, content=b"x", receipts=receipts).encode()


@pytest.mark.req("C-302")
def test_whoever_lacks_what_others_list_says_so_however_many_there_are() -> None:
    """In a crowd each participant seldom syncs, and nobody notices the lack of a message that none names."""
    alice, bob = join("alice"), join("bob")
    third = SdsMessage("mallory", "m1", "room", T, content=b"x", receipts=b"")
    others = [SdsMessage(f"p{n}", f"p{n}", "room", T + n, content=b"x", receipts=b"") for n in range(100)]
    for each in (third, *others):
        alice.receive(each.encode(), T + 100)
        if each is not third:  # no message names it, because all were sent at once
            bob.receive(each.encode(), T + 100)

    def listing(lamport: int, *messages: SdsMessage) -> bytes:
        listed = write_receipts([each.message_id for each in (*others, *messages)])
        return SdsMessage("p0", f"sync {lamport}", "room", lamport, receipts=listed).encode()

    next_sync(bob)  # acknowledges the messages of the others
    bob.receive(listing(T + 20_000, third), T + 20_000)
    bob.receive(listing(T + 25_000, third), T + 25_000)
    assert bob.get_timer() > T + 60_000, "it may be on its way"
    bob.receive(listing(T + 31_000, third), T + 31_000)
    assert bob.get_timer() <= T + 61_000
    sync = next_sync(bob, now=T + 31_000)
    alice.receive(sync.encode(), T + 60_000)
    named = next_sync(alice, now=T + 60_000)
    bob.receive(named.encode(), T + 90_000)
    assert third.message_id in {each.message_id for each in bob.missing()}


def test_nobody_speaks_for_what_all_lack_nor_again_and_again_for_one_receipt() -> None:
    bob = join("bob")
    others = [SdsMessage(f"p{n}", f"p{n}", "room", T, content=b"x", receipts=b"") for n in range(100)]
    for each in others:
        bob.receive(each.encode(), T)
    next_sync(bob)
    here = write_receipts([each.message_id for each in others])

    def sync(lamport: int, receipts: bytes) -> None:
        message = SdsMessage("p0", f"sync {lamport}", "room", lamport, receipts=here + receipts)
        bob.receive(message.encode(), lamport)

    for n in range(10):
        sync(T + 20_000 * (n + 1), b"forged")
        sync(T + 20_000 * (n + 1) + 100, b"")  # another participant lacks it too, and has said so
    assert bob.get_timer() > T + 260_000
    spoken = 0
    for n in range(12):
        now = T + 230_000 + 30_000 * n
        sync(now, b"forged")
        hastened = bob.get_timer() <= now + 30_000
        spoken += hastened
        if hastened:
            next_sync(bob, now=now)
    assert 0 < spoken <= 4


@pytest.mark.parametrize("size", [1, 5, 7, 6 * 2_001, 600_000])
def test_a_list_that_makes_no_sense_says_nothing(size: int) -> None:
    alice = join("alice")
    one = say(alice, "one").message_id
    sync = SdsMessage("bob", "s", "room", T, receipts=receipt(one) * (size // 6) + b"\x00" * (size % 6))
    assert sync.kind is Kind.SYNC
    alice.receive(sync.encode(), T)
    assert alice.outgoing() == {one: OutgoingState.UNACKNOWLEDGED}


def test_a_message_that_never_went_out_is_in_no_list() -> None:
    alice = join("alice")
    one = alice.wrap(b"one", T, 1).message_id
    alice.receive(stranger("m", receipts=write_receipts([one])), T)
    assert one in alice.outgoing()


@pytest.mark.req("C-096")
def test_a_list_is_a_field_that_others_skip() -> None:
    message = SdsMessage("a", "m", "room", T, (HistoryEntry("h"),), None, (), b"x")
    listing = SdsMessage("a", "m", "room", T, (HistoryEntry("h"),), None, (), b"x", b"\x01" * 6)
    # Field 1001 of type bytes, after all fields of the document.
    assert listing.encode() == message.encode() + b"\xca\x3e\x06" + b"\x01" * 6
    assert SdsMessage.decode(listing.encode()) == listing


def test_debts_are_bounded_and_say_so() -> None:
    debts = Debts(2)
    for number in range(2_000):
        debts.add(str(number), "alice")
    assert len(debts) == 1_024
    assert debts.overflown
    assert debts.pay_listed(read_receipts(write_receipts(map(str, range(10)))), "bob") == 10
    assert debts.pay(["20"], payer="alice") == 0, "nobody acknowledges its own message"
    debts.filter_sent()
    debts.filter_sent()
    assert (len(debts), debts.overflown) == (0, False)


def wire_bytes(message: SdsMessage, author: Identity) -> int:
    envelope = MessageEnvelope(content_topic="/chat/1/room/proto", payload=message.encode())
    return build_packet(author, envelope, now=T // 1000, nonce="0x" + "00" * 16).size_bytes


def test_a_message_of_a_hundred_bytes_in_a_room_of_ten_takes_two_kilobytes() -> None:
    """A thousand messages have been sent; with the filter the message would take 26 KB."""
    author = Identity.generate()
    alice, *others = [join(f"{number:032x}") for number in range(10)]
    for number in range(100):
        now = T + 1_000 * number
        for place, other in enumerate(others):
            message = other.wrap(b"." * 100, now, 10 * number + place)
            alice.receive(message.encode(), now, bytes(32))
        message = alice.wrap(b"." * 100, now, number)
        assert wire_bytes(message, author) <= 2_048
        alice.dispatched(message.message_id, now, bytes(32))
    assert len(alice.log()) == 1_000
    alice.receive(stranger("one more", now), now)
    assert wire_bytes(next_sync(alice, now=now), author) <= 2_048

"""A participant: sending, receiving, acknowledging, repairing; bytes in, bytes and events out."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import pytest
from strata.channels.sds import (
    AckedBy,
    Acknowledged,
    BloomFilter,
    BloomParameters,
    Delivered,
    DeliveryFailed,
    EphemeralReceived,
    HistoryEntry,
    Kind,
    Lost,
    MissingFound,
    OutgoingFull,
    OutgoingState,
    Participant,
    PossiblyAcknowledged,
    Retransmit,
    SdsConfig,
    SdsEvent,
    SdsMessage,
    SdsState,
    SendRepair,
    SendSync,
)
from strata.channels.sds.state import KnownRecord, LogRecord

E = TypeVar("E", bound=SdsEvent)

T = 1_760_000_000_000
HINT = bytes(range(32))
QUIET = SdsConfig(sync_min_interval_ms=0)
PARAMETERS = BloomParameters(10_000, 0.001)


def join(name: str, config: SdsConfig = QUIET, *, chance: float = 0.5, channel: str = "room") -> Participant:
    return Participant(channel, name, config, now_ms=T, random=lambda: chance)


def say(sender: Participant, text: str, now: int = T, *, dispatch: bool = True) -> SdsMessage:
    message = sender.wrap(text.encode(), now, zlib.crc32(text.encode()))
    if dispatch:
        sender.dispatched(message.message_id, now)
    return message


def stranger(
    message_id: str,
    *history: str,
    lamport: int = T,
    content: bytes | None = b"x",
    has: tuple[str, ...] = (),
    asks: tuple[HistoryEntry, ...] = (),
    sender: str = "mallory",
) -> bytes:
    """A message built by hand; `has` are the ids in its filter."""
    bloom_filter = BloomFilter(PARAMETERS)
    for each in has:
        bloom_filter.insert(each)
    entries = tuple(HistoryEntry(each) for each in history)
    return SdsMessage(
        sender, message_id, "room", lamport, entries, bloom_filter.to_bytes(), asks, content
    ).encode()


def of(kind: type[E], events: Sequence[SdsEvent]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def run_until(participant: Participant, end: int) -> list[SdsEvent]:
    """Run the timer up to `end`, sending nothing; retransmissions count as dispatched."""
    events: list[SdsEvent] = []
    while (at := participant.get_timer()) <= end:
        now = math.ceil(at)
        participant.handle_timer(now)
        for event in participant.events():
            if isinstance(event, Retransmit):
                participant.dispatched(event.message_id, now)
            events.append(event)
    return events


# Sending


@pytest.mark.req("C-097", "C-099", "C-100", "C-105", "C-108")
def test_what_a_message_carries() -> None:
    alice = join("alice")
    alice.receive(stranger("m1", lamport=T - 5), T)
    first = say(alice, "one")
    assert (first.sender_id, first.channel_id, first.content) == ("alice", "room", b"one")
    assert first.lamport_timestamp == T + 1
    assert first.kind is Kind.CONTENT
    expected = BloomFilter(PARAMETERS)
    expected.insert("m1")
    assert first.bloom_filter == expected.to_bytes()
    assert say(alice, "later", T + 500).lamport_timestamp == T + 500
    assert Participant(None, "a", now_ms=T, random=lambda: 0.5).wrap(b"x", T, 1).channel_id == "0"


@pytest.mark.req("C-098", "C-063")
def test_equal_content_gets_ids_of_its_own() -> None:
    alice = join("alice")
    ids = {alice.wrap(b"same", T, number).message_id for number in range(3)}
    assert len(ids) == 3
    with pytest.raises(ValueError, match="before"):
        alice.wrap(b"same", T, 2)


@pytest.mark.req("C-106", "C-107", "C-142")
def test_the_history_names_the_last_two_with_hint_and_sender() -> None:
    alice = join("alice")
    alice.receive(stranger("m1", lamport=T - 3), T)
    alice.receive(stranger("m3", lamport=T - 1), T, HINT)
    alice.receive(stranger("m2", lamport=T - 2), T)
    message = alice.wrap(b"x", T, 1)
    assert message.causal_history == (
        HistoryEntry("m2", None, "mallory"),
        HistoryEntry("m3", HINT, "mallory"),
    )
    plain = join("bob", replace(QUIET, enable_repair=False))
    plain.receive(stranger("m1"), T)
    # Others may repair, even if this participant does not.
    assert plain.wrap(b"x", T, 1).causal_history == (HistoryEntry("m1", None, "mallory"),)


def test_an_amended_history_names_the_senders_too() -> None:
    for config in (QUIET, replace(QUIET, enable_repair=False)):
        alice = join("alice", config)
        alice.receive(stranger("m1", lamport=T - 1), T)
        refused, kept = say(alice, "refused", dispatch=False), say(alice, "kept", dispatch=False)
        assert refused.message_id in kept.history_ids
        alice.failed(refused.message_id)
        assert alice.amend(kept.message_id)
        amended = SdsMessage.decode(alice.encoded(kept.message_id) or b"")
        assert amended is not None
        assert amended.causal_history == (HistoryEntry("m1", None, "mallory"),)


@pytest.mark.req("C-109", "C-110", "C-071")
def test_registered_messages_are_named_dispatched_ones_are_in_the_filter_failed_ones_nowhere() -> None:
    alice = join("alice", SdsConfig())
    one = say(alice, "one", dispatch=False)
    assert alice.outgoing() == {one.message_id: OutgoingState.UNACKNOWLEDGED}
    two = say(alice, "two", dispatch=False)
    assert two.causal_history == (HistoryEntry(one.message_id, None, "alice"),)
    assert two.bloom_filter == BloomFilter(PARAMETERS).to_bytes()
    assert of(SendSync, run_until(alice, T + 29_000)) == []  # nothing that others could have
    alice.dispatched(one.message_id, T + 29_000, HINT)
    (sync,) = of(SendSync, run_until(alice, T + 31_000))
    sent = SdsMessage.decode(sync.data)
    assert sent is not None
    assert sent.causal_history == (HistoryEntry(one.message_id, HINT, "alice"),)
    only_one = BloomFilter(PARAMETERS)
    only_one.insert(one.message_id)
    assert sent.bloom_filter == only_one.to_bytes()
    alice.failed(two.message_id)
    three = say(alice, "three", T + 31_000)
    assert [entry.message_id for entry in three.causal_history] == [one.message_id]
    assert two.message_id not in alice.outgoing()
    assert two.message_id not in [entry.message_id for entry in alice.log()]


@pytest.mark.req("C-015", "C-100")
def test_empty_content_never_leaves() -> None:
    alice = join("alice")
    with pytest.raises(ValueError, match="content"):
        alice.wrap(b"", T, 1)
    with pytest.raises(ValueError, match="content"):
        alice.wrap_ephemeral(b"", 1)


@pytest.mark.req("C-095")
def test_unacknowledged_messages_are_bounded() -> None:
    alice = join("alice", replace(QUIET, max_unacknowledged=2))
    say(alice, "one")
    say(alice, "two")
    with pytest.raises(OutgoingFull):
        say(alice, "three")


@pytest.mark.parametrize("name", ["", "x" * 257, "é" * 129])
@pytest.mark.req("C-002")
def test_ids_that_are_empty_or_too_long_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="256"):
        join(name)
    with pytest.raises(ValueError, match="256"):
        join("alice", channel=name)


# Retransmission


@pytest.mark.req("C-067", "C-083", "C-084", "C-085", "C-086", "C-090", "C-127")
def test_unacknowledged_messages_go_out_again_unchanged_until_none_are_left() -> None:
    alice = join("alice")
    message = say(alice, "one", dispatch=False)
    assert run_until(alice, T + 60_000) == []  # the timer does not run before dispatch
    alice.dispatched(message.message_id, T + 60_000)
    times = []
    while not of(DeliveryFailed, events := run_until(alice, now := math.ceil(alice.get_timer()))):
        assert events == [Retransmit(message.message_id, message.encode())]
        times.append(now)
    assert times == [T + 60_000 + 5_000 * (number + 1) for number in range(5)]
    assert now == T + 90_000
    assert events == [DeliveryFailed(message.message_id)]
    assert alice.get_timer() == math.inf


@pytest.mark.req("C-036")
def test_without_retransmissions_the_failure_comes_after_one_timeout() -> None:
    alice = join("alice", replace(QUIET, max_retransmissions=0))
    message = say(alice, "one")
    assert run_until(alice, T + 4_999) == []
    assert run_until(alice, T + 5_000) == [DeliveryFailed(message.message_id)]


@pytest.mark.req("C-055")
def test_a_late_acknowledgement_still_counts() -> None:
    alice = join("alice", replace(QUIET, max_retransmissions=0))
    message = say(alice, "one")
    run_until(alice, T + 5_000)
    alice.receive(stranger("m", message.message_id), T + 9_000)
    assert of(Acknowledged, alice.events()) == [Acknowledged(message.message_id, AckedBy.HISTORY, "mallory")]
    alice.receive(stranger("n", message.message_id), T + 9_000)
    assert of(Acknowledged, alice.events()) == []


@pytest.mark.req("C-087", "C-128")
def test_possibly_acknowledged_messages_wait_longer_and_go_last() -> None:
    alice = join("alice")
    one, two = say(alice, "one"), say(alice, "two", T + 5_000)
    alice.receive(stranger("m", has=(one.message_id,)), T + 5_000)
    alice.events()
    assert run_until(alice, T + 9_999) == []
    events = run_until(alice, T + 10_000)
    assert [event.message_id for event in of(Retransmit, events)] == [two.message_id, one.message_id]


@pytest.mark.req("C-088")
def test_offline_no_timer_runs() -> None:
    alice = join("alice")
    message = say(alice, "one")
    alice.set_online(False, T + 1_000)
    assert alice.get_timer() == math.inf
    alice.handle_timer(T + 60_000)
    assert alice.events() == []
    alice.set_online(True, T + 60_000)
    assert run_until(alice, T + 63_999) == []
    assert of(Retransmit, run_until(alice, T + 64_000)) == [Retransmit(message.message_id, message.encode())]


def test_a_clock_that_steps_back_delays_nothing() -> None:
    alice = join("alice")
    message = say(alice, "one")
    alice.receive(b"", T - 3_600_000)
    assert alice.get_timer() == T - 3_600_000 + 5_000
    assert len(of(Retransmit, run_until(alice, T - 3_595_000))) == 1
    assert say(alice, "two", T - 3_595_000).lamport_timestamp == (message.lamport_timestamp or 0) + 1


# Acknowledgement


@pytest.mark.req("C-092", "C-093", "C-094", "C-104", "C-120", "C-122", "C-113")
def test_the_states_of_an_outgoing_message() -> None:
    alice = join("alice")
    ids = [say(alice, text).message_id for text in ("one", "two")]
    assert set(alice.outgoing().values()) == {OutgoingState.UNACKNOWLEDGED}
    alice.receive(stranger("own", ids[0], sender="alice"), T)
    assert alice.events() == []  # one's own echo acknowledges nothing
    alice.receive(stranger("s", lamport=1, content=None, has=tuple(ids)), T)
    assert alice.events() == [PossiblyAcknowledged(each, 1) for each in ids]
    assert set(alice.outgoing().values()) == {OutgoingState.POSSIBLY_ACKNOWLEDGED}
    alice.receive(stranger("s", ids[0], lamport=2, content=None), T)
    assert alice.events() == [Acknowledged(ids[0], AckedBy.HISTORY, "mallory")]
    alice.receive(stranger("s", lamport=3, content=None, has=tuple(ids)), T)
    assert alice.events() == [Acknowledged(ids[1], AckedBy.FILTERS, "mallory")]
    assert alice.outgoing() == {}


@pytest.mark.req("C-120")
def test_every_id_that_a_history_names_is_acknowledged() -> None:
    alice = join("alice")
    ids = [say(alice, text).message_id for text in ("one", "two", "three")]
    alice.receive(stranger("s", ids[0], ids[2], lamport=1, content=None), T)
    assert alice.events() == [Acknowledged(each, AckedBy.HISTORY, "mallory") for each in (ids[0], ids[2])]
    assert list(alice.outgoing()) == [ids[1]]


@pytest.mark.req("C-121", "C-041")
def test_one_filter_counts_once_however_often_it_comes() -> None:
    alice = join("alice")
    message_id = say(alice, "one").message_id
    for _ in range(3):
        alice.receive(stranger("sync", lamport=7, content=None, has=(message_id,)), T)
    assert alice.events() == [PossiblyAcknowledged(message_id, 1)]
    content = stranger("m", lamport=8, has=(message_id,))
    alice.receive(content, T)
    assert of(Acknowledged, alice.events()) == [Acknowledged(message_id, AckedBy.FILTERS, "mallory")]


@pytest.mark.req("C-110")
def test_what_never_went_out_is_in_nobodys_filter_whatever_it_seems() -> None:
    alice = join("alice")
    message_id = say(alice, "one", dispatch=False).message_id
    alice.receive(stranger("s", lamport=1, content=None, has=(message_id,)), T)
    assert alice.events() == []
    assert alice.outgoing() == {message_id: OutgoingState.UNACKNOWLEDGED}


@pytest.mark.req("C-122")
def test_filters_may_count_once_for_each_sender() -> None:
    alice = join("alice", replace(QUIET, possible_acks_from_distinct_senders=True))
    message_id = say(alice, "one").message_id
    for lamport in range(1, 5):
        alice.receive(stranger("s", lamport=lamport, content=None, has=(message_id,)), T)
    assert alice.events() == [PossiblyAcknowledged(message_id, 1)]
    alice.receive(stranger("s", lamport=1, content=None, has=(message_id,), sender="carol"), T)
    assert of(Acknowledged, alice.events()) == [Acknowledged(message_id, AckedBy.FILTERS, "carol")]


@pytest.mark.req("C-123")
def test_five_chunks_are_acknowledged_by_one_sync_that_names_two() -> None:
    alice, bob = join("alice"), join("bob", SdsConfig())
    for text in "12345":
        bob.receive(say(alice, text).encode(), T)
    (sync,) = of(SendSync, run_until(bob, T + 2_500))
    alice.receive(sync.data, T + 2_500)
    assert [event.by for event in of(Acknowledged, alice.events())] == [AckedBy.HISTORY] * 2 + [
        AckedBy.DESCENDANT
    ] * 3
    assert alice.outgoing() == {}


@pytest.mark.req("C-123")
def test_what_no_named_message_follows_or_the_filter_lacks_is_not_inferred() -> None:
    alice = join("alice")
    one, two, three = (say(alice, text).message_id for text in "123")
    alice.receive(stranger("m", two, has=(one, three)), T)
    # `one` is followed by `two` and in the filter; `three` is not followed; `two` is named, so it is certain.
    events = alice.events()
    assert {event.message_id for event in of(Acknowledged, events)} == {one, two}
    assert of(PossiblyAcknowledged, events) == [PossiblyAcknowledged(three, 1)]
    other = join("bob")
    one, two = (say(other, text).message_id for text in "12")
    other.receive(stranger("m", two, has=()), T)
    assert other.outgoing() == {one: OutgoingState.UNACKNOWLEDGED}


@pytest.mark.req("C-136")
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.7, 0.999])
def test_a_silent_receiver_acknowledges_before_the_sender_would_send_again(chance: float) -> None:
    alice, bob = join("alice", SdsConfig()), join("bob", SdsConfig(), chance=chance)
    bob.receive(say(alice, "one").encode(), T)
    events = run_until(bob, T + 2_500)
    assert len(of(SendSync, events)) >= 1
    alice.receive(of(SendSync, events)[0].data, T + 2_500)
    assert alice.outgoing() == {}


@pytest.mark.req("C-103")
def test_a_filter_of_another_size_is_ignored() -> None:
    alice = join("alice")
    message_id = say(alice, "one").message_id
    foreign = SdsMessage("mallory", "m", "room", T, (), b"\xff" * 100, (), b"x")
    alice.receive(foreign.encode(), T)
    assert [type(event) for event in alice.events()] == [Delivered]
    assert alice.outgoing() == {message_id: OutgoingState.UNACKNOWLEDGED}


@pytest.mark.req("C-121", "C-122")
@pytest.mark.parametrize(
    ("ids", "believed"), [(10_000, True), (14_000, True), (16_000, False), (30_000, False)]
)
def test_a_filter_that_was_never_rolled_over_acknowledges_nothing(ids: int, believed: bool) -> None:
    """With 30 000 ids, it would contain every fourth message that was never received."""
    alice = join("alice")
    held = say(alice, "held").message_id
    lost = [say(alice, f"lost {number}").message_id for number in range(50)]
    full = BloomFilter(PARAMETERS)
    full.insert(held)
    for number in range(ids):
        full.insert(f"of another implementation {number}")
    for number in range(2):
        sync = SdsMessage("bob", f"s{number}", "room", T + number, (), full.to_bytes())
        alice.receive(sync.encode(), T)
    assert (held not in alice.outgoing()) is believed
    assert set(lost) <= set(alice.outgoing())
    assert alice.statistics.overfull_filters == (0 if believed else 2)


# Receiving


@pytest.mark.req("C-115", "C-116", "C-117", "C-114", "C-111", "C-112", "C-101", "C-166")
def test_messages_wait_for_what_they_follow_and_come_once() -> None:
    bob = join("bob")
    assert bob.lamport == T
    bob.receive(stranger("m2", "m1", lamport=T + 5_000), T)
    assert bob.events() == [MissingFound((HistoryEntry("m1"),))]
    assert bob.log() == []
    assert bob.missing() == [HistoryEntry("m1")]
    assert bob.lamport == T
    for _ in range(2):
        bob.receive(stranger("m1", lamport=T + 4_000), T, HINT)
        bob.receive(stranger("m2", "m1", lamport=T + 5_000), T)
    assert bob.events() == [
        Delivered("m1", "mallory", b"x", T + 4_000, HINT),
        Delivered("m2", "mallory", b"x", T + 5_000, None),
    ]
    assert bob.missing() == []
    assert bob.lamport == T + 5_000
    assert bob.statistics.duplicates == 3
    message = bob.wrap(b"y", T, 1)
    both = BloomFilter(PARAMETERS)
    both.insert("m1")
    both.insert("m2")
    assert message.bloom_filter == both.to_bytes()
    bob.receive(message.encode(), T)
    assert bob.events() == []
    assert len(bob.log()) == 3


@pytest.mark.req("C-008", "C-075")
def test_other_channels_are_not_ours() -> None:
    bob, other = join("bob"), join("alice", channel="elsewhere")
    bob.receive(say(other, "one").encode(), T)
    assert bob.events() == []
    assert bob.log() == []


@pytest.mark.req("C-138", "C-180", "C-183")
def test_ephemeral_messages_come_at_once_and_leave_no_trace() -> None:
    alice, bob = join("alice"), join("bob")
    message = alice.wrap_ephemeral(b"typing", 1)
    assert message == SdsMessage("alice", message.message_id, "room", content=b"typing")
    bob.receive(message.encode(), T)
    assert bob.events() == [EphemeralReceived(message.message_id, "alice", b"typing")]
    assert (alice.outgoing(), alice.log(), bob.log(), bob.missing()) == ({}, [], [], [])
    assert alice.get_timer() == bob.get_timer() == math.inf
    assert bob.wrap(b"x", T, 1).bloom_filter == BloomFilter(PARAMETERS).to_bytes()


@pytest.mark.req("C-131", "C-134", "C-132")
def test_a_sync_reveals_gaps_and_is_kept_nowhere() -> None:
    bob = join("bob")
    for lamport in (5, 6):
        bob.receive(stranger("sync", f"m{lamport}", lamport=lamport, content=None), T)
    assert bob.events() == [MissingFound((HistoryEntry("m5"),)), MissingFound((HistoryEntry("m6"),))]
    assert bob.log() == []
    assert bob.lamport == T
    assert bob.wrap(b"x", T, 1).bloom_filter == BloomFilter(PARAMETERS).to_bytes()
    assert bob.statistics.duplicates == 0


@pytest.mark.req("C-162")
def test_a_hint_that_comes_later_is_news() -> None:
    bob = join("bob")
    bob.receive(stranger("m2", "m1"), T)
    entry = HistoryEntry("m1", HINT, "carol")
    bob.receive(SdsMessage("mallory", "m3", "room", T, (entry,), content=b"x").encode(), T)
    assert bob.events() == [MissingFound((HistoryEntry("m1"),)), MissingFound((entry,))]
    assert bob.missing() == [entry]


@pytest.mark.req("C-126", "C-081")
def test_a_dependency_is_given_up_in_time_and_its_dependants_are_delivered() -> None:
    bob = join("bob")
    bob.receive(stranger("m2", "m1"), T)
    assert run_until(bob, T + 599_999)[1:] == []
    events = run_until(bob, T + 605_000)
    assert events == [Lost(HistoryEntry("m1"), T), Delivered("m2", "mallory", b"x", T, None)]
    bob.receive(stranger("m3", "m1"), T + 605_000)
    assert [type(event) for event in bob.events()] == [Delivered]
    bob.receive(stranger("m1"), T + 605_000)
    assert [type(event) for event in bob.events()] == [Delivered]
    never = join("bob", replace(QUIET, lost_message_timeout_ms=0))
    never.receive(stranger("m2", "m1"), T)
    assert of(Lost, run_until(never, T + 10_000_000)) == []


@pytest.mark.req("C-126", "C-257")
@pytest.mark.parametrize("told", [False, True])
def test_what_is_no_longer_waited_for_is_told_once_whatever_dies_in_between(told: bool) -> None:
    bob = join("bob")
    bob.receive(stranger("m2", "m1"), T)
    bob.release(["m1"], T + 1_000)
    assert [event.message_id for event in of(Delivered, bob.events())] == ["m2"]
    if told:
        bob.told(["m1"])
    state = SdsState(bob.changes())
    again = Participant("room", "bob", QUIET, now_ms=T + 2_000, random=lambda: 0.5, state=state)
    lost = of(Lost, run_until(again, T + 700_000))
    assert [each.entry.message_id for each in lost] == ([] if told else ["m1"])


@pytest.mark.req("C-126", "C-257")
@pytest.mark.parametrize("given_up", [False, True])
def test_what_was_no_longer_waited_for_is_not_waited_for_after_a_restart(given_up: bool) -> None:
    bob, now = join("bob"), T + 300_000
    bob.receive(stranger("m1", "gone"), T)
    run_until(bob, now)
    bob.receive(stranger("m3", "gone", "m2"), now)
    state = SdsState(bob.changes())
    if given_up:
        now = T + 601_000
        run_until(bob, now)
    else:
        bob.release(["gone"], now)
    state.apply(bob.changes())
    again = Participant("room", "bob", QUIET, now_ms=now, random=lambda: 0.5, state=state)
    again.handle_timer(now)
    again.receive(stranger("m2"), now)
    assert [event.message_id for event in of(Delivered, again.events())] == ["m2", "m3"]


@pytest.mark.req("C-112", "C-117")
def test_whoever_counts_from_zero_is_heard_before_and_after_a_restart() -> None:
    bob = join("bob")
    bob.receive(stranger("first", lamport=0), T)
    assert [event.message_id for event in of(Delivered, bob.events())] == ["first"]
    state = SdsState(bob.changes())
    bob = Participant("room", "bob", QUIET, now_ms=T, random=lambda: 0.5, state=state)
    bob.receive(stranger("first", lamport=0), T)
    bob.receive(stranger("other", "first", lamport=0), T)
    assert [event.message_id for event in of(Delivered, bob.events())] == ["other"]


@pytest.mark.req("C-002")
@pytest.mark.parametrize("bad", ["", "x" * 257, "\u20ac" * 86, "lone \ud800"])
def test_ids_that_cannot_travel_are_refused_before_anything_is_sent(bad: str) -> None:
    for ids in ((bad, "alice"), ("room", bad)):
        with pytest.raises(ValueError):
            Participant(*ids, now_ms=T, random=lambda: 0.5)


@pytest.mark.req("C-119")
def test_a_time_from_the_far_future_freezes_nothing() -> None:
    bob = join("bob")
    bob.receive(stranger("hostile", lamport=2**64 - 1), T)
    bob.receive(stranger("near", lamport=T + 24 * 3_600_000), T)
    assert bob.lamport == T + 24 * 3_600_000
    assert [entry.message_id for entry in bob.log()] == ["near", "hostile"]
    bob.receive(stranger("nearer", lamport=T), T)
    message = bob.wrap(b"x", T, 1)
    assert [entry.message_id for entry in message.causal_history] == ["nearer", "near"]


@pytest.mark.req("C-106", "C-119")
def test_answers_follow_questions_although_a_clock_was_two_days_ahead() -> None:
    alice, bob = join("alice"), join("bob")
    early = [say(alice, f"ahead {number}", T + 172_800_000) for number in range(3)]
    for each in early:
        bob.receive(each.encode(), T)
    question = say(bob, "question", T + 1)
    assert early[-1].message_id in question.history_ids
    alice.clock_stepped(-172_800_000)
    alice.receive(question.encode(), T + 2)
    answer = say(alice, "answer", T + 3)
    assert answer.history_ids == [early[-1].message_id, question.message_id]
    bob.receive(answer.encode(), T + 4)
    for number in range(2):
        bob.receive(stranger(f"m{number}", lamport=T + 5), T + 5)
    assert say(bob, "later", T + 6).history_ids == ["m0", "m1"], (
        "what is dated ahead is named while it is new"
    )


# Sync


def sync_times(chance: float, act: str) -> int:
    """How many ms after an event at T + 10 000 the sync comes."""
    bob = join("bob", SdsConfig(), chance=1.0)
    bob.receive(stranger("m1"), T)
    for event in run_until(bob, T + 10_000):
        assert isinstance(event, Delivered | SendSync)
    now = T + 10_000
    bob._sync._random = lambda: chance
    match act:
        case "content":
            bob.receive(stranger("m2", "m1"), now)
        case "sync":
            bob.receive(stranger("s", "m1", content=None), now)
        case "sent":
            say(bob, "x", now)
        case "failed":
            bob.sync_failed(now)
    bob.events()
    return round(bob._sync.at - now)


@pytest.mark.req("C-135", "C-129", "C-133")
@pytest.mark.parametrize(
    ("act", "delay"), [("content", 1_500), ("sync", 3_000), ("sent", 3_000), ("failed", 6_000)]
)
def test_syncs_are_rescheduled_by_what_happens(act: str, delay: int) -> None:
    assert sync_times(0.1, act) == delay


@pytest.mark.req("C-034")
def test_no_sync_is_sent_when_they_are_off() -> None:
    bob = join("bob", QUIET)
    bob.receive(stranger("m2", "m1"), T)
    assert of(SendSync, run_until(bob, T + 1_000_000)) == []


@pytest.mark.req("C-137")
def test_a_fresh_channel_is_quiet() -> None:
    bob = join("bob", SdsConfig())
    assert run_until(bob, T + 1_000_000) == []
    assert bob.lamport == T


@pytest.mark.req("C-130", "C-129")
def test_a_sync_carries_history_and_filter_and_advances_the_time() -> None:
    bob = join("bob", SdsConfig())
    bob.receive(stranger("m1"), T)
    (sync,) = of(SendSync, run_until(bob, T + 2_500))
    message = SdsMessage.decode(sync.data)
    assert message is not None
    assert message.kind is Kind.SYNC
    assert message.causal_history == (HistoryEntry("m1", None, "mallory"),)
    assert message.lamport_timestamp == bob.lamport > T
    expected = BloomFilter(PARAMETERS)
    expected.insert("m1")
    assert message.bloom_filter == expected.to_bytes()


def test_a_sync_names_what_a_peer_was_seen_to_lack() -> None:
    """Decision 0014: no message names m1, so without this a peer that missed it would never know."""
    bob = join("bob", SdsConfig())
    for number in (1, 2, 3):
        bob.receive(stranger(f"m{number}", lamport=T + number), T)
    run_until(bob, T + 20_000)
    bob.receive(stranger("s", "m2", "m3", content=None, has=("m2", "m3"), sender="carol"), T + 20_000)
    first, second = (SdsMessage.decode(event.data) for event in of(SendSync, run_until(bob, T + 60_000))[:2])
    assert first is not None and second is not None
    assert [entry.message_id for entry in first.causal_history] == ["m1", "m2", "m3"]
    assert [entry.message_id for entry in second.causal_history] == ["m2", "m3"]


# Repair


def asking(*ids: str, sender: str | None = "alice") -> bytes:
    entries = tuple(HistoryEntry(each, None, sender) for each in ids)
    return stranger("s", content=None, asks=entries)


@pytest.mark.req("C-144", "C-145", "C-154", "C-159")
def test_a_requested_message_is_sent_again_unchanged() -> None:
    alice, bob = join("alice"), join("bob")
    data = say(alice, "one").encode()
    bob.receive(data, T)
    bob.events()
    bob.receive(asking(alice.log()[0].message_id), T)
    assert bob.events() == []
    repairs = run_until(bob, T + 120_000)
    assert repairs == [SendRepair(alice.log()[0].message_id, data)]
    alice.receive(asking(alice.log()[0].message_id), T)
    alice.handle_timer(T)
    assert of(SendRepair, alice.events()) == [SendRepair(alice.log()[0].message_id, data)]


@pytest.mark.req("C-151", "C-112")
def test_a_message_that_comes_again_need_not_be_sent_again() -> None:
    alice, bob = join("alice"), join("bob")
    data = say(alice, "one").encode()
    bob.receive(data, T)
    bob.receive(asking(alice.log()[0].message_id), T)
    bob.receive(data, T)
    bob.events()
    assert run_until(bob, T + 120_000) == []


@pytest.mark.req("C-142", "C-148", "C-149", "C-152", "C-160")
def test_what_is_missing_is_asked_for_in_its_time() -> None:
    bob = join("bob", SdsConfig())
    bob.receive(stranger("m2", "m1"), T)
    seen: list[SdsMessage] = []
    for event in run_until(bob, T + 29_999):
        if isinstance(event, SendSync):
            assert SdsMessage.decode(event.data).repair_request == ()  # type: ignore[union-attr]
    while not seen:
        now = math.ceil(bob.get_timer())
        # Others sync all the time, which delays one's own sync, but not the request.
        bob.receive(stranger("s", lamport=now, content=None, sender="carol"), now)
        for event in run_until(bob, now):
            if isinstance(event, SendSync):
                message = SdsMessage.decode(event.data)
                assert message is not None
                seen += [message] if message.repair_request else []
        assert now < T + 121_000
    assert seen[0].repair_request == (HistoryEntry("m1"),)


# Restarts


@pytest.mark.req("C-248", "C-249", "C-250", "C-254", "C-257")
def test_a_restored_participant_goes_on_where_the_other_ended() -> None:
    alice = join("alice", SdsConfig())
    message = say(alice, "one")
    alice.dispatched(message.message_id, T, HINT)
    alice.receive(stranger("m2", "m1", lamport=T + 50), T)
    alice.receive(stranger("m0", lamport=T + 90_000), T)
    alice.receive(asking("m0", sender="mallory"), T)
    state = SdsState(alice.changes())
    again = Participant("room", "alice", SdsConfig(), now_ms=T + 1, random=lambda: 0.5, state=state)
    assert again.log() == alice.log()
    assert again.outgoing() == alice.outgoing()
    assert again.missing() == alice.missing()
    assert again.lamport == alice.lamport == T + 90_000
    alice.events()
    both = [
        [event for event in run_until(each, T + 40_000) if not isinstance(event, SendSync)]
        for each in (alice, again)
    ]
    assert both[0] == both[1]
    assert of(Retransmit, both[1])[0].data == message.encode()
    for each in (alice, again):
        each.receive(stranger("m1"), T + 40_000)
    assert of(Delivered, again.events()) == of(Delivered, alice.events())
    assert (say(again, "next", T).lamport_timestamp or 0) > T + 90_000


@pytest.mark.req("C-114", "C-255")
def test_the_filter_of_a_restored_participant_holds_what_it_acknowledged() -> None:
    bob = join("bob")
    bob.receive(stranger("held", "gap"), T)
    bob.receive(stranger("logged"), T)
    state = SdsState(bob.changes())
    again = Participant("room", "bob", QUIET, now_ms=T, random=lambda: 0.5, state=state)
    expected = BloomFilter(PARAMETERS)
    expected.insert("held")
    expected.insert("logged")
    assert again.wrap(b"x", T, 1).bloom_filter == expected.to_bytes()


@pytest.mark.req("C-257")
def test_unacknowledged_messages_that_left_the_log_survive_a_restart() -> None:
    config = replace(QUIET, max_history=3, max_known_ids=3)
    alice = join("alice", config)
    own = say(alice, "own")
    for number in range(10):
        alice.receive(stranger(f"m{number}", lamport=T + number), T)
    state = SdsState(alice.changes())
    again = Participant("room", "alice", config, now_ms=T, random=lambda: 0.5, state=state)
    assert own.message_id not in [entry.message_id for entry in again.log()]
    assert again.encoded(own.message_id) == own.encode()
    assert of(Retransmit, run_until(again, T + 5_000)) == [Retransmit(own.message_id, own.encode())]
    again.receive(stranger("ack", own.message_id), T + 5_000)
    state.apply(again.changes())
    assert (again.outgoing(), again.encoded(own.message_id)) == ({}, None)


def reborn(name: str, *lives: Participant, config: SdsConfig = QUIET, now: int = T) -> Participant:
    """The next life of a participant, from what all its previous lives have stored."""
    state = SdsState(change for life in lives for change in life.changes())
    return Participant("room", name, config, now_ms=now, random=lambda: 0.5, state=state)


@pytest.mark.req("C-250", "C-257")
def test_an_own_message_that_leaves_the_log_after_it_was_stored_survives_a_restart() -> None:
    config = replace(QUIET, max_history=2)
    alice = join("alice", config)
    own = say(alice, "own")
    state = SdsState(alice.changes())
    for number in range(3):
        alice.receive(stranger(f"m{number}", lamport=T + number), T)
    state.apply(alice.changes())
    again = Participant("room", "alice", config, now_ms=T, random=lambda: 0.5, state=state)
    assert again.encoded(own.message_id) == own.encode()
    again.receive(stranger("m2", lamport=T + 2), T)
    again.receive(stranger("m0", lamport=T), T)
    assert of(Delivered, again.events()) == [], "and what has left it is known"


@pytest.mark.req("C-112")
def test_what_is_too_old_to_be_told_from_a_repetition_is_refused_after_a_restart_too() -> None:
    config = replace(QUIET, max_history=2, max_known_ids=2)
    bob = join("bob", config)
    for number in range(5):
        bob.receive(stranger(f"m{number}", lamport=T - 10 + number), T)
    again = reborn("bob", bob, config=config)
    again.receive(stranger("m0", lamport=T - 10), T)
    assert (of(Delivered, again.events()), again.statistics.refused_old) == ([], 1)


@pytest.mark.req("C-112", "C-119")
def test_whoever_once_wrote_with_a_clock_of_next_year_hears_others_when_that_is_forgotten() -> None:
    config = replace(QUIET, max_history=2, max_known_ids=3)
    alice = join("alice", config)
    say(alice, "from next year", T + 365 * 24 * 3_600_000)
    for number in range(5):
        alice.receive(stranger(f"m{number}", lamport=T + number), T + number)
    assert [each.message_id for each in of(Delivered, alice.events())] == [
        f"m{number}" for number in range(5)
    ]
    alice.receive(stranger("m0", lamport=T), T + 5)
    assert (of(Delivered, alice.events()), alice.statistics.refused_old) == ([], 1), "nothing comes twice"


@pytest.mark.req("C-112", "C-296")
def test_whoever_speaks_again_and_again_while_it_reads_more_than_it_remembers_takes_all_of_it() -> None:
    config = replace(QUIET, max_history=5, max_known_ids=20)
    reader = join("reader", config)
    reader.set_reading(True)
    taken: list[str] = []
    for number in range(60):
        if number % 25 == 0:
            say(reader, f"hello {number}", T + number)
        if number == 40:
            reader = reborn("reader", reader, config=config)
            reader.set_reading(True)
            say(reader, "back", T + number)
        reader.receive(stranger(f"m{number}", lamport=T - 1_000 + number), T + number, stored=True)
        taken += [event.message_id for event in of(Delivered, reader.events())]
    assert taken == [f"m{number}" for number in range(60)]
    reader.set_reading(False)
    say(reader, "all read", T + 100)
    reader.receive(stranger("m0", lamport=T - 1_000), T + 100)
    assert of(Delivered, reader.events()) == [], "nothing comes twice"


@pytest.mark.req("C-106")
def test_what_one_says_while_it_reads_follows_what_it_said_before() -> None:
    reader = join("reader", replace(QUIET, max_history=5))
    reader.set_reading(True)
    said = [say(reader, "first", T)]
    for number in range(20):
        reader.receive(stranger(f"m{number}", lamport=T - 1_000 + number), T + number, stored=True)
        if number % 9 == 8:
            said.append(say(reader, f"after {number}", T + number))
    for before, after in itertools.pairwise(said):
        assert before.message_id in after.history_ids
    reader.set_reading(False)
    for number in range(20, 30):
        reader.receive(stranger(f"m{number}", lamport=T + number), T + number)
    assert [entry.message_id for entry in reader.log()] == [f"m{number}" for number in range(25, 30)]


@pytest.mark.req("C-095")
def test_what_is_forgotten_leaves_the_store_too() -> None:
    config = replace(QUIET, max_history=2, max_known_ids=3)
    bob, state = join("bob", config), SdsState()
    for number in range(10):
        bob.receive(stranger(f"m{number}", lamport=T + number), T)
        state.apply(bob.changes())
    assert [each.message_id for each in state.all(KnownRecord)] == ["m7"]
    assert [each.message_id for each in state.all(LogRecord)] == ["m8", "m9"]


@pytest.mark.req("C-145", "C-257")
def test_filters_of_two_lives_do_not_mix() -> None:
    config = replace(QUIET, bloom_filter_size=100)
    size = BloomParameters(100, config.bloom_filter_error_rate).size_bytes
    sent = [
        SdsMessage(
            "carol", f"m{life}", "room", T + life, (), random.Random(life).randbytes(size), content=b"x"
        )
        for life in range(3)
    ]
    lives = [join("bob", config)]
    state = SdsState()
    for message in sent:
        lives[-1].receive(message.encode(), T)
        state.apply(lives[-1].changes())
        lives.append(Participant("room", "bob", config, now_ms=T, random=lambda: 0.5, state=state))
    assert [lives[-1].encoded(message.message_id) for message in sent] == [each.encode() for each in sent]


@pytest.mark.req("C-257")
def test_what_waited_through_a_restart_leaves_the_log_like_any_other() -> None:
    config = replace(QUIET, bloom_filter_size=100, max_history=2)
    size = BloomParameters(100, config.bloom_filter_error_rate).size_bytes
    bob, follows = join("bob", config), (HistoryEntry("m1"),)
    held = SdsMessage("carol", "m2", "room", T, follows, random.Random(1).randbytes(size), content=b"x")
    bob.receive(held.encode(), T)
    again = reborn("bob", bob, config=config)
    for number in (1, 3, 4, 5):
        again.receive(stranger(f"m{number}", lamport=T + number), T)
    assert [event.message_id for event in of(Delivered, again.events())] == ["m1", "m2", "m3", "m4", "m5"]
    assert [entry.message_id for entry in again.log()] == ["m4", "m5"]


@pytest.mark.req("C-123", "C-257")
def test_own_messages_are_numbered_on_after_a_restart() -> None:
    alice = join("alice")
    first = say(alice, "first")
    state = SdsState(alice.changes())
    again = Participant("room", "alice", QUIET, now_ms=T, random=lambda: 0.5, state=state)
    second = say(again, "second")
    state.apply(again.changes())
    # A peer that names only the first has not received the second, though a crowded filter seems to have it.
    last = Participant("room", "alice", QUIET, now_ms=T, random=lambda: 0.5, state=state)
    last.receive(stranger("m", first.message_id, has=(first.message_id, second.message_id)), T)
    assert last.outgoing() == {second.message_id: OutgoingState.POSSIBLY_ACKNOWLEDGED}


@pytest.mark.req("C-126", "C-150", "C-153")
def test_what_is_missing_is_looked_for_as_long_as_ever_after_a_restart() -> None:
    bob = join("bob", SdsConfig())
    bob.receive(stranger("m2", "m1"), T)
    bob.receive(asking("m1", sender="carol"), T)
    assert bob.repair_requests() == {}, "which is left to others"
    away = T + 3_600_000
    again = reborn("bob", bob, config=SdsConfig(), now=away)
    assert set(again.repair_requests()) == {"m1"}
    assert of(Lost, run_until(again, away + 590_000)) == [], "a program that does not run cannot look for it"
    assert [each.entry.message_id for each in of(Lost, run_until(again, away + 610_000))] == ["m1"]


@pytest.mark.req("C-156", "C-257")
def test_a_clock_that_was_set_back_before_a_restart_delays_no_repair() -> None:
    bob = join("bob", SdsConfig())
    bob.receive(stranger("m2", "m1"), T)
    bob.receive(asking("m2", sender="carol"), T)
    earlier = T - 86_400_000
    again = reborn("bob", bob, config=SdsConfig(), now=earlier)
    due = [*again.repair_requests().values(), *again.repair_responses().values()]
    assert len(due) == 2 and max(due) <= earlier + SdsConfig().repair_t_max_ms


@pytest.mark.req("C-124")
def test_the_sweep_delivers_what_has_become_complete_unnoticed() -> None:
    bob = join("bob")
    bob.receive(stranger("m2", "m1"), T)
    state = SdsState(bob.changes())
    bob.receive(stranger("m1"), T)
    # A state in which m1 was logged and m2 not yet released.
    state.apply(change for change in bob.changes() if change.key == "m1")
    again = Participant("room", "bob", QUIET, now_ms=T, random=lambda: 0.5, state=state)
    assert [event.message_id for event in of(Delivered, run_until(again, T + 5_000))] == ["m2"]


def test_changes_cost_what_changed() -> None:
    bob = join("bob")
    for number in range(50):
        bob.receive(stranger(f"m{number}", lamport=T + number), T)
    assert len(bob.changes()) < 110
    bob.receive(stranger("last", "m49", lamport=T + 50), T)
    assert {(change.kind, change.key) for change in bob.changes()} == {
        ("log", "last"),
        ("tip", "last"),
        ("tip", "m49"),
        ("clock", ""),
    }
    assert bob.changes() == []


def test_an_own_message_lost_with_the_state_is_taken_back_when_others_wait_for_it() -> None:
    alice, bob = join("alice"), join("bob")
    data = say(alice, "one").encode()
    bob.receive(data, T)
    reply = say(bob, "two").encode()
    reborn = join("alice")
    reborn.receive(reply, T)
    reborn.receive(data, T)
    assert [event.content for event in of(Delivered, reborn.events())] == [b"two"]
    assert [entry.sender_id for entry in reborn.log()] == ["alice", "bob"]


def test_a_message_that_was_taken_can_be_read_whatever_it_names() -> None:
    bob = join("bob", replace(QUIET, max_received_history=2_000))
    names = [f"before-{number}" for number in range(1_001)]
    bob.pass_over(names, T)
    bob.receive(stranger("m", *names), T)
    kept = bob.message("m")
    assert kept is not None and kept.history_ids == names
    assert bob.message("never seen") is None

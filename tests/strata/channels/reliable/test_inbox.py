"""What waits to be taken, own messages until they are finished, and how large things may be."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata.channels.persistence.interface import Change, Put, Remove, StoredState
from strata.channels.persistence.records import InboxMessage, SentChunk, read_records
from strata.channels.reliable import (
    MessageReceived,
    ReliableChannelConfig,
    SegmentDoesNotFit,
    configure,
    make_channel,
)
from strata.channels.reliable.inbox import MessageInbox
from strata.channels.reliable.requests import Requests
from strata.channels.reliable.sizes import largest_ephemeral, largest_segment, message_overhead
from strata.channels.sds import HistoryEntry, SdsConfig, SdsMessage
from strata.channels.sds.bloom import BloomParameters
from strata.channels.segmentation.messages import Segment, encode_segment, message_hash

from tests.support.scripted_node import TOPIC, ScriptedNode, opened, settle
from tests.support.virtual_time import virtually

# The inbox.


def message(n: int, *, payload: bytes | None = None, ephemeral: bool = False) -> MessageReceived:
    body = payload if payload is not None else f"{n}".encode()
    return MessageReceived(
        request_id=f"r{n}",
        message_id=message_hash(body).hex(),
        sender_id="bob",
        payload=body,
        content_topic=TOPIC,
        timestamp=n,
        ephemeral=ephemeral,
        hash=bytes([n % 256]) * 32,
    )


def put(inbox: MessageInbox, *messages: MessageReceived) -> None:
    for each in messages:
        inbox.put(each, bytes.fromhex(each.message_id))


def inbox(messages: int = 3, size: int = 1_000, stored: tuple[InboxMessage, ...] = ()) -> MessageInbox:
    return MessageInbox(TOPIC, max_messages=messages, max_bytes=size, stored=stored)


def restored(changes: list[Change], old: StoredState | None = None) -> tuple[StoredState, MessageInbox]:
    state = old or StoredState()
    state.apply(changes)
    records = read_records(InboxMessage, state.records.get(InboxMessage.KIND, {}))
    return state, inbox(stored=tuple(records.values()))


def payloads(box: MessageInbox) -> list[bytes]:
    return [received.message.payload for received in box]


def test_messages_are_taken_in_the_order_of_delivery() -> None:
    box = inbox()
    put(box, message(1), message(2), message(3))
    taken = []
    while (first := box.first()) is not None:
        taken.append(first.message.payload)
        box.take(first)
    assert taken == [b"1", b"2", b"3"] and len(box) == 0 and box.size_bytes == 0


def test_taking_twice_changes_nothing() -> None:
    box = inbox()
    put(box, message(1), message(2))
    first = box.first()
    assert first is not None
    box.take(first)
    box.take(first)
    assert payloads(box) == [b"2"] and box.size_bytes == 1


@pytest.mark.parametrize(("messages", "size"), [(2, 1_000), (1_000, 2)])
def test_full_is_by_number_or_by_bytes_and_drops_no_message(messages: int, size: int) -> None:
    box = inbox(messages, size)
    full = []
    for n in (1, 2):
        put(box, message(n))
        full.append(box.is_full)
    assert full == [False, True]
    put(box, message(3))  # what was already received is kept
    assert payloads(box) == [b"1", b"2", b"3"]


def test_ephemeral_messages_make_room_oldest_first_and_are_not_stored() -> None:
    box = inbox(3)
    put(box, message(1, ephemeral=True), message(2), message(3, ephemeral=True))
    put(box, message(4, ephemeral=True))
    assert payloads(box) == [b"2", b"3", b"4"] and box.ephemerals_dropped == 1
    stored = [change for change in box.changes_to_store() if isinstance(change, Put)]
    assert len(stored) == 1


@pytest.mark.req("C-255")
def test_a_restored_inbox_goes_on_where_the_other_ended() -> None:
    box = inbox()
    put(box, message(1), message(2), message(3))
    first = box.first()
    assert first is not None
    box.take(first)
    state, again = restored(box.changes_to_store())
    assert [received.message for received in again] == [message(2), message(3)]
    # Positions continue to rise in later lives, so the order is kept.
    put(again, message(4))
    _, third = restored(again.changes_to_store(), state)
    assert payloads(third) == [b"2", b"3", b"4"]


def test_an_emptied_inbox_never_confuses_a_new_message_with_an_old_one() -> None:
    box = inbox()
    put(box, message(1))
    first = box.first()
    assert first is not None
    box.take(first)
    changes = box.changes_to_store()
    assert isinstance(changes[0], Put) and isinstance(changes[1], Remove)
    assert box.newest == 1
    _, again = restored(changes)
    put(again, message(2))
    assert payloads(again) == [b"2"]


@given(steps=st.lists(st.sampled_from(["put", "fleeting", "take", "restart"]), max_size=40))
@settings(deadline=None)
def test_over_restarts_everything_is_taken_once_and_in_order(steps: list[str]) -> None:
    state, box = StoredState(), inbox(1_000)
    put_so_far: list[bytes] = []
    taken: list[bytes] = []
    for n, step in enumerate(steps):
        if step == "put":
            put(box, message(n))
            put_so_far.append(f"{n}".encode())
        elif step == "fleeting":
            put(box, message(n, ephemeral=True))
        elif step == "take" and (first := box.first()) is not None:
            if not first.message.ephemeral:
                taken.append(first.message.payload)
            box.take(first)
        elif step == "restart":
            state, box = restored(box.changes_to_store(), state)
        assert box.size_bytes == sum(map(len, payloads(box)))
    assert taken == put_so_far[: len(taken)]
    rest = [received.message.payload for received in box if not received.message.ephemeral]
    assert taken + rest == put_so_far


# Own messages.


def tell(requests: Requests) -> list[str]:
    return [event.name for event in requests.events()]


def stored_chunks(changes: list[Change], state: StoredState) -> list[SentChunk]:
    state.apply(changes)
    return list(read_records(SentChunk, state.records.get(SentChunk.KIND, {})).values())


@pytest.mark.req("C-089")
@pytest.mark.parametrize(
    ("when", "at"),
    [("network", ["message-sent", "reliable:message:sent"]), ("participants", ["message-sent"])],
)
def test_what_is_told_of_a_message_follows_from_its_chunks(
    when: Literal["network", "participants"], at: list[str]
) -> None:
    requests = Requests(when)
    requests.add("r", bytes(32), ["a", "b"])
    requests.sending("a")
    requests.sent("a")
    assert tell(requests) == ["sending-message", "message-sent"]
    requests.sent("b")
    assert tell(requests) == at
    requests.acknowledged("b")
    assert tell(requests) == ["message-acknowledged"]
    requests.acknowledged("a")
    last = tell(requests)
    assert last[0] == "message-acknowledged" and last[-1] == "reliable:message:delivered"
    assert last.count("reliable:message:sent") == (when == "participants")
    assert len(requests) == 0 and requests.find("a") is None


def test_unknown_messages_are_ignored() -> None:
    requests = Requests()
    for step in (requests.sending, requests.sent, requests.acknowledged, requests.exhausted):
        step("unknown")
    requests.possibly_acknowledged("unknown", 1)
    requests.mark_undelivered("unknown")
    assert requests.failed("unknown", "", "") == [] and requests.events() == []


@pytest.mark.req("C-043")
def test_each_chunk_is_acknowledged_once_and_not_doubted_afterwards() -> None:
    requests = Requests()
    requests.add("r", bytes(32), ["a", "b"])
    requests.sent("a")
    requests.acknowledged("a")
    tell(requests)
    requests.acknowledged("a")
    requests.possibly_acknowledged("a", 2)
    requests.sent("a")
    assert tell(requests) == []


@pytest.mark.req("C-053", "C-055")
def test_exhaustion_is_told_once_and_a_late_acknowledgement_still_counts() -> None:
    requests = Requests()
    requests.add("r", bytes(32), ["a", "b"])
    for each in ("a", "b"):
        requests.sent(each)
    tell(requests)
    requests.exhausted("a")
    requests.exhausted("b")
    assert tell(requests) == ["reliable:message:send-error", "reliable:message:delivery-error"]
    requests.acknowledged("a")
    requests.acknowledged("b")
    assert tell(requests)[-1] == "reliable:message:delivered"


def test_undelivered_messages_are_remembered_within_bounds() -> None:
    requests = Requests()
    for n in range(1_100):
        requests.add(f"r{n}", bytes(32), [f"m{n}"])
        requests.exhausted(f"m{n}")
    assert len(requests) == 1_024 and requests.find("m0") is None and requests.find("m1099") is not None


def test_one_failed_chunk_fails_its_message_alone() -> None:
    requests = Requests()
    requests.add("r", bytes(32), ["a", "b"])
    requests.add("q", bytes(32), ["c"])
    assert requests.failed("b", "why", "code") == ["a", "b"]
    assert tell(requests) == ["sending-message-irrecoverable-error", "reliable:message:send-error"]
    assert requests.find("a") is None and requests.find("c") is not None


@pytest.mark.req("C-257")
def test_restored_requests_know_what_was_told() -> None:
    state = StoredState()
    requests = Requests()
    requests.add("r", bytes(31) + b"\x01", ["a", "b"])
    requests.sent("a")
    requests.sent("b")
    requests.acknowledged("b")
    again = Requests(stored=stored_chunks(requests.changes_to_store(), state))
    (request,) = again
    assert request.message_id == (bytes(31) + b"\x01").hex() and request.acknowledged == (1,)
    again.sent("a")  # a retransmission: it was all reported as sent before
    assert tell(again) == ["message-sent"]
    again.acknowledged("a")
    assert tell(again) == ["message-acknowledged", "reliable:message:delivered"]
    assert stored_chunks(again.changes_to_store(), state) == []


# Sizes.


def worst_message(segment_bytes: int, channel: str, sender: str, config: SdsConfig) -> bytes:
    """The longest possible SDS message around a full segment."""
    entry = HistoryEntry("f" * 64, bytes(32), "s" * 256)
    segment = Segment(
        entire_message_hash=bytes(32),
        data_segment_count=255,
        data_segment_index=254,
        parity_segment_count=1,
        payload=bytes(segment_bytes),
        request_id="r" * 128,
        original_length=2**40,
    )
    size = BloomParameters(config.bloom_filter_size, config.bloom_filter_error_rate).size_bytes
    return SdsMessage(
        sender,
        "f" * 64,
        channel,
        2**64 - 1,
        (entry,) * config.causal_history_size,
        bytes(size),
        (entry,) * config.max_repair_requests,
        encode_segment(segment),
    ).encode()


@pytest.mark.req("C-035")
@given(
    largest=st.integers(60_000, 300_000),
    channel=st.text("cé", min_size=1, max_size=120),
    sender=st.text("s", min_size=1, max_size=256),
    history=st.integers(1, 30),
    repairs=st.integers(0, 5),
)
@settings(deadline=None, max_examples=50)
def test_the_largest_segment_fits_at_its_worst_and_wastes_little(
    largest: int, channel: str, sender: str, history: int, repairs: int
) -> None:
    config = SdsConfig(causal_history_size=history, max_repair_requests=repairs)
    size = largest_segment(largest, channel, sender, config, hook_overhead=100)
    assert size is not None and size > 0
    needed = len(worst_message(size, channel, sender, config)) + 100
    assert needed <= largest
    assert largest - needed < 300 + 30 * (history + repairs)


def test_without_a_limit_of_the_transport_everything_fits() -> None:
    assert largest_segment(None, "room", "alice", SdsConfig(), hook_overhead=0) is None
    assert largest_ephemeral(None, "room", "alice", hook_overhead=0) is None


def test_where_nothing_fits_the_largest_is_zero() -> None:
    assert largest_segment(10_000, "room", "alice", SdsConfig(), hook_overhead=0) == 0
    assert largest_ephemeral(50, "room", "alice", hook_overhead=0) == 0


def test_an_ephemeral_message_has_neither_filter_nor_history() -> None:
    segment = largest_segment(100_000, "room", "alice", SdsConfig(), hook_overhead=0)
    ephemeral = largest_ephemeral(100_000, "room", "alice", hook_overhead=0)
    assert segment is not None and ephemeral is not None
    assert ephemeral - segment >= 18_752 and message_overhead("room", "alice", SdsConfig()) > 18_752


@pytest.mark.req("C-035")
@virtually
async def test_a_segment_size_that_cannot_fit_is_refused_with_the_largest_that_does() -> None:
    node = ScriptedNode(largest=100_000)
    channel = make_channel(node, "room", TOPIC, "alice", options={"segment_size_bytes": 102_401})
    with pytest.raises(SegmentDoesNotFit) as refusal:
        await channel.open()
    fits = refusal.value.largest
    assert refusal.value.segment_size_bytes == 102_401 and str(fits) in str(refusal.value)
    async with opened(node) as (fitted, _):  # by default, the segment size adapts
        assert fitted.config.segmentation is not None
        assert fitted.config.segmentation.segment_size_bytes == fits
    tiny = ScriptedNode(largest=20_000)
    with pytest.raises(SegmentDoesNotFit):
        await make_channel(tiny, "room", TOPIC, "alice").open()
    async with opened(node, segment_size_bytes=fits) as (whole, _):
        await whole.send(bytes(fits))
        await settle()
        assert len(node.sent) == 1 and len(node.sent[0].payload) <= 100_000
    with pytest.raises(SegmentDoesNotFit):
        await make_channel(node, "room", TOPIC, "alice", options={"segment_size_bytes": fits + 1}).open()


@pytest.mark.req("C-032")
@pytest.mark.parametrize(
    "wrong",
    [
        {"retrieve_frequency_ms": -1},
        {"process_task_min_elapse_ms": -1},
        {"force_query_threshold_ms": -1},
        {"query_window_ms": 0},
        {"max_inbox_messages": 0},
        {"max_inbox_bytes": 0},
        {"retention_seconds": 0},
        {"sent_event_on": "never"},
        {"sender_binding": "perhaps"},
        {"hand_over": "thrice"},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ReliableChannelConfig(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"segment_size_bytes": 0}, {"messages_per_epoch": 0}, {"bloom_filter_size": 0}]
)
def test_sizes_of_zero_are_refused_wherever_they_are_given(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        configure(None, options=wrong)

"""From `send` to the wire: segment, SDS, encrypt, rate limit, dispatch (channel.md §4)."""

from __future__ import annotations

import asyncio

import pytest
from strata.channels.messaging.node import NodeError
from strata.channels.messaging.values import ConnectionStatus
from strata.channels.persistence import MemoryPersistence
from strata.channels.reliable import (
    MessageSent,
    ReliableMessageSendError,
    SendingMessage,
    SendingMessageIrrecoverableError,
    make_channel,
)
from strata.channels.reliable.hub import Hub
from strata.channels.sds import SdsMessage
from strata.channels.segmentation import decode_segment
from strata.channels.segmentation.messages import message_hash

from tests.support.scripted_node import (
    TOPIC,
    Refusal,
    ScriptedNode,
    Sent,
    Told,
    opened,
    settle,
)
from tests.support.virtual_time import virtually

REFUSED = 600
"""Large enough to expose a cost that grows with the queue."""


class Reversing:
    """A hook whose work is visible: it reverses bytes."""

    def __init__(self, trace: list[tuple[str, bytes]]) -> None:
        self.trace = trace

    def encrypt(self, content: bytes) -> bytes:
        self.trace.append(("encrypt", content))
        return content[::-1]

    def decrypt(self, payload: bytes) -> bytes:
        return payload[::-1]


def trace_sends(node: ScriptedNode, trace: list[tuple[str, bytes]]) -> None:
    def answer(sent: Sent) -> float:
        trace.append(("dispatch", sent.payload))
        return 0.0

    node.answer = answer


@pytest.mark.req("C-061", "C-065", "C-066")
@virtually
async def test_each_chunk_is_segmented_registered_encrypted_and_then_sent() -> None:
    node = ScriptedNode()
    trace: list[tuple[str, bytes]] = []
    logged: list[tuple[str, list[str]]] = []
    hook = Reversing(trace)
    trace_sends(node, trace)
    async with opened(node, encryption=hook, segment_size_bytes=4) as (channel, _):
        plain_encrypt = hook.encrypt

        def encrypt(content: bytes) -> bytes:
            logged.append(("encrypt", channel.log()))
            return plain_encrypt(content)

        # The channel binds its hook's functions once, so the probe replaces the bound function.
        channel._hook._encrypt = encrypt  # type: ignore[union-attr]
        await channel.send(b"abcdefghij")
        await settle()
    encrypted = [data for step, data in trace if step == "encrypt"]
    dispatched = [data for step, data in trace if step == "dispatch"]
    inside = [SdsMessage.decode(data) for data in encrypted]
    ids = [message.message_id for message in inside if message is not None]
    # The hook gets a whole SDS message around one segment.
    parts = [decode_segment(message.content) for message in inside if message and message.content]
    assert [part.payload for part in parts] == [b"abcd", b"efgh", b"ij"]
    # SDS registered each message before it was encrypted.
    assert all(set(ids) <= set(log) for _, log in logged)
    # The transport gets the output of the hook: one message each, and only after it was made.
    assert dispatched == [data[::-1] for data in encrypted]
    for data in encrypted:
        assert trace.index(("encrypt", data)) < trace.index(("dispatch", data[::-1]))


@pytest.mark.req("C-061", "C-067")
@virtually
async def test_the_rate_limit_comes_after_the_hook_and_before_the_transport() -> None:
    node = ScriptedNode()
    trace: list[tuple[str, bytes]] = []
    trace_sends(node, trace)
    async with opened(
        node,
        encryption=Reversing(trace),
        messages_per_epoch=1,
        epoch_size_ms=60_000,
        acknowledgement_timeout_ms=1_000_000,
    ) as (channel, _):
        await channel.send(b"one")
        await channel.send(b"two")
        await settle()
        # Both are registered and encrypted; only one may leave in this epoch.
        assert [step for step, _ in trace] == ["encrypt", "dispatch", "encrypt"]
        await asyncio.sleep(61)
        assert [step for step, _ in trace] == ["encrypt", "dispatch", "encrypt", "dispatch"]


@pytest.mark.req("C-062")
@virtually
async def test_a_small_payload_is_a_single_segment() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, _):
        await channel.send(b"small")
        await settle()
    (sent,) = node.sent
    assert sent.segment.payload == b"small"
    assert (sent.segment.data_segment_index, sent.segment.data_segment_count) == (0, 1)
    assert sent.segment.entire_message_hash == message_hash(b"small")


@pytest.mark.req("C-063", "C-066")
@virtually
async def test_every_chunk_is_one_sds_message_in_one_transport_message() -> None:
    node = ScriptedNode()
    async with opened(node, segment_size_bytes=2) as (channel, _):
        await channel.send(b"aaaaaaaaaa")
        await settle()
    assert len(node.sent) == 5
    assert len({sent.sds.message_id for sent in node.sent}) == 5
    # The transport message contains that SDS message and nothing else.
    assert all(sent.sds.encode() == sent.payload for sent in node.sent)
    assert [sent.segment.data_segment_index for sent in node.sent] == [0, 1, 2, 3, 4]


@pytest.mark.req("C-064")
@virtually
async def test_a_chunk_is_tracked_by_sds_before_it_leaves() -> None:
    node = ScriptedNode()
    seen: list[bool] = []
    async with opened(node, segment_size_bytes=4) as (channel, _):

        def answer(sent: Sent) -> float:
            opened_channel = channel._session
            assert opened_channel is not None
            tracked = sent.sds.message_id in opened_channel.engine.sds.outgoing()
            seen.append(tracked and sent.sds.message_id in channel.log())
            return 0.0

        node.answer = answer
        await channel.send(b"abcdefgh")
        await settle()
    assert seen == [True, True]


@pytest.mark.req("C-065", "C-217")
@virtually
async def test_with_a_hook_nothing_of_message_or_segment_is_readable_on_the_wire() -> None:
    node = ScriptedNode()
    trace: list[tuple[str, bytes]] = []
    payload = b"a secret that nobody else may read"
    async with opened(node, encryption=Reversing(trace), segment_size_bytes=16) as (channel, _):
        await channel.send(payload)
        await channel.send_ephemeral(payload)
        await settle()
    assert len(node.sent) == 4
    for sent in node.sent:
        assert payload[:16] not in sent.payload and payload[16:32] not in sent.payload
        assert message_hash(payload) not in sent.payload
        message = SdsMessage.decode(sent.payload)
        assert message is None or message.channel_id != "room"


@pytest.mark.req("C-067")
@virtually
async def test_the_timer_of_a_chunk_starts_when_the_transport_has_it() -> None:
    node = ScriptedNode(answer=lambda sent: 20.0)
    async with opened(node, acknowledgement_timeout_ms=5_000, max_retransmissions=1) as (channel, _):
        await channel.send(b"slow")
        await asyncio.sleep(60)
    # Accepted after 20 s and retransmitted 5 s after that: not while it was under way.
    assert node.times() == [0.0, 25.0]


@pytest.mark.req("C-067")
@virtually
async def test_no_time_runs_for_a_chunk_that_waits_an_epoch() -> None:
    node = ScriptedNode()
    async with opened(
        node,
        messages_per_epoch=1,
        epoch_size_ms=100_000,
        acknowledgement_timeout_ms=5_000,
        max_retransmissions=0,
    ) as (channel, told):
        await channel.send(b"one")
        await channel.send(b"two")
        await asyncio.sleep(200)
    # The test starts at the beginning of an epoch.
    assert node.times() == [0.0, 100.0]
    assert told.at(ReliableMessageSendError) == [5.0, 105.0]


@pytest.mark.req("C-068")
@virtually
async def test_what_travels_is_the_sds_message_and_what_arrives_its_content() -> None:
    here, there = ScriptedNode(), ScriptedNode()
    async with opened(here) as (channel, _), opened(there, sender_id="bob") as (_, told):
        await channel.send(b"the content alone")
        await settle()
        assert here.sent[0].sds.channel_id == "room" and here.sent[0].sds.sender_id == "alice"
        await there.deliver(here.sent[0].payload)
        assert told.payloads == [b"the content alone"]


@pytest.mark.req("C-069")
@virtually
async def test_chunks_leave_in_order_and_messages_as_they_were_sent() -> None:
    node = ScriptedNode()
    async with opened(node, segment_size_bytes=2) as (channel, _):
        await channel.send(b"A0A1A2")
        await channel.send(b"B0B1B2")
        await settle()
    assert [sent.segment.payload for sent in node.sent] == [b"A0", b"A1", b"A2", b"B0", b"B1", b"B2"]


@pytest.mark.req("C-069")
@virtually
async def test_a_transport_that_refuses_for_now_does_not_change_the_order() -> None:
    refusals = [True, True, False]
    node = ScriptedNode()

    def answer(sent: Sent) -> Refusal | float:
        return Refusal("busy", recoverable=True) if refusals and refusals.pop(0) else 0.0

    node.answer = answer
    async with opened(node, segment_size_bytes=2) as (channel, told):
        await channel.send(b"A0A1A2")
        await asyncio.sleep(4)
    order = [sent.segment.payload for sent in node.sent]
    assert order == [b"A0", b"A1", b"A2", b"A0", b"A1"]
    assert sorted(event.chunk_info.chunk_index for event in told.of(MessageSent)) == [0, 1, 2]


@pytest.mark.req("C-070")
@virtually
async def test_transport_requests_are_numbered_after_the_request() -> None:
    node = ScriptedNode()
    async with opened(node, segment_size_bytes=2) as (channel, _):
        first = await channel.send(b"A0A1A2")
        second = await channel.send(b"B0")
        await settle()
    assert [sent.request_id for sent in node.sent] == [
        f"{first}:1",
        f"{first}:2",
        f"{first}:3",
        f"{second}:1",
    ]


@pytest.mark.req("C-071")
@virtually
async def test_the_transport_hash_is_the_hint_in_the_next_history() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, _):
        await channel.send(b"first")
        await settle()
        await channel.send(b"second")
        await settle()
    first, second = node.sent
    (entry,) = second.sds.causal_history
    assert entry.message_id == first.sds.message_id
    assert entry.retrieval_hint == first.message_hash
    assert entry.sender_id == "alice"


@virtually
async def test_a_chunk_that_the_transport_never_takes_harms_no_other_message() -> None:
    def answer(sent: Sent) -> Refusal | float:
        return Refusal() if sent.segment.payload == b"B1" else 0.0

    node = ScriptedNode(answer=answer)
    async with opened(node, segment_size_bytes=2) as (channel, told):
        await channel.send(b"A0A1")
        bad = await channel.send(b"B0B1B2")
        await channel.send(b"C0C1")
        await settle()
        failures = told.of(SendingMessageIrrecoverableError)
        assert [(each.request_id, each.chunk_info.chunk_index) for each in failures] == [(bad, 1)]
        (error,) = told.of(ReliableMessageSendError)
        assert (error.request_id, error.stage) == (bad, "dispatch")
        dead = {sent.sds.message_id for sent in node.sent if sent.segment.payload == b"B1"}
        assert not dead & set(channel.log())
    payloads = [sent.segment.payload for sent in node.sent]
    assert payloads[-2:] == [b"C0", b"C1"]
    # Later messages do not name those that will never be sent.
    last = node.sent[-1].sds
    assert not dead & {entry.message_id for entry in last.causal_history}


@pytest.mark.slow
@pytest.mark.parametrize("raises", [False, True], ids=["answers", "raises at once"])
@virtually
async def test_refusals_cost_the_same_however_much_waits(
    monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    encoded = 0
    encode = SdsMessage.encode

    def counting(message: SdsMessage) -> bytes:
        nonlocal encoded
        encoded += 1
        return encode(message)

    def answer(sent: Sent) -> Refusal:
        if raises:
            raise NodeError("never")
        return Refusal()

    node = ScriptedNode(answer=answer)
    async with opened(node) as (channel, told):
        node.connection_status = ConnectionStatus.DISCONNECTED
        for number in range(REFUSED):
            await channel.send(b"%d" % number)
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while told.of(ReliableMessageSendError)[REFUSED - 1 :] == []:
                turns += 1
                await asyncio.sleep(0)

        monkeypatch.setattr(SdsMessage, "encode", counting)
        await node.set_status(ConnectionStatus.CONNECTED)
        await take_turns()
        assert len(told.of(ReliableMessageSendError)) == REFUSED and channel.log() == []
        assert encoded <= 3 * REFUSED, "each is amended when its turn comes, and none for each refusal"
        assert turns >= REFUSED / 2, "others had their turn in between"


@pytest.mark.slow
@virtually
async def test_an_encoder_that_refuses_everything_holds_up_nobody_for_long() -> None:
    class Broken:
        content_topic = TOPIC

        def encode(self, payload: bytes) -> bytes:
            raise RuntimeError("broken")

        def decode(self, payload: bytes) -> bytes:
            return payload

    node = ScriptedNode()
    room = make_channel(node, "room", TOPIC, "alice", encoder=Broken(), decoder=Broken())
    told = Told(room)
    async with room as channel:
        node.connection_status = ConnectionStatus.DISCONNECTED
        for number in range(REFUSED):
            await channel.send(b"%d" % number)
        assert told.of(ReliableMessageSendError)[64:] == []
        await node.set_status(ConnectionStatus.CONNECTED)
        turns = 0
        while told.of(ReliableMessageSendError)[REFUSED - 1 :] == []:
            turns += 1
            await asyncio.sleep(0)
        assert turns >= REFUSED / 32


@pytest.mark.req("C-110")
@virtually
async def test_what_follows_a_refused_message_keeps_its_id_and_names_what_went_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("strata.channels.reliable.under_way._MAX_MESSAGES", 1)

    def answer(sent: Sent) -> Refusal | float:
        return Refusal() if sent.segment.payload in (b"2", b"3") else 0.0

    node = ScriptedNode(answer=answer)
    store = MemoryPersistence()
    async with opened(node, persistence=store) as (channel, _):
        node.connection_status = ConnectionStatus.DISCONNECTED
        for number in range(6):
            await channel.send(b"%d" % number)
        before = channel.log()
        node.connection_status = ConnectionStatus.CONNECTED
        hub = Hub.existing(node)
        assert hub is not None
        hub.wake()
        await settle()
        assert channel.log() == [*before[:2], *before[4:]]
        dead = set(before[2:4])
        for sent in node.sent[4:]:
            named = {entry.message_id for entry in sent.sds.causal_history}
            assert named and not named & dead
        assert [sent.sds.message_id for sent in node.sent] == before


@virtually
async def test_what_was_refused_before_a_restart_is_not_named_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("strata.channels.reliable.under_way._MAX_MESSAGES", 1)

    def answer(sent: Sent) -> Refusal | float:
        if sent.segment.payload == b"1":
            node.connection_status = ConnectionStatus.DISCONNECTED
            return Refusal()
        return 0.0

    node, again = ScriptedNode(answer=answer), ScriptedNode()
    store = MemoryPersistence()
    async with opened(node, persistence=store) as (channel, told):
        node.connection_status = ConnectionStatus.DISCONNECTED
        for number in range(4):
            await channel.send(b"%d" % number)
        dead = channel.log()[1]
        await node.set_status(ConnectionStatus.CONNECTED)
        await settle()
        assert len(told.of(ReliableMessageSendError)) == 1
        await channel.stop(timeout=0)
    async with opened(again, persistence=store) as (channel, told):
        await settle()
        assert [sent.segment.payload for sent in again.sent] == [b"2", b"3"]
        for sent in again.sent:
            assert dead not in {entry.message_id for entry in sent.sds.causal_history}


@virtually
async def test_a_node_that_raises_fails_that_attempt_alone() -> None:
    calls: list[str] = []

    def answer(sent: Sent) -> float:
        calls.append(sent.request_id)
        if len(calls) == 1:
            raise RuntimeError("the transport has a bug")
        return 0.0

    node = ScriptedNode(answer=answer)
    async with opened(node) as (channel, told):
        request_id = await channel.send(b"again")
        await asyncio.sleep(4)
        assert told.of(MessageSent)[0].request_id == request_id
        assert len(told.of(SendingMessage)) == 2  # two attempts began
    assert calls == [f"{request_id}:1"] * 2

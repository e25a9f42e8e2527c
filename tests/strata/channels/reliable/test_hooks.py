"""The encryption hook of a channel, and a user's encoder and decoder (channel.md §12)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from strata.channels.encryption import GroupKey, GroupKeyEncryption
from strata.channels.reliable import (
    ChannelNotOpen,
    InvalidConfiguration,
    MessageSent,
    NotStarted,
    ReliableChannel,
    ReliableMessageSendError,
    SegmentDoesNotFit,
    SendingMessageIrrecoverableError,
    make_channel,
)
from strata.channels.sds import HistoryEntry, Kind, SdsMessage

from tests.support.scripted_node import (
    TOPIC,
    ScriptedNode,
    ephemeral,
    opened,
    said,
    settle,
    sync,
)
from tests.support.virtual_time import virtually

MARK = b"\xfe\xfe"


class Marking:
    """A hook whose work is visible: it marks what it encrypts, and refuses input without the mark."""

    def encrypt(self, content: bytes) -> bytes:
        return MARK + content[::-1]

    def decrypt(self, payload: bytes) -> bytes:
        if not payload.startswith(MARK):
            raise ValueError("not marked")
        return payload[:1:-1]


class AsyncMarking:
    """The same, asynchronous and slow."""

    async def encrypt(self, content: bytes) -> bytes:
        await asyncio.sleep(0.5)
        return Marking().encrypt(content)

    async def decrypt(self, payload: bytes) -> bytes:
        await asyncio.sleep(0.5)
        return Marking().decrypt(payload)


def inside(payload: bytes) -> SdsMessage:
    message = SdsMessage.decode(Marking().decrypt(payload))
    assert message is not None
    return message


@pytest.mark.req("C-237")
@pytest.mark.parametrize("hook", [Marking(), AsyncMarking()], ids=["plain", "asynchronous"])
@virtually
async def test_plain_and_asynchronous_hooks_carry_messages_there_and_back(hook: Any) -> None:
    here, there = ScriptedNode(), ScriptedNode()
    async with (
        opened(here, encryption=hook, segment_size_bytes=8) as (channel, _),
        opened(there, encryption=hook, sender_id="bob") as (_, told),
    ):
        await channel.send(b"a message in three parts")
        await channel.send_ephemeral(b"typing")
        await asyncio.sleep(5)
        await there.deliver(*[sent.payload for sent in here.sent])
        await asyncio.sleep(5)
        assert sorted(told.payloads) == [b"a message in three parts", b"typing"]


@pytest.mark.req("C-238")
@pytest.mark.parametrize("missing", ["encrypt", "decrypt"])
@virtually
async def test_half_a_hook_is_refused(missing: str) -> None:
    half = type("Half", (), {name: lambda self, data: data for name in {"encrypt", "decrypt"} - {missing}})
    with pytest.raises(InvalidConfiguration, match=missing):
        make_channel(ScriptedNode(), "room", TOPIC, "alice", encryption=half())


@pytest.mark.req("C-239")
@virtually
async def test_without_a_hook_the_wire_is_plain_sds() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, _):
        await channel.send(b"readable")
        await channel.send_ephemeral(b"readable too")
        await settle()
    assert {sent.sds.kind for sent in node.sent} == {Kind.CONTENT, Kind.EPHEMERAL}
    assert {sent.segment.payload for sent in node.sent} == {b"readable", b"readable too"}


@pytest.mark.req("C-240")
@virtually
async def test_the_hook_gets_each_chunk_as_an_encoded_sds_message() -> None:
    node = ScriptedNode()
    seen: list[bytes] = []

    class Watching(Marking):
        def encrypt(self, content: bytes) -> bytes:
            seen.append(content)
            return super().encrypt(content)

    async with opened(node, encryption=Watching(), segment_size_bytes=4) as (channel, _):
        await channel.send(b"abcdefgh")
        await settle()
        assert len(seen) == 2
        messages = [SdsMessage.decode(each) for each in seen]
        assert [each.message_id for each in messages if each is not None] == channel.log()


@pytest.mark.req("C-241")
@virtually
async def test_retransmissions_syncs_repairs_and_ephemerals_pass_the_hook_too() -> None:
    node, hook = ScriptedNode(), Marking()
    options: dict[str, Any] = {
        "sync_min_interval_ms": 5_000,
        "acknowledgement_timeout_ms": 3_000,
        "max_retransmissions": 1,
        "repair_t_min_ms": 1,
        "repair_t_max_ms": 2,
    }
    async with opened(node, encryption=hook, **options) as (channel, _):
        await channel.send(b"twice")
        await channel.send_ephemeral(b"typing")
        await asyncio.sleep(4)
        first = said(1)
        await node.deliver(hook.encrypt(first.encode()))
        asks = said(2, sender="carol", asks=[HistoryEntry("bob-1", None, "bob")])
        await node.deliver(hook.encrypt(asks.encode()))
        await asyncio.sleep(20)
    assert all(sent.payload.startswith(MARK) for sent in node.sent)
    messages = [inside(sent.payload) for sent in node.sent]
    kinds = {message.kind for message in messages}
    assert kinds == {Kind.CONTENT, Kind.SYNC, Kind.EPHEMERAL}
    own = [m for m in messages if m.sender_id == "alice" and m.kind is Kind.CONTENT]
    assert len(own) == 2
    assert [m.encode() for m in messages if m.sender_id == "bob"] == [first.encode()]  # the repair


@pytest.mark.req("C-242")
def test_a_channel_knows_no_scheme_and_no_key() -> None:
    for function in (make_channel, ReliableChannel.__init__, ReliableChannel.open):
        names = set(inspect.signature(function).parameters)
        assert not {name for name in names if "key" in name or "cipher" in name}
    public = {name for name in vars(ReliableChannel) if not name.startswith("_")}
    assert not {name for name in public if "key" in name or "encrypt" in name}


@pytest.mark.req("C-243")
@virtually
async def test_what_the_hook_adds_counts_when_sizes_are_checked() -> None:
    class Wide(Marking):
        overhead = 20_000

    node = ScriptedNode(largest=130_000)
    async with opened(node, segment_size_bytes=100_000, encryption=Marking()):
        pass
    wide = make_channel(
        node, "room", TOPIC, "alice", encryption=Wide(), options={"segment_size_bytes": 100_000}
    )
    with pytest.raises(SegmentDoesNotFit) as refusal:
        await wide.open()
    fits = refusal.value.largest
    async with opened(node, segment_size_bytes=fits, encryption=Wide()) as (channel, _):
        await channel.send(bytes(fits))
        await settle()
        assert len(node.sent[0].payload) + 20_000 <= 130_000


class Unable(Marking):
    """Cannot encrypt content with a certain word."""

    def __init__(self, failure: Callable[[], Any]) -> None:
        self.failure = failure

    def encrypt(self, content: bytes) -> bytes:
        if b"unlucky" in content:
            return self.failure()  # type: ignore[no-any-return]
        return super().encrypt(content)


def raises() -> None:
    raise RuntimeError("no key")


async def is_cut() -> None:
    """Wait for something that is cancelled, as a key server's connection task might be."""
    gone = asyncio.get_running_loop().create_future()
    gone.cancel()
    await gone


@pytest.mark.req("C-244", "C-044", "C-045")
@pytest.mark.parametrize("failure", [raises, is_cut, lambda: None, lambda: "text", lambda: 5])
@virtually
async def test_what_cannot_be_encrypted_fails_for_good_and_harms_nothing_else(
    failure: Callable[[], Any],
) -> None:
    node = ScriptedNode()
    async with opened(node, encryption=Unable(failure)) as (channel, told):
        await channel.send(b"before")
        bad = await channel.send(b"unlucky")
        good = await channel.send(b"after")
        await asyncio.sleep(60)
        (error,) = told.of(SendingMessageIrrecoverableError)
        assert (error.request_id, error.code) == (bad, "EncryptionFailed")
        assert [e.request_id for e in told.of(ReliableMessageSendError) if e.stage == "dispatch"] == [bad]
        assert good in {event.request_id for event in told.of(MessageSent)}
        messages = [inside(sent.payload) for sent in node.sent]
        assert not any(b"unlucky" in (message.content or b"") for message in messages)
        # No message depends on one that was never sent.
        left = {message.message_id for message in messages}
        assert all(entry.message_id in left for each in messages for entry in each.causal_history)


@pytest.mark.req("C-244")
@virtually
async def test_an_ephemeral_message_that_cannot_be_encrypted_is_refused() -> None:
    node = ScriptedNode()
    async with opened(node, encryption=Unable(raises)) as (channel, told):
        with pytest.raises(Exception, match="encryption hook failed"):
            await channel.send_ephemeral(b"unlucky")
        assert [event.code for event in told.of(SendingMessageIrrecoverableError)] == ["EncryptionFailed"]
        assert node.sent == []


@pytest.mark.req("C-244", "C-073")
@pytest.mark.parametrize("wrong", [raises, is_cut, lambda: None, lambda: "text"])
@virtually
async def test_what_cannot_be_decrypted_is_dropped_in_silence(wrong: Callable[[], Any]) -> None:
    node = ScriptedNode()

    class Deaf(Marking):
        def decrypt(self, payload: bytes) -> bytes:
            if payload == b"garbled":
                return wrong()  # type: ignore[no-any-return]
            return super().decrypt(payload)

    async with opened(node, encryption=Deaf()) as (channel, told):
        await node.deliver(b"garbled")
        assert told.events == [] and channel.statistics.undecryptable == 1
        await node.deliver(Marking().encrypt(said(1).encode()))
        assert told.payloads == [b"bob 1"]


@pytest.mark.req("C-246", "C-073")
@virtually
async def test_who_has_another_key_hears_nothing_and_harms_nobody() -> None:
    keys = [GroupKey(bytes([n]) * 32) for n in (1, 2)]
    here, there, elsewhere = ScriptedNode(), ScriptedNode(), ScriptedNode()
    hooks = [GroupKeyEncryption("room", keys[n]) for n in (0, 0, 1)]
    async with (
        opened(here, encryption=hooks[0]) as (channel, _),
        opened(there, encryption=hooks[1], sender_id="bob") as (_, heard),
        opened(elsewhere, encryption=hooks[2], sender_id="carol") as (deaf, silence),
    ):
        await channel.send(b"for members")
        await channel.send_ephemeral(b"also")
        await settle()
        for node in (there, elsewhere):
            await node.deliver(*[sent.payload for sent in here.sent])
        assert sorted(heard.payloads) == [b"also", b"for members"]
        assert silence.events == [] and deaf.statistics.undecryptable == 2
        assert deaf.log() == [] and not deaf.sync_status().is_synced


@virtually
async def test_a_slow_hook_of_one_channel_holds_back_no_other() -> None:
    class Stuck(Marking):
        async def encrypt(self, content: bytes) -> bytes:  # type: ignore[override]
            await asyncio.sleep(1000)
            return super().encrypt(content)

    node = ScriptedNode()
    async with (
        opened(node, encryption=Stuck(), leaves_unsent=True) as (slow, _),
        opened(node, channel_id="hall", topic="/test/1/hall/proto") as (quick, _),
    ):
        await slow.send(b"slow")
        await quick.send(b"quick")
        await settle()
        assert [sent.segment.payload for sent in node.sent] == [b"quick"]


@virtually
async def test_a_channel_can_be_closed_while_its_hook_is_at_work() -> None:
    class Stuck(Marking):
        async def encrypt(self, content: bytes) -> bytes:  # type: ignore[override]
            await asyncio.sleep(10_000)
            return super().encrypt(content)

    node = ScriptedNode()
    async with opened(node, encryption=Stuck(), leaves_unsent=True) as (channel, _):
        await channel.send(b"slow")
        await settle()
    assert node.sent == []


class Framing:
    """An encoder and its decoder."""

    content_topic = TOPIC
    overhead = 2

    def encode(self, payload: bytes, /) -> bytes:
        if payload.endswith(b"odd"):
            raise ValueError("odd")
        return b"<" + payload + b">"

    def decode(self, payload: bytes, /) -> bytes | None:
        if payload == b"boom":
            raise ValueError("boom")
        return payload[1:-1] if payload[:1] == b"<" else None


@pytest.mark.req("C-010")
@virtually
async def test_the_encoder_goes_around_the_hook() -> None:
    node, hook = ScriptedNode(), Marking()
    framing = Framing()
    channel = make_channel(node, "room", None, "alice", encryption=hook, encoder=framing, decoder=framing)
    received: list[bytes] = []
    channel.message_events.on("message-received", lambda event: received.append(event.payload))
    async with channel:
        await channel.send(b"framed")
        await settle()
        assert node.sent[0].payload.startswith(b"<" + MARK)
        await node.deliver(framing.encode(hook.encrypt(said(1).encode())), b"boom", b"no frame")
        assert received == [b"bob 1"] and channel.statistics.undecodable == 2


@pytest.mark.parametrize("closes", [False, True])
@virtually
async def test_an_ephemeral_message_goes_nowhere_once_the_channel_has_stopped_while_its_hook_was_at_work(
    closes: bool,
) -> None:
    node = ScriptedNode()
    async with opened(node, encryption=AsyncMarking()) as (channel, _):
        sending = asyncio.create_task(channel.send_ephemeral(b"typing"))
        await settle()
        await (channel.close() if closes else channel.stop())
        with pytest.raises(ChannelNotOpen if closes else NotStarted):
            await sending
        assert node.sent == [] and node.topics == []


@pytest.mark.req("C-183", "C-241")
@virtually
async def test_an_ephemeral_message_in_the_clear_is_not_taken_where_there_is_a_hook() -> None:
    node = ScriptedNode()
    async with opened(node, encryption=Marking()) as (channel, told):
        await node.deliver(ephemeral(1, b"in the clear"), sync(2), said(3))
        assert told.events == [] and channel.statistics.undecryptable == 3

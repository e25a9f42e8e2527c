"""People with several devices over a real relay: each hears the other, twins are noticed, keys may change."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import strata
from strata.channels.messaging import MessageEnvelope
from strata.channels.messaging.binding import build_packet, build_repair
from strata.channels.reliable import MessageReceived, ReliableChannel, SenderIdConflict
from strata.channels.sds import SdsMessage
from strata.channels.segmentation.messages import Segment, encode_segment, message_hash
from strata.protocol import packets
from strata.protocol.ids import Identity, Signer
from strata.protocol.keys import rotate_content
from strata.protocol.packets import Packet

from tests.support.relay_process import RelayProcess
from tests.support.waiting import until

HOUR = 3_600


class Device:
    """An open channel, and its events."""

    def __init__(self, channel: ReliableChannel) -> None:
        self.channel = channel
        self.heard: list[MessageReceived] = []
        self.events: list[Any] = []
        for name in (*channel.message_events.names, SenderIdConflict.name):
            channel.message_events.on(name, self.events.append)
        channel.message_events.on(MessageReceived.name, self.heard.append)

    def told(self, name: str) -> list[Any]:
        return [event for event in self.events if event.name == name]

    @property
    def texts(self) -> list[bytes]:
        return sorted(each.payload for each in self.heard)


@contextlib.asynccontextmanager
async def using(
    relay: RelayProcess, topic: str, identity: Signer, sender: str | None = None, **settings: Any
) -> AsyncIterator[Device]:
    """A device with its own connection."""
    async with strata.connect(relay.ws, identity=identity) as connection:
        device = Device(connection.channel("room", topic=topic, sender_id=sender, **settings))
        async with device.channel:
            yield device


@pytest.mark.req("C-006", "C-287")
async def test_all_of_a_person_s_devices_see_everything_and_count_as_one(
    relay: RelayProcess, topic: str
) -> None:
    alice, bob = Identity.generate(), Identity.generate()
    settings: dict[str, Any] = {"sender_binding": "did", "acknowledged_by_people": True}
    async with (
        using(relay, topic, alice, **settings) as phone,
        using(relay, topic, alice, device="laptop", **settings) as laptop,
    ):
        await phone.channel.send(b"phone")
        await until(lambda: laptop.heard, "the laptop hears the phone")
        assert laptop.heard[0].sender_id == phone.channel.sender_id
        await laptop.channel.send(b"laptop")
        await until(lambda: phone.heard, "the phone hears the laptop")
        assert phone.heard[0].device == "laptop" and phone.heard[0].author == alice.did
        assert not phone.told("reliable:message:delivered"), "one's own device is nobody else"
        async with using(relay, topic, bob, **settings) as bobs:
            await until(lambda: bobs.texts == [b"laptop", b"phone"], "Bob hears both")
            await until(lambda: phone.told("reliable:message:delivered"), "Bob has it")
            assert phone.told("reliable:message:delivered")[0].people == (bob.did,)
            assert {each.author for each in bobs.heard} == {alice.did}
            assert bobs.channel.statistics.senders_forged == 0
            by_order = sorted(bobs.heard, key=lambda each: each.order or (0, ""))
            assert [each.payload for each in by_order] == [b"phone", b"laptop"]


@pytest.mark.req("C-006")
async def test_two_programs_with_one_sender_id_are_told_and_others_lose_nothing(
    relay: RelayProcess, topic: str
) -> None:
    async with (
        using(relay, topic, Identity.generate(), "bob") as bob,
        using(relay, topic, Identity.generate(), "alice") as one,
        using(relay, topic, Identity.generate(), "alice") as other,
    ):
        # The relay reports the time of a message in whole seconds, and both have begun in this one.
        for n in range(3):
            await one.channel.send(b"one %d" % n)
            await other.channel.send(b"other %d" % n)
            await until(lambda n=n: len(bob.heard) == 2 * n + 2, "Bob hears both")  # type: ignore[misc]
        for device in (one, other):
            await until(partial(device.told, SenderIdConflict.name), "both know")
        assert bob.texts == sorted(b"%s %d" % (name, n) for name in (b"one", b"other") for n in range(3))
        for device in (one, other):
            conflict = device.channel.health.sender_conflict
            assert conflict is not None and "another program" in conflict.reason
        assert bob.channel.health.sender_conflict is None


@pytest.mark.req("C-287", "C-294")
async def test_devices_repair_for_each_other_after_a_key_was_rotated(relay: RelayProcess, topic: str) -> None:
    alice, now = Identity.generate(), int(time.time())
    new, stranger = (Identity.generate().speaking_for(alice.did) for _ in range(2))

    def said(signer: Signer, text: bytes, at: int) -> Packet:
        """A message of the phone that no relay has kept."""
        segment = Segment(entire_message_hash=message_hash(text), data_segment_count=1, payload=text)
        message = SdsMessage(
            message_id=secrets.token_hex(32),
            channel_id="room",
            sender_id=f"{alice.did}#phone",
            lamport_timestamp=at * 1_000,
            content=encode_segment(segment),
        )
        envelope = MessageEnvelope(content_topic=topic, payload=message.encode())
        return build_packet(signer, envelope, now=at, nonce=f"0x{secrets.token_hex(16)}")

    rotation = rotate_content(
        f"{alice.did}#keys-2", new.public_key, replaces=f"{alice.did}#keys-1", valid_from=now - 2 * HOUR
    )
    async with (
        strata.connect(relay.ws, identity=alice) as publishing,
        using(relay, topic, Identity.generate(), sender_binding="did") as bob,
    ):
        await publishing.publish(packets.build(alice, rotation, timestamp=now))
        for original in (
            said(alice, b"by the first key", now - 5 * HOUR),
            # What the relay receives from a key counts from then on; the old key ended before that.
            said(new, b"by the second key", now + 10),
            said(alice, b"by the first key, after its time", now + 10),
            said(stranger, b"by nobody's key", now - HOUR),
        ):
            again = build_repair(new, original, now=int(time.time()), nonce=f"0x{secrets.token_hex(16)}")
            await publishing.publish(again)
        async with using(relay, topic, new, device="laptop", sender_binding="did") as laptop:
            await laptop.channel.send(b"that was all")
            await until(lambda: b"that was all" in bob.texts, "Bob hears the laptop")
        assert bob.texts == [b"by the first key", b"by the second key", b"that was all"]
        assert {each.author for each in bob.heard} == {alice.did}
        assert {each.device for each in bob.heard} == {"phone", "laptop"}

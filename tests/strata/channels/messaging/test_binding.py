"""A transport message as a packet and back: shape, limits, and what is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from strata.channels.messaging import InvalidContentTopic, MessageEnvelope, NodeError, check_content_topic
from strata.channels.messaging.binding import (
    PROFILE,
    build_packet,
    build_repair,
    largest_payload,
    original_of,
    read_packet,
)
from strata.protocol import canonical, packets
from strata.protocol.errors import InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet

NOW = 1_760_000_000
TOPIC = "/chat/1/room/proto"
ALICE, BOB = Identity.from_seed(bytes(32)), Identity.from_seed(bytes([1]) * 32)
NONCE = "0x" + "ab" * 16


def envelope(payload: bytes = b"hello", **members) -> MessageEnvelope:
    return MessageEnvelope(content_topic=TOPIC, payload=payload, **members)


def packed(payload: bytes = b"hello", **members) -> Packet:
    return build_packet(ALICE, envelope(payload, **members), now=NOW, nonce=NONCE)


def with_content(content: dict, signer: Identity = ALICE) -> Packet:
    return packets.build(signer, content, timestamp=NOW, nonce=NONCE)


# The shape.


@pytest.mark.req("C-260", "C-280")
def test_a_message_becomes_a_packet_of_the_agreed_shape():
    packet = packed(b"\x00\xffhello")
    assert packet.content == {
        "type": TOPIC,
        "profile": "reliable-channel/1",
        "payload": base64.b64encode(b"\x00\xffhello").decode(),
    }
    assert packet.author_id == ALICE.did
    assert packet.timestamp == NOW and packet.value["nonce"] == NONCE
    assert packet.value.get("expires_at") is None


@pytest.mark.req("C-280")
def test_such_a_packet_is_one_that_every_relay_takes():
    packet = Packet.parse(packed().canonical)
    packet.verify()
    packets.check_freshness(packet, NOW)


@pytest.mark.req("C-260", "C-185", "C-290")
def test_an_ephemeral_message_says_so_and_expires_within_a_minute():
    assert envelope().ephemeral is False
    packet = build_packet(ALICE, envelope(ephemeral=True), now=NOW, nonce=NONCE)
    assert packet.content["ephemeral"] is True
    assert packet.value["expires_at"] == NOW + 60


@pytest.mark.req("C-295")
def test_a_retention_of_an_hour_is_an_expiry_in_an_hour():
    assert packed(retention_seconds=3600).value["expires_at"] == NOW + 3600


@pytest.mark.req("C-185", "C-290")
def test_no_retention_makes_an_ephemeral_message_live_longer():
    said = envelope(ephemeral=True, retention_seconds=3600)
    packet = build_packet(ALICE, said, now=NOW, nonce=NONCE)
    assert packet.value["expires_at"] == NOW + 60


@pytest.mark.req("C-283")
def test_what_was_packed_is_read_back_with_its_author_and_hash():
    packet = packed(bytes(range(256)))
    message = read_packet(Packet.parse(packet.canonical), TOPIC)
    assert message is not None
    assert message.message_hash == bytes.fromhex(packet.packet_id[2:]) and len(message.message_hash) == 32
    received = message.message
    assert received.payload == bytes(range(256)) and received.content_topic == TOPIC
    assert received.author == ALICE.did and received.timestamp == NOW and not received.ephemeral


@pytest.mark.req("C-260")
def test_an_ephemeral_message_is_read_back_as_one():
    message = read_packet(build_packet(ALICE, envelope(ephemeral=True), now=NOW, nonce=NONCE), TOPIC)
    assert message is not None and message.message.ephemeral


# What is not a message.


@pytest.mark.req("C-284")
@pytest.mark.parametrize(
    "content",
    [
        {"type": "/chat/1/other/proto", "profile": PROFILE, "payload": "aGk="},
        {"type": TOPIC, "profile": "reliable-channel/2", "payload": "aGk="},
        {"type": TOPIC, "payload": "aGk="},
        {"type": "POST", "text": TOPIC},
        {"type": TOPIC, "profile": PROFILE},
        {"type": TOPIC, "profile": PROFILE, "payload": ["aGk="]},
        {"type": TOPIC, "profile": PROFILE, "payload": None},
        {"type": TOPIC, "profile": PROFILE, "payload": "aGk"},
        {"type": TOPIC, "profile": PROFILE, "payload": "a Gk="},
        {"type": TOPIC, "profile": PROFILE, "payload": "héé="},
        {"type": TOPIC, "profile": PROFILE, "payload": "_-8="},
    ],
)
def test_whatever_is_no_message_of_this_topic_is_none(content):
    assert read_packet(with_content(content), TOPIC) is None


@pytest.mark.parametrize("claim", ["true", 1, None, {}])
def test_only_true_makes_a_message_ephemeral(claim):
    content = {"type": TOPIC, "profile": PROFILE, "payload": "aGk=", "ephemeral": claim}
    message = read_packet(with_content(content), TOPIC)
    assert message is not None and message.message.ephemeral is False


# Sizes.


@pytest.mark.req("C-289")
@pytest.mark.parametrize("topic", ["/x", TOPIC, "/" + "ä" * 127 + "x"])
@pytest.mark.parametrize("limit", [2_000, 20_480, 65_537, 262_144])
def test_the_largest_payload_fits_whatever_else_the_packet_says(topic, limit):
    most = largest_payload(ALICE.did, topic, limit)
    full = MessageEnvelope(content_topic=topic, payload=bytes(most), ephemeral=True, retention_seconds=3600)
    packet = build_packet(ALICE, full, now=NOW, nonce=NONCE, max_bytes=limit)
    assert limit - 64 < packet.size_bytes <= limit, "and wastes next to nothing"


@pytest.mark.req("C-289")
def test_what_does_not_fit_is_refused_and_not_sent():
    with pytest.raises(InvalidPacket):
        build_packet(ALICE, envelope(bytes(1_000)), now=NOW, nonce=NONCE, max_bytes=1_000)


@pytest.mark.req("C-289")
@pytest.mark.parametrize("limit", [5_000, 262_144])
def test_a_payload_that_is_to_be_repairable_fits_embedded_too(limit):
    most = largest_payload(ALICE.did, TOPIC, limit, repairable=True)
    original = packed(bytes(most), retention_seconds=3600)
    repair = build_repair(BOB, original, now=NOW, nonce=NONCE, retention_seconds=3600, max_bytes=limit)
    assert limit - 128 < repair.size_bytes <= limit


def test_where_nothing_fits_the_largest_payload_is_none_at_all():
    assert largest_payload(ALICE.did, TOPIC, 100) == 0


# Repairs.


@pytest.mark.req("C-294")
def test_a_repair_embeds_the_signed_original_in_the_place_of_a_payload():
    original = packed(b"said by alice")
    repair = build_repair(BOB, original, now=NOW + 500, nonce="0x" + "cd" * 16)
    assert repair.author_id == BOB.did and repair.timestamp == NOW + 500
    assert repair.packet_id != original.packet_id
    assert "payload" not in repair.content
    assert canonical.encode(repair.content["original"]) == original.canonical


@pytest.mark.req("C-287", "C-294")
def test_a_repair_reads_as_the_message_of_its_original_author():
    repair = build_repair(BOB, packed(b"said by alice"), now=NOW + 10 * 86_400, nonce=NONCE)
    message = read_packet(Packet.parse(repair.canonical), TOPIC)
    assert message is not None
    assert message.message.author == ALICE.did and message.message.payload == b"said by alice"
    assert message.message_hash == repair.digest, "the hash finds the packet that came, not the one inside"


@pytest.mark.req("C-294")
def test_a_repair_of_a_repair_embeds_the_original_and_not_the_first_repair():
    original = packed(b"said by alice")
    repair = build_repair(BOB, original, now=NOW, nonce=NONCE)
    assert original_of(original) is original
    found = original_of(repair)
    assert found is not None and found.canonical == original.canonical


def forge(change) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(packed(b"said by alice").canonical)
    change(value)
    return value


def other_text(value: dict) -> None:
    value["content"]["payload"] = base64.b64encode(b"never said").decode()


def other_author(value: dict) -> None:
    value["author_id"] = BOB.did


def no_signature(value: dict) -> None:
    del value["signature"]


@pytest.mark.req("C-286", "C-287")
@pytest.mark.parametrize("change", [other_text, other_author, no_signature])
def test_an_embedded_original_that_was_touched_proves_nothing(change):
    content = {"type": TOPIC, "profile": PROFILE, "original": forge(change)}
    packet = with_content(content, BOB)
    assert original_of(packet) is None
    assert read_packet(packet, TOPIC) is None


class InAnothersName:
    """Signs with its own key, but claims another author."""

    did = ALICE.did

    def sign(self, message: bytes) -> bytes:
        return BOB.sign(message)


@pytest.mark.req("C-286", "C-287")
def test_an_embedded_original_that_is_whole_but_signed_by_another_proves_nothing():
    forged = build_packet(InAnothersName(), envelope(b"never said"), now=NOW, nonce=NONCE)
    assert Packet.parse(forged.canonical).author_id == ALICE.did
    assert read_packet(build_repair(BOB, forged, now=NOW, nonce=NONCE), TOPIC) is None


@pytest.mark.req("C-287")
@pytest.mark.parametrize("original", [None, "0x00", 7, [], {}])
def test_an_original_that_is_no_packet_proves_nothing(original):
    packet = with_content({"type": TOPIC, "profile": PROFILE, "original": original}, BOB)
    assert read_packet(packet, TOPIC) is None


@pytest.mark.req("C-287")
def test_an_original_beside_a_payload_proves_nothing_about_the_payload():
    content = {"type": TOPIC, "profile": PROFILE, "payload": "aGk=", "original": packed().value}
    assert read_packet(with_content(content, BOB), TOPIC) is None


@pytest.mark.req("C-287")
def test_an_original_of_another_topic_or_profile_proves_nothing_here():
    elsewhere = MessageEnvelope(content_topic="/other", payload=b"x")
    for original in (
        build_packet(ALICE, elsewhere, now=NOW, nonce=NONCE),
        with_content({"type": TOPIC, "payload": "aGk="}),
        build_repair(BOB, packed(), now=NOW, nonce=NONCE),
    ):
        content = {"type": TOPIC, "profile": PROFILE, "original": original.value}
        assert read_packet(with_content(content, BOB), TOPIC) is None


# Content topics.


@pytest.mark.req("C-281")
@pytest.mark.parametrize(
    "topic",
    ["/x", "/chat/1/room/proto", "/räume/1/küche/proto", "/" + "x" * 255, "/" + "ä" * 127 + "x", "//"],
)
def test_a_topic_of_2_to_256_bytes_that_begins_with_a_slash_is_one(topic):
    assert check_content_topic(topic) == topic


@pytest.mark.req("C-281")
@pytest.mark.parametrize("topic", ["/部屋　一", "/a\u00a0b", "/👩\u200d💻", "/\U0001fae9"], ids=ascii)
def test_no_character_is_refused_but_control_characters_whatever_this_python_knows_of_unicode(topic):
    assert check_content_topic(topic) == topic


@pytest.mark.req("C-281")
@pytest.mark.parametrize(
    "topic",
    [
        "",
        "/",
        "chat",
        "chat/1/room/proto",
        " /chat",
        "POST",
        "/" + "x" * 256,
        "/" + "ä" * 128,
        "/a\x00b",
        "/a\nb",
        "/a\tb",
        "/a\x1b[31m",
        "/a\x7f",
        "/a\x85b",
        "/\x9f",
        "/\ud800",
        "/a\udfff",
        "/\udc80b",
    ],
    ids=ascii,
)
def test_anything_else_is_refused_with_a_sentence_that_can_be_printed(topic):
    with pytest.raises(InvalidContentTopic) as caught:
        check_content_topic(topic)
    assert isinstance(caught.value, NodeError) and isinstance(caught.value, ValueError)
    assert caught.value.topic == topic
    assert str(caught.value).isprintable()
    str(caught.value).encode()

"""Converts transport messages to packets and back (channel.md §15; decisions A-049, A-131).

    content = {"type": <content topic>, "profile": "reliable-channel/1", "payload": <base64>}

An ephemeral message has `"ephemeral": true`, and a repetition of another participant's message has
`"again": true`. The topic is the packet's type, so every RFC-0004 relay stores and filters channels without
knowing about them.

With `sender_binding` a message that someone else sends again keeps its proof of origin: the packet then has
`original`, the packet as its author signed it, instead of `payload` (A-130). Relays know which key signed for
an author at that time; `embedded_in` returns the packet for that check.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import base64
import binascii
from functools import lru_cache

from strata.channels.messaging.values import MessageEnvelope, NodeMessageReceived, ReceivedEnvelope
from strata.protocol import canonical, ids, packets
from strata.protocol.canonical import DEEPEST
from strata.protocol.errors import InvalidPacket
from strata.protocol.packets import Packet

__all__ = [
    "EPHEMERAL_SECONDS",
    "PROFILE",
    "build_packet",
    "build_repair",
    "embedded_in",
    "largest_payload",
    "original_of",
    "read_packet",
]

PROFILE = "reliable-channel/1"
EPHEMERAL_SECONDS = 60
"""How long a relay serves an ephemeral message (C-185)."""

_MAX_REMEMBERED, _MAX_REMEMBERED_BYTES = 256, 4_096
"""Many channels of one process may read the same packet, so each of the last small ones is decoded once."""
_EXPIRES_BYTES = len(b'"expires_at":,') + 12
_EPHEMERAL_BYTES = len(b'"ephemeral":true,')
_ORIGINAL_BYTES = len(b'"original":')


def build_packet(
    signer: ids.Signer,
    envelope: MessageEnvelope,
    *,
    now: int,
    nonce: str,
    max_bytes: int = packets.DEFAULT_MAX_PACKET_BYTES,
) -> Packet:
    """Build the packet for a message, as of `now` in Unix seconds (C-280, C-282, C-293).

    Raises `InvalidPacket` if the packet is larger than `max_bytes` (C-289).
    """
    content: dict[str, object] = {
        "type": envelope.content_topic,
        "profile": PROFILE,
        "payload": base64.b64encode(envelope.payload).decode("ascii"),
    }
    expires_at = None if envelope.retention_seconds is None else now + envelope.retention_seconds
    if envelope.ephemeral:
        content["ephemeral"] = True
        expires_at = now + EPHEMERAL_SECONDS
    elif envelope.again:  # shorter than the member above, for which every packet leaves room
        content["again"] = True
    return packets.build(
        signer, content, timestamp=now, expires_at=expires_at, nonce=nonce, max_bytes=max_bytes
    )


def build_repair(
    signer: ids.Signer,
    original: Packet,
    *,
    now: int,
    nonce: str,
    retention_seconds: int | None = None,
    max_bytes: int = packets.DEFAULT_MAX_PACKET_BYTES,
) -> Packet:
    """Build a packet around a packet that another author signed (C-294). Raises as `build_packet` does."""
    content = {"type": original.content_type, "profile": PROFILE, "original": original.value}
    expires_at = None if retention_seconds is None else now + retention_seconds
    return packets.build(
        signer, content, timestamp=now, expires_at=expires_at, nonce=nonce, max_bytes=max_bytes
    )


def read_packet(packet: Packet, topic: str, original: Packet | None = None) -> NodeMessageReceived | None:
    """Return the message in a verified packet; None if it is not a message on this topic (C-284, C-286).

    `original` is the embedded packet, if it was found genuine by its author's keys; without it the embedded
    packet must be signed by the key in its author's DID.
    """
    if original is None and packet.size_bytes <= _MAX_REMEMBERED_BYTES:
        return _read_small(packet, topic)
    return _read(packet, topic, original)


def _read(packet: Packet, topic: str, original: Packet | None = None) -> NodeMessageReceived | None:
    content = packet.content
    if packet.content_type != topic or content.get("profile") != PROFILE:
        return None
    carrier = packet
    if "original" in content:
        original = original or original_of(packet)
        if original is None or "payload" in content:
            return None
        carrier, content = original, original.content
    payload = _payload(content)
    if payload is None:
        return None
    again = content.get("again") is True
    return NodeMessageReceived(
        packet.digest,
        ReceivedEnvelope(
            content_topic=topic,
            payload=payload,
            ephemeral=content.get("ephemeral") is True,
            author=None if again else carrier.author_id,
            timestamp=None if again else carrier.timestamp,
        ),
    )


_read_small = lru_cache(_MAX_REMEMBERED)(_read)


def original_of(packet: Packet) -> Packet | None:
    """The packet to embed in a repair of this one: itself, or the packet that it embeds if that is genuine.

    Genuine means here that it is signed by the key in its author's own DID; its age does not matter.
    """
    if packet.content.get("original") is None:
        return packet
    original = embedded_in(packet)
    try:
        if original is not None:
            original.verify()
    except InvalidPacket:
        return None
    return original


def embedded_in(packet: Packet) -> Packet | None:
    """The packet that this one embeds as a repair, with its signature not yet verified; None if invalid."""
    try:
        original = Packet.read(canonical.encode(packet.content.get("original"), max_depth=DEEPEST))
    except InvalidPacket:
        return None
    same = original.content_type == packet.content_type and original.content.get("profile") == PROFILE
    return original if same and "original" not in original.content else None


def largest_payload(author: str, topic: str, max_packet_bytes: int, *, repairable: bool = False) -> int:
    """The largest payload that fits into a packet in base64, in bytes (C-289); 0 if none fits.

    `repairable` leaves room for the packet to be embedded in another one.
    """
    blank = packets.build(
        _Measure(author),
        {"type": topic, "profile": PROFILE, "payload": ""},
        timestamp=10**10 - 1,
        nonce="0x" + "00" * 16,
    )
    around = blank.size_bytes + _EXPIRES_BYTES + _EPHEMERAL_BYTES
    room = max_packet_bytes - around - (around + _ORIGINAL_BYTES if repairable else 0)
    return max(0, room // 4 * 3)


def _payload(content: dict[str, object]) -> bytes | None:
    text = content.get("payload")
    if type(text) is not str:
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


class _Measure:
    """A signer that signs nothing, for packets that are only measured."""

    def __init__(self, did: str) -> None:
        self.did = did

    def sign(self, message: bytes) -> bytes:
        return bytes(64)

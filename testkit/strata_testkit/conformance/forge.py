"""Packets for checks: sound ones, and ones with exactly the fault that a check is about.

`seal` gives any members a correct id and signature, so that the fault is the only reason to refuse the
packet; `flipped`, `malleated` and the like change a sound packet in one place.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from strata.protocol import canonical, packets
from strata.protocol.auth import signing_input
from strata.protocol.ids import Signer
from strata.protocol.packets import Packet

__all__ = [
    "GROUP_ORDER",
    "KeyOf",
    "auth_message",
    "flipped",
    "malleated",
    "members",
    "packet_id_of",
    "publish_text",
    "respelled",
    "seal",
    "sized",
    "with_member",
]

GROUP_ORDER = 2**252 + 27742317777372353535851937790883648493
"""The order of the Ed25519 group (RFC 8032 §5.1)."""

_MANY_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class KeyOf:
    """Another key that signs for a DID."""

    did: str
    key: Signer

    def sign(self, message: bytes) -> bytes:
        """The signature of `key`."""
        return self.key.sign(message)


def members(packet: Packet, **changes: object) -> dict[str, object]:
    """The members of a packet with some changes; `...` removes a member."""
    changed = packet.value | changes
    return {name: value for name, value in changed.items() if value is not ...}


def seal(signer: Signer, value: Mapping[str, object]) -> bytes:
    """A packet of these members with a correct id and signature, whatever else is wrong with it."""
    body = {name: item for name, item in value.items() if name not in ("packet_id", "signature")}
    signed = canonical.encode(body)
    body["packet_id"] = packets.byte_hash(signed)
    body["signature"] = "0x" + signer.sign(signed).hex()
    return canonical.encode(body)


def packet_id_of(raw: bytes) -> str:
    """The `packet_id` member of a packet's text."""
    found: str = json.loads(raw)["packet_id"]
    return found


def flipped(raw: bytes, member: str) -> bytes:
    """The packet with the first hex digit of a `0x…` member changed."""
    before = f'"{member}":"0x'.encode()
    at = raw.index(before) + len(before)
    return raw[:at] + (b"1" if raw[at : at + 1] == b"0" else b"0") + raw[at + 1 :]


def malleated(packet: Packet) -> bytes:
    """The packet with the other signature that lax verifiers accept: S + L in place of S."""
    signature = packet.signature_bytes
    scalar = int.from_bytes(signature[32:], "little") + GROUP_ORDER
    other = signature[:32] + scalar.to_bytes(32, "little")
    return canonical.encode(members(packet, signature="0x" + other.hex()))


def respelled(packet: Packet) -> str:
    """The same JSON value spelled differently: spaces, escapes, order of members, `1.0` for `1`."""
    turned = dict(reversed(packet.value.items()))
    text = json.dumps(turned, indent=1, ensure_ascii=True)
    return text.replace(f'"timestamp": {packet.timestamp}', f'"timestamp": {packet.timestamp}.0')


def with_member(raw: bytes, text: str) -> bytes:
    """The packet with one more member, given as text, which an encoder might not write."""
    return raw[:-1] + b"," + text.encode("utf-8", "surrogatepass") + b"}"


def sized(
    signer: Signer,
    content: Mapping[str, object],
    size_bytes: int,
    *,
    timestamp: int,
    expires_at: int | None = None,
) -> Packet:
    """A packet whose canonical form has exactly `size_bytes` bytes; its text fills it up."""

    def made(text: str) -> Packet:
        return packets.build(
            signer,
            {**content, "text": text},
            timestamp=timestamp,
            expires_at=expires_at,
            max_bytes=_MANY_BYTES,
        )

    return made("x" * (size_bytes - made("").size_bytes))


def publish_text(packet: Packet | bytes | str, client_msg_id: str | None = None) -> str:
    """A PUBLISH that contains exactly these bytes as its packet."""
    if isinstance(packet, Packet):
        packet = packet.canonical
    text = packet.decode("utf-8", "surrogatepass") if isinstance(packet, bytes) else packet
    name = "" if client_msg_id is None else f'"client_msg_id":{json.dumps(client_msg_id)},'
    return f'{{"type":"PUBLISH",{name}"packet":{text}}}'


def auth_message(
    signer: Signer, challenge: Mapping[str, object], *, signed: bytes | None = None, **changes: object
) -> dict[str, object]:
    """An AUTH that answers a challenge; `signed` replaces the bytes signed, `...` removes a member."""
    text = signing_input(str(challenge["challenge"]), str(challenge["server_id"]))
    message = {
        "type": "AUTH",
        "author_id": signer.did,
        "challenge": challenge["challenge"],
        "signature": "0x" + signer.sign(text if signed is None else signed).hex(),
    }
    return {name: value for name, value in (message | changes).items() if value is not ...}

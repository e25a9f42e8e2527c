"""Packets for tests: good ones by number, and ones with exactly the faults that a test names."""

from __future__ import annotations

import itertools
import time
from typing import Any

from blake3 import blake3
from strata.protocol import canonical, packets
from strata.protocol.ids import Identity, Signer
from strata.protocol.packets import Packet

__all__ = ["ids_of", "make", "new_identity", "seal", "sized"]

_numbers = itertools.count(1)


def new_identity() -> Identity:
    """An identity that no other test of this run has."""
    return Identity(blake3(b"test identity %d" % next(_numbers)).digest())


def make(
    identity: Signer, text: str = "hello", *, type: str = "POST", age: int = 0, **members: Any
) -> Packet:
    """A valid packet, `age` seconds old; `expires_in` and content members by name."""
    now = int(time.time())
    expires_in = members.pop("expires_in", None)
    extra = members.pop("extra", None)
    return packets.build(
        identity,
        {"type": type, "text": text, **members},
        timestamp=now - age,
        expires_at=None if expires_in is None else now + expires_in,
        nonce=str(next(_numbers)),
        extra=extra,
        max_bytes=2**30,
    )


def seal(identity: Identity, members: dict[str, Any]) -> bytes:
    """Any members under a correct id and signature, whatever else is wrong with them."""
    body = {key: value for key, value in members.items() if key not in ("packet_id", "signature")}
    signed = canonical.encode(body)
    body["packet_id"] = packets.byte_hash(signed)
    body["signature"] = "0x" + identity.sign(signed).hex()
    return canonical.encode(body)


def sized(identity: Identity, size_bytes: int) -> Packet:
    """A packet whose canonical form has exactly `size_bytes` bytes."""
    nonce = f"{next(_numbers):012}"
    now = int(time.time())
    empty = packets.build(identity, {"type": "POST", "text": ""}, timestamp=now, nonce=nonce)
    text = "x" * (size_bytes - empty.size_bytes)
    packet = packets.build(
        identity, {"type": "POST", "text": text}, timestamp=now, nonce=nonce, max_bytes=2**30
    )
    assert packet.size_bytes == size_bytes
    return packet


def ids_of(events: list[dict[str, Any]]) -> list[str]:
    """The packet ids of EVENTs, in order."""
    return [event["packet"]["packet_id"] for event in events]

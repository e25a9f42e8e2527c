"""Tombstones: what remains of a packet that a relay has erased.

A tombstone is a canonical JSON object that the relay has signed. It states the packet's id, its place and its
times, and nothing about the packet's content or author:

    {"erased_at":…,"packet_id":"0x…","received_at":…,"relay_id":"did:…","sequence":…,"signature":"0x…",
     "type":"TOMBSTONE"}

The signature covers the canonical form of all other members.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from strata.protocol import canonical
from strata.protocol.errors import ErrorCode, IdentityError, InvalidInput
from strata.protocol.fields import hex_bytes, integer, is_content_id
from strata.protocol.ids import Signer, public_key_from_did, verify

__all__ = ["Tombstone", "read_tombstone", "sign_tombstone", "told_place"]

_TYPE: Final = "TOMBSTONE"
_ID_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Tombstone:
    """One erased packet; times are in Unix seconds.

    For a damaged row, the id and the time of receipt are those of `told_place`.
    """

    packet_id: str
    sequence: int
    received_at: int
    erased_at: int
    relay_id: str
    """The DID of the relay that has erased it."""


def told_place(packet_id: bytes, received_at: int) -> tuple[str, int]:
    """The id and the time of receipt that a tombstone states for a row.

    They are the row's own, unless a damaged row has values that a tombstone cannot hold: an id that is not 32
    bytes long is replaced by its hash, as in a manifest of a lake, and a time beyond ±(2**53 - 1) by the
    nearest one within.
    """
    if len(packet_id) != _ID_BYTES:
        packet_id = blake3(packet_id).digest()
    most = canonical.MAX_SAFE_INTEGER
    return f"0x{packet_id.hex()}", min(max(received_at, -most), most)


def sign_tombstone(tombstone: Tombstone, signer: Signer) -> bytes:
    """The tombstone in canonical form, signed. Raises `ValueError` if `signer` is not the relay that the
    tombstone names, and `InvalidInput` for a number that canonical form cannot hold (`told_place`)."""
    if signer.did != tombstone.relay_id:
        raise ValueError("a tombstone is signed by the relay that it names")
    members = _members(tombstone)
    signature = signer.sign(canonical.encode(members))
    return canonical.encode({**members, "signature": "0x" + signature.hex()})


def read_tombstone(raw: bytes, public_key: bytes | None = None) -> Tombstone:
    """Read a tombstone whose signature verifies under `public_key`, by default the key in the relay's DID.

    Raises `InvalidInput` for anything else.
    """
    value, _ = canonical.parse(raw)
    members: dict[str, object] = value if isinstance(value, dict) else {}
    signature = hex_bytes(members.get("signature"), 64)
    packet_id, relay_id = members.get("packet_id"), members.get("relay_id")
    numbers = [integer(members.get(name)) for name in ("sequence", "received_at", "erased_at")]
    if (
        members.get("type") != _TYPE
        or signature is None
        or not isinstance(packet_id, str)
        or not is_content_id(packet_id)
        or not isinstance(relay_id, str)
        or None in numbers
    ):
        raise InvalidInput(ErrorCode.INVALID_SCHEMA, "not a tombstone")
    sequence, received_at, erased_at = (number or 0 for number in numbers)
    tombstone = Tombstone(packet_id, sequence, received_at, erased_at, relay_id)
    try:
        key = public_key or public_key_from_did(relay_id)
    except IdentityError:
        key = None
    if key is None or not verify(key, canonical.encode(_members(tombstone)), signature):
        reason = "the tombstone's signature is not that of the relay it names"
        raise InvalidInput(ErrorCode.INVALID_SIGNATURE, reason)
    return tombstone


def _members(tombstone: Tombstone) -> dict[str, object]:
    return {
        "type": _TYPE,
        "packet_id": tombstone.packet_id,
        "sequence": tombstone.sequence,
        "received_at": tombstone.received_at,
        "erased_at": tombstone.erased_at,
        "relay_id": tombstone.relay_id,
    }

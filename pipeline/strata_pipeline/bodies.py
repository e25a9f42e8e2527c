"""The body of a row: the members that are compared with its columns, and the bytes that were signed."""

from __future__ import annotations

import re

import msgspec
from blake3 import blake3

__all__ = ["PacketBody", "PacketContent", "read_body", "signed_bytes"]

_is_signature = re.compile(r"0[xX][0-9a-fA-F]{128}").fullmatch
_AFTER_ID = (b'"provenance_header":', b'"signature":')
_AFTER_SIGNATURE = b'"timestamp":'


class PacketContent(msgspec.Struct, gc=False):
    """The part of a packet's content that is read."""

    type: str


class PacketBody(msgspec.Struct, gc=False):
    """The members of a packet that have columns, and its signature."""

    packet_id: str
    author_id: str
    timestamp: int
    signature: str
    content: PacketContent
    expires_at: int | None = None


_DECODER = msgspec.json.Decoder(PacketBody)


def read_body(body: bytes) -> PacketBody | None:
    """The members to compare; None for bytes that are not a packet."""
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def signed_bytes(body: bytes, packet_id: bytes, told: PacketBody) -> bytes | None:
    """The bytes that the author signed, if the body is clearly the packet with this id; else None."""
    digits = packet_id.hex()
    if told.packet_id != f"0x{digits}" or not _is_signature(told.signature):
        return None
    first, _, rest = body.partition(f'"packet_id":"0x{digits}",'.encode())
    middle, _, last = rest.partition(f'"signature":"{told.signature}",'.encode())
    # Both members stand where canonical form has them: nobody has moved what the hash does not cover.
    if not rest.startswith(_AFTER_ID) or not last.startswith(_AFTER_SIGNATURE):
        return None
    signed = first + middle + last
    return signed if blake3(signed).digest() == packet_id else None

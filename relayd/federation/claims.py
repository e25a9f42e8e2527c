"""What a peer's packet says about itself, before any of it is checked: its id and its time."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import msgspec
from strata.protocol.canonical import MAX_SAFE_INTEGER
from strata.protocol.fields import is_content_id

__all__ = ["claimed_id", "claims_of"]


class _Claims(msgspec.Struct, gc=False):
    packet_id: str
    timestamp: object = None


_CLAIMS = msgspec.json.Decoder(_Claims)


def claimed_id(raw: bytes | msgspec.Raw) -> str:
    """The id that the packet claims; empty if it claims none."""
    claims = _read(raw)
    return "" if claims is None else claims.packet_id


def claims_of(raw: bytes) -> tuple[bytes, int] | None:
    """The id and the time that the packet claims; None if one of them is missing or invalid."""
    claims = _read(raw)
    if claims is None or not is_content_id(claims.packet_id):
        return None
    at = claims.timestamp
    if type(at) is not int or not 0 <= at <= MAX_SAFE_INTEGER:
        return None
    return bytes.fromhex(claims.packet_id[2:]), at


def _read(raw: bytes | msgspec.Raw) -> _Claims | None:
    try:
        return _CLAIMS.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None

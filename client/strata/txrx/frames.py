"""The contents of frames, and the header of a connection (T-034, T-048, T-081, T-082; A-155, A-157).

connection, from the dialler:   magic "STRX", session id (8 bytes, big endian), version (1 byte): 13 bytes
to the server:                  body = sequence (8 bytes, big endian), message as the codec wrote it
                                parts = large bytes of the message
to the sender:                  body = 0, sequence (8 bytes, big endian)       Ack
                                       1, reason (UTF-8)                       Reject
                                       2, reason (UTF-8)                       Closed
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import TypeAlias

from strata.txrx.errors import ProtocolViolation
from strata.txrx.multipart import Frame, frame_of

__all__ = [
    "HEADER_BYTES",
    "MAX_RESPONSE_BYTES",
    "SEQUENCE",
    "Ack",
    "Closed",
    "Reject",
    "Response",
    "encode_header",
    "encode_response",
    "read_header",
    "read_response",
]

MAGIC = b"STRX"
VERSION = 1
_HEADER = Struct(">4sQB")
HEADER_BYTES = _HEADER.size
SEQUENCE = Struct(">Q")
_MAX_REASON = 1024
MAX_RESPONSE_BYTES = 16 + 1 + _MAX_REASON
"""The longest frame to a sender."""


@dataclass(frozen=True, slots=True)
class Ack:
    """All messages up to this sequence are in the server's queue."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Reject:
    """The session is over: the sender broke a rule, or the server no longer knows the session."""

    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The receiver is gone permanently."""

    reason: str


Response: TypeAlias = Ack | Reject | Closed


def encode_header(session_id: int) -> bytes:
    """The first bytes that a dialler sends."""
    return _HEADER.pack(MAGIC, session_id, VERSION)


def read_header(data: bytes | bytearray | memoryview) -> int:
    """The session id. Raises `ProtocolViolation` for other magic or another version."""
    magic, session_id, version = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolViolation("the connection does not begin as a Tx begins it")
    if version != VERSION:
        raise ProtocolViolation(f"version {version} of the wire; this is version {VERSION}")
    return int(session_id)


def encode_response(response: Response) -> bytes:
    """The frame of a response."""
    match response:
        case Ack(sequence):
            body = b"\0" + SEQUENCE.pack(sequence)
        case Reject(reason):
            body = b"\1" + _shortened(reason)
        case Closed(reason):
            body = b"\2" + _shortened(reason)
    return b"".join(frame_of(body))


def read_response(frame: Frame) -> Response:
    """The response in a frame. Raises `ProtocolViolation` for any other frame."""
    body = frame[0] if len(frame) == 1 else b""
    match body[:1]:
        case b"\0" if len(body) == 1 + SEQUENCE.size:
            return Ack(SEQUENCE.unpack_from(body, 1)[0])
        case b"\1":
            return Reject(body[1:].decode(errors="replace"))
        case b"\2":
            return Closed(body[1:].decode(errors="replace"))
    raise ProtocolViolation("neither Ack, nor Reject, nor Closed")


def _shortened(reason: str) -> bytes:
    return reason.encode(errors="replace")[:_MAX_REASON]

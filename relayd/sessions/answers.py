"""The messages a relay answers with, as the text of their frames: OK, AUTH_OK and every kind of ERROR.

Each message says what the peer needs in order to go on, and no more: nothing about policy for others or about
other connections, and no part of the peer's own message (R-199).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from strata.protocol.errors import ErrorCode, InvalidMessage, InvalidPacket
from strata.protocol.wire import EXTENSIONS, AuthOk, Error, Ok, encode

from relayd.access.limits import Excess

__all__ = [
    "auth_ok_payload",
    "closed_by_operator_payload",
    "error_payload",
    "fault_payload",
    "filters_too_large_payload",
    "frame_too_large_payload",
    "limited_payload",
    "lost_place_payload",
    "missing_payload",
    "ok_payload",
    "read_failure_payload",
    "refusal_payload",
    "too_many_payload",
]

_MEMBERS: Final[msgspec.json.Decoder[dict[str, Any]]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIMIT_SENTENCES: Final = {
    "publish": "too many packets in too short a time",
    "subscribe": "too many subscriptions opened in too short a time",
    "backfill": "too many bytes of history read in too short a time",
    "memory": "the relay is short of memory, and this address holds much of it",
    "auth": "too many attempts to authenticate in too short a time",
}


def ok_payload(
    packet_id: str,
    received_at: int,
    client_msg_id: str | None,
    *,
    duplicate: bool,
    duplicate_of: bytes | None = None,
    queued: bool = False,
    annotations: bytes | None = None,
) -> bytes:
    """The OK for a stored packet. It marks a duplicate (R-110) and a packet that waits (R-088).

    `annotations` is the JSON object of what the relay found about the packet (R-209).
    """
    return encode(
        Ok(
            packet_id=packet_id,
            status="QUEUED" if queued else "ACCEPTED",
            client_msg_id=client_msg_id,
            received_at=received_at,
            duplicate=True if duplicate else None,
            duplicate_of=None if duplicate_of is None else "0x" + duplicate_of.hex(),
            # Members are passed on as they are: decoding could respell a number that the proof needs.
            relay_annotations=None if annotations is None else _MEMBERS.decode(annotations),
        )
    )


def refusal_payload(error: InvalidPacket, client_msg_id: str | None) -> bytes:
    """The ERROR for a packet that is not stored."""
    return encode(
        Error(
            code=error.code,
            reason=error.reason,
            detail=error.detail,
            client_msg_id=client_msg_id,
            max_bytes=error.max_bytes,
            retry_after=error.retry_after,
            limit=error.limit,
            remaining=None if error.limit is None else 0,
            window_seconds=error.window_seconds,
        )
    )


def auth_ok_payload(author_id: str, capabilities: Sequence[str], client_msg_id: str | None) -> bytes:
    """The AUTH_OK, which always states the session's capabilities (R-285)."""
    return encode(
        AuthOk(
            author_id=author_id,
            capabilities=list(capabilities),
            client_msg_id=client_msg_id,
            extensions=list(EXTENSIONS),
        )
    )


def error_payload(error: InvalidMessage) -> bytes:
    """The ERROR for a message that was refused."""
    return encode(
        Error(
            code=error.code,
            reason=error.reason,
            detail=error.detail,
            client_msg_id=error.client_msg_id,
            subscription_id=error.subscription_id,
        )
    )


def closed_by_operator_payload() -> bytes:
    """The last ERROR of a session that an operator ends."""
    reason, code = "an operator has closed this session", ErrorCode.POLICY_REJECTED
    return encode(Error(code=code, reason=reason, detail="closed_by_operator"))


def missing_payload(capability: str, client_msg_id: str | None, subscription_id: str | None = None) -> bytes:
    """The ERROR for a request that this session may not make; the connection stays open (R-289, A-075)."""
    return encode(
        Error(
            code=ErrorCode.UNAUTHENTICATED,
            reason=f"this session lacks the capability {capability}",
            detail="missing_capability",
            client_msg_id=client_msg_id,
            subscription_id=subscription_id,
        )
    )


def limited_payload(
    limit: str, excess: Excess, client_msg_id: str | None, subscription_id: str | None = None
) -> bytes:
    """The ERROR for a request over a limit (R-314, R-315)."""
    return encode(
        Error(
            code=ErrorCode.RATE_LIMITED,
            reason=_LIMIT_SENTENCES[limit],
            detail=f"{limit}_limit",
            client_msg_id=client_msg_id,
            subscription_id=subscription_id,
            retry_after=excess.retry_after,
            limit=excess.limit,
            remaining=excess.remaining,
            window_seconds=excess.window_seconds,
        )
    )


def too_many_payload(limit: int, client_msg_id: str | None, subscription_id: str) -> bytes:
    """The ERROR for a subscription beyond the number that a session may hold (R-164)."""
    return encode(
        Error(
            code=ErrorCode.RATE_LIMITED,
            reason=f"this session already has {limit} open subscriptions; end one first",
            detail="too_many_subscriptions",
            client_msg_id=client_msg_id,
            subscription_id=subscription_id,
            retry_after=1,
            limit=limit,
            remaining=0,
            window_seconds=1,
        )
    )


def filters_too_large_payload(limit: int, client_msg_id: str | None, subscription_id: str) -> bytes:
    """The ERROR for a subscription whose filter would take too much memory together with the open ones."""
    return encode(
        Error(
            code=ErrorCode.RATE_LIMITED,
            reason=f"this session's filters would take more than {limit} bytes; end one first",
            detail="too_many_filter_bytes",
            client_msg_id=client_msg_id,
            subscription_id=subscription_id,
            retry_after=1,
            limit=limit,
            remaining=0,
            window_seconds=1,
        )
    )


def frame_too_large_payload(max_packet_bytes: int) -> bytes:
    """The ERROR for a frame larger than any packet that this relay accepts could need (R-123)."""
    return encode(
        Error(
            code=ErrorCode.PACKET_TOO_LARGE,
            reason=f"the frame is larger than any packet of {max_packet_bytes} bytes can be",
            max_bytes=max_packet_bytes,
        )
    )


def fault_payload(client_msg_id: str | None = None, subscription_id: str | None = None) -> bytes:
    """The ERROR for a message on which the relay itself failed."""
    return encode(
        Error(
            code=ErrorCode.INTERNAL_ERROR,
            reason="the relay failed on this message; connect again",
            client_msg_id=client_msg_id,
            subscription_id=subscription_id,
        )
    )


def lost_place_payload(subscription_id: str, client_msg_id: str | None, cursor: str | None) -> bytes:
    """The ERROR for a cursor into a part of the log that was lost. `cursor` is the last good place.

    It is absent if this relay cannot know how far the two logs agree.
    """
    return encode(
        Error(
            code=ErrorCode.INVALID_CURSOR,
            reason="the log has lost its end since this cursor was given out; go on from the last good place",
            detail="log_reset",
            client_msg_id=client_msg_id,
            subscription_id=subscription_id,
            cursor=cursor,
        )
    )


def read_failure_payload(subscription_id: str, client_msg_id: str | None) -> bytes:
    """The ERROR that ends a subscription whose history cannot be read in time."""
    return encode(
        Error(
            code=ErrorCode.INTERNAL_ERROR,
            reason="reading the history took too long; narrow the filters and subscribe again",
            detail="read_timeout",
            client_msg_id=client_msg_id,
            subscription_id=subscription_id,
        )
    )

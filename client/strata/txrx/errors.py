"""What can go wrong with a channel (T-012, T-019, T-023; decision A-162).

ChannelError                 `kind` says which, for programs that do not match on classes
├── ChannelClosed            the other end is gone, or this one was closed
├── DeliveryTimeout          nothing acknowledged the oldest message in time
├── InvalidAddress           no address, or none that is possible here (also a ValueError)
├── AddressInUse             somebody serves it already
├── OversizedMessage, OutboxFull
├── CodecError               a value that cannot be encoded, or bytes that cannot be decoded
├── ProtocolViolation        the peer broke the rules of the wire
├── ChannelIOError           sockets and certificates
└── SendError                a message that comes back, with one of the above
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from typing import Generic, TypeVar

from strata.protocol.errors import StrataError

__all__ = [
    "AddressInUse",
    "ChannelClosed",
    "ChannelError",
    "ChannelIOError",
    "CodecError",
    "Delivery",
    "DeliveryTimeout",
    "ErrorKind",
    "InvalidAddress",
    "OutboxFull",
    "OversizedMessage",
    "ProtocolViolation",
    "SendError",
]

M = TypeVar("M")


class ErrorKind(enum.Enum):
    """The kinds of T-023."""

    CLOSED = "closed"
    SEND = "send"
    INVALID_ADDRESS = "invalid_address"
    TIMEOUT = "timeout"
    CODEC = "codec"
    IO = "io"


class ChannelError(StrataError):
    """Something is wrong with a channel, a message or an address."""

    kind = ErrorKind.IO


class ChannelClosed(ChannelError):
    """The channel is closed; `reason` says by what, where that is known."""

    kind = ErrorKind.CLOSED

    def __init__(self, reason: str = "the channel is closed") -> None:
        super().__init__(reason)
        self.reason = reason


class DeliveryTimeout(ChannelClosed):
    """The oldest message was not acknowledged within `message_delivery_timeout`, which closed it all."""

    kind = ErrorKind.TIMEOUT


class InvalidAddress(ChannelError, ValueError):
    """Text that is no address, or an address that cannot be dialled or served."""

    kind = ErrorKind.INVALID_ADDRESS


class AddressInUse(ChannelError):
    """Somebody serves that address already, or something else is in its place."""

    kind = ErrorKind.IO


class OversizedMessage(ChannelError):
    """A message whose frame would exceed `codec_max_frame_length`. The channel stays usable."""

    kind = ErrorKind.SEND

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"oversized frame ({size}, {limit})")
        self.size, self.limit = size, limit


class OutboxFull(ChannelError):
    """`outbox_limit` messages wait already. The channel stays usable."""

    kind = ErrorKind.SEND


class CodecError(ChannelError, ValueError):
    """A value that is not of the channel's type, or bytes that are none of its messages."""

    kind = ErrorKind.CODEC


class ProtocolViolation(ChannelError):
    """The peer sent what the wire does not allow."""

    kind = ErrorKind.IO


class ChannelIOError(ChannelError):
    """A socket or a certificate that cannot be used; says which, and why."""

    kind = ErrorKind.IO


class Delivery(enum.Enum):
    """What is known of a message that came back."""

    NOT_DELIVERED = "not delivered"
    """It never left, or the other end has said that it did not take it."""
    UNKNOWN = "unknown"
    """It was written, and no acknowledgement came: it may have been delivered (T-068)."""


class SendError(ChannelError, Generic[M]):
    """A message that was not acknowledged comes back: the very object that was posted (T-019)."""

    kind = ErrorKind.SEND

    def __init__(
        self,
        error: ChannelError,
        message: M,
        *,
        reason: str | None = None,
        delivery: Delivery = Delivery.NOT_DELIVERED,
    ) -> None:
        super().__init__(f"{reason or error} (delivery: {delivery.value})")
        self.error = error
        self.message = message
        self.reason = reason if reason is not None else str(error)
        self.delivery = delivery

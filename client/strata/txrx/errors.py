"""Errors of Tx and Rx (T-012, T-019, T-023; decision A-162). The document calls their root `ChannelError`.

`strata.protocol.errors` draws them in the tree of all errors. `kind` is the kind of T-023.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from typing import Generic, TypeVar

from strata.protocol.errors import StrataError

__all__ = [
    "AddressInUse",
    "CodecError",
    "DeliveryStatus",
    "DeliveryTimeout",
    "ErrorKind",
    "InvalidAddress",
    "OutboxFull",
    "OversizedMessage",
    "ProtocolViolation",
    "SendError",
    "TxRxClosed",
    "TxRxError",
    "TxRxIOError",
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


class TxRxError(StrataError):
    """An end, a message or an address has a fault."""

    kind = ErrorKind.IO


class TxRxClosed(TxRxError):
    """The Tx or Rx is closed; `reason` says why, if that is known."""

    kind = ErrorKind.CLOSED

    def __init__(self, reason: str = "the Tx or Rx is closed") -> None:
        super().__init__(reason)
        self.reason = reason


class DeliveryTimeout(TxRxClosed):
    """The oldest message was not acknowledged within `message_delivery_timeout`, which closed the Tx."""

    kind = ErrorKind.TIMEOUT


class InvalidAddress(TxRxError, ValueError):
    """Text that is not an address, or an address that cannot be dialled or served."""

    kind = ErrorKind.INVALID_ADDRESS


class AddressInUse(TxRxError):
    """The address is served already, or its path belongs to something else."""

    kind = ErrorKind.IO


class OversizedMessage(TxRxError):
    """A message whose frame would exceed `codec_max_frame_length`. The Tx stays usable."""

    kind = ErrorKind.SEND

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"oversized frame ({size}, {limit})")
        self.size, self.limit = size, limit


class OutboxFull(TxRxError):
    """`outbox_limit` messages wait already. The Tx stays usable."""

    kind = ErrorKind.SEND


class CodecError(TxRxError, ValueError):
    """A value that is not of the type of the Tx or Rx, or bytes that are not a message of that type."""

    kind = ErrorKind.CODEC


class ProtocolViolation(TxRxError):
    """The peer sent bytes that the protocol does not allow."""

    kind = ErrorKind.IO


class TxRxIOError(TxRxError):
    """A socket or a certificate cannot be used; the text says which, and why."""

    kind = ErrorKind.IO


class DeliveryStatus(enum.Enum):
    """What is known about a message that was returned."""

    NOT_DELIVERED = "not delivered"
    """The message was never sent, or the other end reported that it did not accept it."""
    UNKNOWN = "unknown"
    """The message was written but never acknowledged: it may have been delivered (T-068)."""


class SendError(TxRxError, Generic[M]):
    """A message was not acknowledged and is returned, as the same object that was posted (T-019)."""

    kind = ErrorKind.SEND

    def __init__(
        self,
        error: TxRxError,
        message: M,
        *,
        reason: str | None = None,
        delivery: DeliveryStatus = DeliveryStatus.NOT_DELIVERED,
    ) -> None:
        super().__init__(f"{reason or error} (delivery: {delivery.value})")
        self.error = error
        self.message = message
        self.reason = reason if reason is not None else str(error)
        self.delivery = delivery

"""The root of all errors, the errors of the protocol, and the table of wire codes.

This is the tree of all errors of the library. Each class is defined in the module or package named above it,
next to the code that raises it. A built-in class in parentheses is a second base.

    StrataError
    │
    │   strata.protocol.errors
    ├── IdentityError (ValueError)          a DID, key or seed is not what it claims to be
    ├── InvalidInput                        this side's own checks refused some bytes:
    │   ├── InvalidPacket                   a packet: schema, canonical form, id, signature, time
    │   └── InvalidMessage                  a wire message: not JSON, wrong shape, unknown type
    ├── RequestRefused                      the relay answered ERROR
    │   strata.relays.reconciling
    │   └── TooManyPackets                  the range has more packets than one comparison may have
    │   strata.protocol.errors
    ├── RequestTimeout                      the relay did not answer in time; the outcome is unknown
    ├── MissingCapability                   not attempted: the relay has not granted the capability
    ├── ConnectionFailed                    no connection, or the peer broke the protocol
    ├── Closed                              this side closed it; nothing further will happen
    │   strata.protocol.negentropy
    ├── NegentropyError (ValueError)        a message that compares two sets is malformed
    │   strata.protocol.secret_files
    ├── SharedSecret                        other users can read a file that holds a secret
    │
    │   strata.relays.pool
    ├── ScoreFileError (OSError)            the scores file cannot be used
    │
    │   strata.channels.segmentation
    ├── InvalidSegment                      a segment is malformed or contradicts the others
    ├── PayloadTooLarge                     the payload takes more segments than a message may have
    ├── ParityUnavailable                   the library for parity segments is not installed
    │   strata.channels.rate_limit
    ├── SendQueueFull                       too many chunks wait for the rate limit
    ├── ProofFailed                         no rate-limit proof could be made
    │   strata.channels.encryption
    ├── EncryptionFailed                    the payload could not be encrypted
    ├── DecryptionFailed                    the payload could not be decrypted
    ├── GroupKeyError (ValueError)          a group key or its file cannot be used
    │   strata.channels.sds
    ├── OutgoingFull                        too many messages wait for their acknowledgement
    ├── InvalidSdsMessage (ValueError)      received bytes are not an SDS message
    │   strata.channels.persistence
    ├── PersistenceError                    the store of a channel cannot be used:
    │   ├── StorageFull                     it has no room left
    │   ├── StoreInUse                      another process has it
    │   ├── WrongStoreVersion               another version wrote it
    │   ├── CorruptStore                    its content is damaged
    │   └── PersistenceClosed               it is closed
    │   strata.channels.messaging
    ├── NodeError                           a messaging node cannot do what was asked:
    │   └── InvalidContentTopic (ValueError)  the content topic is malformed
    │   strata.channels.reliable
    ├── ReliableError                       a reliable channel cannot do what was asked:
    │   ├── NotStarted                      the client was not started
    │   ├── NotSent                         messages have not been sent, or were refused
    │   ├── RequestIdInUse (ValueError)     the request id was given to another message
    │   ├── ChannelFailed                   a task of the channel failed, and the channel is closed
    │   ├── ChannelNotOpen                  the channel is not open
    │   ├── AlreadyOpen                     the participant has the channel open already
    │   ├── UnknownChannel                  no channel with this id is open here
    │   ├── InvalidConfiguration (ValueError)  a setting cannot work
    │   ├── InvalidEnvelope (ValueError)    the envelope contradicts its channel
    │   ├── EmptyPayload (ValueError)       the message has no content
    │   ├── EncodingFailed                  the message could not be encoded
    │   ├── MessageTooLarge (ValueError)    an ephemeral message does not fit into one transport message
    │   ├── SegmentDoesNotFit (ValueError)  a segment does not fit into one transport message
    │   └── EventsMissed                    events were dropped because the program did not take them
    ├── InvalidPlace (ValueError)           a place in a channel's history is malformed
    │   strata.channels.waku.http
    ├── WakuUnreachable                     a Waku node does not answer
    ├── WakuRefused                         a Waku node refused a request
    │
    │   strata.txrx
    └── TxRxError                           a Tx or Rx cannot do what was asked:
        ├── TxRxClosed                      the Tx or Rx is closed
        │   └── DeliveryTimeout             the other end acknowledged nothing in time
        ├── InvalidAddress (ValueError)     the address is malformed
        ├── AddressInUse                    another Rx has the address
        ├── OversizedMessage                the message is larger than the limit
        ├── OutboxFull                      `outbox_limit` messages wait already
        ├── CodecError (ValueError)         the codec cannot encode or decode the message
        ├── ProtocolViolation               the other end broke the protocol
        │   └── FrameTooLarge               the other end announced a frame above the limit
        ├── TxRxIOError                     the transport failed
        └── SendError                       a message was not acknowledged; the error carries it

Local and remote faults differ by type: `InvalidInput` is a fault that this side found, `RequestRefused` one
that a peer reported. Classes carry data and `str()` forms the sentence. The codes are those of RFC-0004 §3.5,
RFC-0001 §11.1 and RFC-0007 §6; the additive ones are decisions A-034 and A-061 (docs/requirements/relay.md
§12).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum

__all__ = [
    "Closed",
    "ConnectionFailed",
    "ErrorCode",
    "IdentityError",
    "InvalidInput",
    "InvalidMessage",
    "InvalidPacket",
    "MissingCapability",
    "RequestRefused",
    "RequestTimeout",
    "Retry",
    "StrataError",
    "retry_advice",
]


class Retry(enum.Enum):
    """What a client may do after a request has failed."""

    NEVER = "never"
    """The identical request will fail again: give up."""

    AGAIN = "again"
    """A temporary fault: try again, backing off."""

    LATER = "later"
    """Try again after `retry_after` seconds."""

    AUTHENTICATE = "authenticate"
    """The session lacks a capability: authenticate, then try again."""


class ErrorCode(enum.StrEnum):
    """Every code that an ERROR may carry; `code.retry` is the advice to a client."""

    retry: Retry

    def __new__(cls, value: str, retry: Retry = Retry.NEVER) -> ErrorCode:
        member = str.__new__(cls, value)
        member._value_ = value
        member.retry = retry
        return member

    # RFC-0004 §3.5: the eleven common codes.
    INVALID_SIGNATURE = "invalid_signature"
    INVALID_SCHEMA = "invalid_schema"
    PACKET_TOO_LARGE = "packet_too_large"
    RATE_LIMITED = "rate_limited", Retry.LATER
    BLOCKED_AUTHOR = "blocked_author"
    UNAUTHENTICATED = "unauthenticated", Retry.AUTHENTICATE
    INTERNAL_ERROR = "internal_error", Retry.AGAIN
    INVALID_PROVENANCE = "invalid_provenance"
    MISSING_PROOF = "missing_proof"
    INVALID_ISSUER_CHAIN = "invalid_issuer_chain"
    INVALID_ATTESTATION = "invalid_attestation"
    # RFC-0007 §6.
    INVALID_CURSOR = "invalid_cursor"
    UNSUPPORTED_PROFILE = "unsupported_profile"
    # RFC-0001 §11.1.
    KEY_EXPIRED = "key_expired"
    KEY_REVOKED = "key_revoked"
    KEY_NOT_YET_VALID = "key_not_yet_valid"
    # Additive: decisions.
    TIMESTAMP_IN_FUTURE = "timestamp_in_future"
    TIMESTAMP_TOO_OLD = "timestamp_too_old"
    PACKET_EXPIRED = "packet_expired"
    POLICY_REJECTED = "policy_rejected"


def retry_advice(code: str, retry_after: int | None = None) -> Retry:
    """What to do after an ERROR with this code.

    An unknown code means that the request has failed permanently, unless the relay sent `retry_after` (R-197,
    decision A-062).
    """
    if retry_after is not None:
        return Retry.LATER
    try:
        return ErrorCode(code).retry
    except ValueError:
        return Retry.NEVER


class StrataError(Exception):
    """The root of every error that this library raises on purpose. Errors can be pickled, to cross
    processes."""

    def __reduce__(self) -> tuple[object, ...]:
        # The default calls the constructor with `args`, but these constructors take keywords.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[StrataError], args: tuple[object, ...], members: dict[str, object]) -> StrataError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(members)
    return error


class IdentityError(StrataError, ValueError):
    """A DID, public key or seed that is not what it claims to be."""


class InvalidInput(StrataError):
    """Bytes that the checks on this side refused.

    `code` is the wire code that a relay answers with, `detail` the machine-readable sub-code (or None) and
    `reason` a sentence for people. None of them quotes the refused bytes.
    """

    def __init__(self, code: ErrorCode, reason: str, *, detail: str | None = None) -> None:
        super().__init__(code, reason, detail)
        self.code = code
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason} ({self.code}{f': {self.detail}' if self.detail else ''})"


class InvalidPacket(InvalidInput):
    """A packet that is not valid: its schema, canonical form, id, signature or time.

    `max_bytes` is set if the packet was too large. `retry_after`, `limit` and `window_seconds` are set if the
    packet would be accepted later: `limit` packets are allowed per `window_seconds`, and the packet may be
    published again after `retry_after` seconds.
    """

    def __init__(
        self,
        code: ErrorCode,
        reason: str,
        *,
        detail: str | None = None,
        max_bytes: int | None = None,
        retry_after: int | None = None,
        limit: int | None = None,
        window_seconds: int | None = None,
    ) -> None:
        super().__init__(code, reason, detail=detail)
        self.max_bytes = max_bytes
        self.retry_after = retry_after
        self.limit = limit
        self.window_seconds = window_seconds


class InvalidMessage(InvalidInput):
    """A wire message that is not valid.

    `client_msg_id` and `subscription_id` are those of the message, if they could be read, so that the answer
    reaches the request it belongs to.
    """

    def __init__(
        self,
        reason: str,
        *,
        code: ErrorCode = ErrorCode.INVALID_SCHEMA,
        detail: str | None = None,
        client_msg_id: str | None = None,
        subscription_id: str | None = None,
    ) -> None:
        super().__init__(code, reason, detail=detail)
        self.client_msg_id = client_msg_id
        self.subscription_id = subscription_id


class RequestRefused(StrataError):
    """The relay answered a request with ERROR.

    `code` is text, because the list of codes is open (A-062); `retry` says what the client may do next.
    `cursor` comes with `invalid_cursor` if the relay knows the last place that is still good.
    """

    def __init__(
        self,
        code: str,
        reason: str,
        *,
        detail: str | None = None,
        retry_after: int | None = None,
        max_bytes: int | None = None,
        cursor: str | None = None,
    ) -> None:
        super().__init__(code, reason, detail, retry_after, max_bytes)
        self.code = code
        self.reason = reason
        self.detail = detail
        self.retry_after = retry_after
        self.max_bytes = max_bytes
        self.cursor = cursor

    @property
    def retry(self) -> Retry:
        """Whether the request may be tried again, and when."""
        return retry_advice(self.code, self.retry_after)

    def __str__(self) -> str:
        detail = f", {self.detail}" if self.detail else ""
        return f"the relay refused the request: {self.reason} ({self.code}{detail})"


class RequestTimeout(StrataError):
    """No answer arrived in time. The request may or may not have taken effect; publishing again is safe."""

    def __init__(self, request: str, timeout: float) -> None:
        super().__init__(request, timeout)
        self.request = request
        self.timeout = timeout

    def __str__(self) -> str:
        return f"no answer to {self.request} within {self.timeout:g} s; its outcome is unknown"


class MissingCapability(StrataError):
    """The session was authenticated without a capability that the request needs, so it was not sent (R-291).

    `granted` holds the capabilities that the relay granted; only another identity or relay can have more.
    """

    def __init__(self, capability: str, granted: frozenset[str]) -> None:
        super().__init__(capability, granted)
        self.capability = capability
        self.granted = granted

    def __str__(self) -> str:
        granted = ", ".join(sorted(self.granted)) or "nothing"
        return f"the relay grants this session {granted}, and not {self.capability!r}"


class ConnectionFailed(StrataError):
    """No connection to the relay could be made, or it ended in a way that a retry cannot fix."""


class Closed(StrataError):
    """The connection or subscription was closed on this side."""

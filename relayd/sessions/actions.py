"""What a session makes of one frame: an action, which its connection carries out.

PublishReceived       hand it to admission; exactly one answer must follow (R-192)
ModerationReceived    hand it to the operators' desk
ReconcileReceived     hand it to the session's comparer
AuthReceived          begin it, look up the identity's keys, then report the outcome to the session
SubscriptionOpened    start it; the one it replaces, if any, ends in the same step (R-162)
SubscriptionClosed    end it
Answer                send these bytes
CloseConnection       send these bytes, then close with this code
UnknownUnsubscribe    count it, and answer nothing
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strata.protocol.errors import ErrorCode
from strata.protocol.wire import Auth, Moderate, Reconcile

from relayd.feed.subscription import FeedSubscription

__all__ = [
    "Action",
    "AuthAccepted",
    "AuthReceived",
    "AuthRefusal",
    "AuthRefused",
    "CloseConnection",
    "ModerationReceived",
    "PublishReceived",
    "ReconcileReceived",
    "Reply",
    "SubscriptionClosed",
    "SubscriptionOpened",
    "UnknownUnsubscribe",
]


@dataclass(frozen=True, slots=True)
class PublishReceived:
    """A PUBLISH of the right shape; its packet has not been looked at."""

    raw: bytes
    client_msg_id: str | None


@dataclass(frozen=True, slots=True)
class SubscriptionOpened:
    """A new subscription, and the open subscription with the same id that it replaces."""

    subscription: FeedSubscription
    replaced: FeedSubscription | None


@dataclass(frozen=True, slots=True)
class SubscriptionClosed:
    """The client ended this subscription."""

    subscription: FeedSubscription


@dataclass(frozen=True, slots=True)
class UnknownUnsubscribe:
    """An UNSUBSCRIBE for a subscription that is not open: it changes nothing and gets no answer (R-180)."""


@dataclass(frozen=True, slots=True)
class AuthReceived:
    """An AUTH of the right shape: call `begin_auth` with it."""

    message: Auth


@dataclass(frozen=True, slots=True)
class ModerationReceived:
    """A MODERATE of the right shape, from a session that may send it."""

    message: Moderate


@dataclass(frozen=True, slots=True)
class ReconcileReceived:
    """A RECONCILE of the right shape, from a session that may send it and is within its limits."""

    message: Reconcile


@dataclass(frozen=True, slots=True)
class Reply:
    """A message to send now; `code` is the code of the ERROR that it holds.

    `limited` names the limit that was reached. `request` is the type of the message that is refused, or
    None if the message has no known type and shape.
    """

    payload: bytes
    code: ErrorCode
    limited: str | None = None
    request: str | None = None


@dataclass(frozen=True, slots=True)
class AuthRefused:
    """Send this ERROR, then a new challenge (R-282)."""

    payload: bytes
    code: ErrorCode


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Send the payload, then close the WebSocket with `close_code`."""

    payload: bytes
    code: ErrorCode
    close_code: int
    reason: str
    cause: str = "malformed"
    """The reason under which the closed connection is counted."""


@dataclass(frozen=True, slots=True)
class AuthAccepted:
    """The session is authenticated: send the AUTH_OK, and end the subscriptions it may no longer have."""

    payload: bytes
    ended: Iterator[tuple[FeedSubscription, bytes]]
    """Yields each subscription that ends, with the ERROR that reports it. Taking it from here ends it."""


AuthRefusal = AuthRefused | Reply | CloseConnection
Action = (
    PublishReceived
    | SubscriptionOpened
    | SubscriptionClosed
    | UnknownUnsubscribe
    | AuthReceived
    | ModerationReceived
    | ReconcileReceived
    | Reply
    | CloseConnection
)

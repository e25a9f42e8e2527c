"""One peer's protocol state (RFC-0004 §3): what a frame means for this session, without I/O or clock.

A frame goes in through `receive_text` or `receive_binary` and comes out as one action:

    PublishReceived       hand it to admission; exactly one answer must follow (R-192)
    SubscriptionOpened    start it; the one it replaces, if any, ends in the same step (R-162)
    SubscriptionClosed    end it
    Answer                send these bytes
    CloseConnection       send these bytes, then close with this code
    None                  nothing to do

Whatever a peer sends, nothing raises out of here: bad input becomes an Answer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from strata.errors import ErrorCode, InvalidMessage, InvalidPacket
from strata.wire import (
    Auth,
    Error,
    Filters,
    Ok,
    Publish,
    Subscribe,
    Unsubscribe,
    decode_client_message,
    encode,
)

from relayd.cursor import CursorCodec, InvalidCursor
from relayd.feed.filters import compile_filter
from relayd.feed.subscription import Subscription, SubscriptionRequest

__all__ = [
    "Action",
    "Answer",
    "CloseConnection",
    "PublishReceived",
    "Session",
    "SessionLimits",
    "SubscriptionClosed",
    "SubscriptionOpened",
    "ok_payload",
    "read_failure_payload",
    "refusal_payload",
]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The limits of one session; the names are those of the settings."""

    default_limit: int = 100
    max_limit: int = 500
    max_subscriptions: int = 64
    max_filter_values: int = 1000
    malformed_limit: int = 20
    malformed_window: float = 60.0


@dataclass(frozen=True, slots=True)
class PublishReceived:
    """A PUBLISH of the right shape; its packet has not been looked at."""

    raw: bytes
    client_msg_id: str | None


@dataclass(frozen=True, slots=True)
class SubscriptionOpened:
    """A new subscription, and the open one of the same id that it replaces."""

    subscription: Subscription
    replaced: Subscription | None


@dataclass(frozen=True, slots=True)
class SubscriptionClosed:
    """The client ended this subscription."""

    subscription: Subscription


@dataclass(frozen=True, slots=True)
class Answer:
    """A message to send now; `code` is that of the ERROR it holds."""

    payload: bytes
    code: ErrorCode


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Send the payload, then close the WebSocket with `close_code`."""

    payload: bytes
    code: ErrorCode
    close_code: int
    reason: str


Action = PublishReceived | SubscriptionOpened | SubscriptionClosed | Answer | CloseConnection | None


class Session:
    """The state of one connection: its open subscriptions, and how much garbage it has sent."""

    def __init__(self, limits: SessionLimits, cursors: CursorCodec) -> None:
        self.subscriptions: dict[str, Subscription] = {}
        self._limits = limits
        self._cursors = cursors
        self._malformed_at: deque[float] = deque()

    def receive_text(self, data: bytes, now: float) -> Action:
        """Take one text frame; `now` is monotonic seconds."""
        try:
            message = decode_client_message(data)
            if isinstance(message, Publish):
                return PublishReceived(bytes(message.packet), message.client_msg_id)
            if isinstance(message, Subscribe):
                return self._subscribe(message)
            if isinstance(message, Unsubscribe):
                # One for an unknown id changes nothing and is answered with nothing.
                subscription = self.subscriptions.pop(message.subscription_id, None)
                return None if subscription is None else SubscriptionClosed(subscription)
            return self._auth(message)
        except InvalidMessage as error:
            return self._refused(error, now)

    def receive_binary(self, now: float) -> Action:
        """Take one binary frame, which is never right (R-128)."""
        return self._refused(
            InvalidMessage("messages are text frames, not binary ones", detail="binary_frame"), now
        )

    def drop(self, subscription: Subscription) -> None:
        """Forget a subscription that the relay ended."""
        if self.subscriptions.get(subscription.subscription_id) is subscription:
            del self.subscriptions[subscription.subscription_id]

    def _subscribe(self, message: Subscribe) -> Action:
        try:
            request = self._request(message)
        except InvalidMessage as error:
            error.subscription_id = message.subscription_id
            error.client_msg_id = message.client_msg_id
            raise
        replaced = self.subscriptions.get(request.subscription_id)
        if replaced is None and len(self.subscriptions) >= self._limits.max_subscriptions:
            return self._too_many(message)
        subscription = Subscription(request, self._cursors)
        self.subscriptions[request.subscription_id] = subscription
        return SubscriptionOpened(subscription, replaced)

    def _request(self, message: Subscribe) -> SubscriptionRequest:
        filters = message.filters or Filters()
        gapless = bool(message.gapless)
        if gapless and (filters.limit is not None or filters.order is not None):
            raise InvalidMessage("a gapless subscription has neither limit nor order", detail="gapless")
        ascending = filters.order != "desc"
        limits = self._limits
        limit = limits.default_limit if filters.limit is None else min(filters.limit, limits.max_limit)
        cursor: int | None = None
        if filters.cursor is not None:
            try:
                cursor = self._cursors.decode(filters.cursor, ascending=ascending)
            except InvalidCursor as error:
                raise InvalidMessage(str(error), code=ErrorCode.INVALID_CURSOR) from None
        return SubscriptionRequest(
            subscription_id=message.subscription_id,
            filter=compile_filter(filters, max_values=limits.max_filter_values),
            until=filters.until,
            limit=None if gapless else limit,
            ascending=ascending,
            cursor=cursor,
            history_marker=bool(message.history_marker),
            client_msg_id=message.client_msg_id,
        )

    def _too_many(self, message: Subscribe) -> Answer:
        limit = self._limits.max_subscriptions
        error = Error(
            code=ErrorCode.RATE_LIMITED,
            reason=f"this session already has {limit} open subscriptions; end one first",
            detail="too_many_subscriptions",
            client_msg_id=message.client_msg_id,
            subscription_id=message.subscription_id,
            retry_after=1,
            limit=limit,
            remaining=0,
            window_seconds=1,
        )
        return Answer(encode(error), ErrorCode.RATE_LIMITED)

    def _auth(self, message: Auth) -> Answer:
        # No challenge is outstanding on this session, so none can be answered.
        error = Error(
            code=ErrorCode.UNAUTHENTICATED,
            reason="this challenge was not given to this session",
            detail="challenge_unknown",
            client_msg_id=message.client_msg_id,
        )
        return Answer(encode(error), ErrorCode.UNAUTHENTICATED)

    def _refused(self, error: InvalidMessage, now: float) -> Action:
        payload = encode(
            Error(
                code=error.code,
                reason=error.reason,
                detail=error.detail,
                client_msg_id=error.client_msg_id,
                subscription_id=error.subscription_id,
            )
        )
        if error.detail == "malformed_json" and self._is_flood(now):
            return CloseConnection(payload, error.code, 1008, "too many malformed frames")
        return Answer(payload, error.code)

    def _is_flood(self, now: float) -> bool:
        """Whether this malformed frame is one too many within the window (R-132)."""
        times = self._malformed_at
        times.append(now)
        while times[0] <= now - self._limits.malformed_window:
            times.popleft()
        return len(times) > self._limits.malformed_limit


def ok_payload(
    packet_id: str,
    received_at: int,
    client_msg_id: str | None,
    *,
    duplicate: bool,
    duplicate_of: bytes | None = None,
) -> bytes:
    """The OK for a stored packet; a repeated one says so (R-110)."""
    return encode(
        Ok(
            packet_id=packet_id,
            status="ACCEPTED",
            client_msg_id=client_msg_id,
            received_at=received_at,
            duplicate=True if duplicate else None,
            duplicate_of=None if duplicate_of is None else "0x" + duplicate_of.hex(),
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
        )
    )


def read_failure_payload(subscription_id: str) -> bytes:
    """The ERROR that ends a subscription whose history cannot be read in time."""
    return encode(
        Error(
            code=ErrorCode.INTERNAL_ERROR,
            reason="reading the history took too long; narrow the filters and subscribe again",
            detail="read_timeout",
            subscription_id=subscription_id,
        )
    )

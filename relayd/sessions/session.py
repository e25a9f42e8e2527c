"""One peer's protocol state (RFC-0004 §3): the meaning of each frame, without I/O or clock.

A frame goes in through `receive_text` or `receive_binary` and comes out as one of `actions`.

No method raises: bad input becomes an Answer. A request is judged in the order of relay.md §11: first its
shape, then whether this session may make it, then whether it comes too often.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from strata.protocol.errors import ErrorCode, InvalidMessage
from strata.protocol.wire import (
    Auth,
    ClientMessage,
    Filters,
    Moderate,
    Publish,
    Reconcile,
    Subscribe,
    Unsubscribe,
    decode_client_message,
)

from relayd.access.auth import OPERATE, PUBLISH, REPLICATE, SUBSCRIBE, AuthAttempt, Authentication, Grants
from relayd.access.limits import Budget, Excess, Purse, Quota, SessionLimits, purse
from relayd.cursor import CursorCodec, InvalidCursor
from relayd.feed.filters import compile_filter
from relayd.feed.profiles import UNSUPPORTED_PROFILE, of_profile
from relayd.feed.subscription import FeedSubscription, SubscriptionRequest
from relayd.lineage import Mark
from relayd.sessions.actions import (
    Action,
    AuthAccepted,
    AuthReceived,
    AuthRefusal,
    AuthRefused,
    CloseConnection,
    ModerationReceived,
    PublishReceived,
    ReconcileReceived,
    Reply,
    SubscriptionClosed,
    SubscriptionOpened,
    UnknownUnsubscribe,
)
from relayd.sessions.answers import (
    auth_ok_payload,
    error_payload,
    filters_too_large_payload,
    limited_payload,
    missing_payload,
    too_many_payload,
)

__all__ = ["Session"]

_UNKNOWN_UNSUBSCRIBE = UnknownUnsubscribe()
_NO_MEMORY = Excess(limit=0, window_seconds=5, retry_after=5)


class Session:
    """The state of one connection: its identity, its open subscriptions, and how much garbage it has sent.

    It begins anonymous and without limits, with the capabilities that `grants` leaves to anonymous sessions.
    `use_quota` sets the limits once the address is known.
    """

    __slots__ = (
        "_auth_budget",
        "_cursors",
        "_filter_bytes",
        "_has_operators",
        "_limits",
        "_malformed_at",
        "_may_operate",
        "_may_publish",
        "_may_subscribe",
        "_publish_budget",
        "_replicates",
        "_stated",
        "_subscribe_budget",
        "authentication",
        "backfill_budget",
        "is_short_of_memory",
        "subscriptions",
    )

    def __init__(
        self, limits: SessionLimits, cursors: CursorCodec, authentication: Authentication, grants: Grants
    ) -> None:
        self.subscriptions: dict[str, FeedSubscription] = {}
        self._filter_bytes = 0  # of all subscriptions
        self.authentication = authentication
        self._limits = limits
        self._cursors = cursors
        self.is_short_of_memory = False
        """Whether the relay is short of memory and this session's account holds much: no PUBLISH is taken."""
        self._malformed_at: deque[float] | None = None
        self._auth_budget: Budget | Purse | None = None
        self._stated: frozenset[str] | None = None  # the capabilities that AUTH_OK stated
        self._has_operators = bool(grants.operators)
        self._allow(grants.anonymous)
        self.use_quota(None)

    @property
    def identity(self) -> str | None:
        """The DID that this session has proved."""
        return self.authentication.identity

    @property
    def may_reconcile(self) -> bool:
        """Whether this session may compare sets: it holds `replicate`."""
        return self._replicates

    def use_quota(self, quota: Quota | None, others: Sequence[Quota] = ()) -> None:
        """Charge requests to this quota from now on, and to `others` too; None sets no limit.

        AUTHs are charged to the first quota with a limit for them, which is the address's, whatever identity
        the session proves later.
        """
        quotas = () if quota is None else (quota, *others)
        self._publish_budget = purse("publish", quotas)
        self._subscribe_budget = purse("subscribe", quotas)
        self.backfill_budget = purse("backfill", quotas)
        if quota is not None and quota.auth is not None:
            self._auth_budget = purse("auth", quotas)

    def receive_text(self, data: bytes, now: float) -> Action:
        """Take one text frame; `now` is monotonic seconds."""
        try:
            message = decode_client_message(data)
        except InvalidMessage as error:
            return self._refused(error, now)
        try:
            action = self._act(message, now)
        except InvalidMessage as error:
            action = Reply(error_payload(error), error.code)
        if isinstance(action, Reply):  # a refusal, counted among the messages of its type
            return replace(action, request=str(message.__struct_config__.tag))
        return action

    def _act(self, message: ClientMessage, now: float) -> Action:
        if isinstance(message, Publish):
            return self._publish(message, now)
        if isinstance(message, Subscribe):
            return self._subscribe(message, now)
        if isinstance(message, Unsubscribe):
            subscription = self.subscriptions.get(message.subscription_id)
            if subscription is None:
                return _UNKNOWN_UNSUBSCRIBE
            self.drop(subscription)
            return SubscriptionClosed(subscription)
        if isinstance(message, Moderate):
            return self._moderate(message)
        if isinstance(message, Reconcile):
            return self._reconcile(message, now)
        return AuthReceived(message)

    def begin_auth(self, message: Auth, now: float, unix_now: int) -> AuthAttempt | AuthRefusal:
        """Take an AUTH. After an `AuthAttempt`, handle nothing more of this peer until `authenticated` or
        `auth_failed` has been called, so that later messages meet the outcome."""
        budget = self._auth_budget
        if budget is not None and not budget.take(now):
            return _limited("auth", budget.excess(now), message.client_msg_id)
        try:
            return self.authentication.begin(message, unix_now)
        except InvalidMessage as error:
            return self.auth_failed(error)

    def authenticated(self, attempt: AuthAttempt, capabilities: Sequence[str]) -> AuthAccepted:
        """The attempt's signature is good: identity and capabilities change in this one step (R-283)."""
        self.authentication.succeeded(attempt.author_id)
        self._stated = frozenset(capabilities)
        self._allow(self._stated)
        message = auth_ok_payload(attempt.author_id, capabilities, attempt.client_msg_id)
        return AuthAccepted(message, self._end_what_is_lost())

    def regrant(self, grants: Grants) -> Iterator[tuple[FeedSubscription, bytes]]:
        """Apply changed settings. Returns the subscriptions that end, each with the ERROR that reports it; a
        subscription ends when it is taken from the iterator.

        An authenticated session never gets more than its AUTH_OK stated (R-285).
        """
        self._has_operators = bool(grants.operators)
        if self.identity is None or self._stated is None:
            self._allow(grants.anonymous)
        else:
            self._allow(self._stated & grants.of(self.identity))
        return self._end_what_is_lost()

    def _end_what_is_lost(self) -> Iterator[tuple[FeedSubscription, bytes]]:
        """One at a time, because there may be thousands; a subscription not yet reached stays open."""
        for subscription in list(self.subscriptions.values()):
            if self.subscriptions.get(subscription.subscription_id) is not subscription:
                continue  # it has ended meanwhile
            lost = self._lost(subscription)
            if lost is not None:
                self.drop(subscription)
                yield subscription, missing_payload(lost, None, subscription.subscription_id)

    def auth_failed(self, error: InvalidMessage) -> AuthRefused | CloseConnection:
        """An AUTH failed: identity and capabilities stay as they were (R-283). The fifth failure in a row
        ends the connection (R-282)."""
        payload = error_payload(error)
        if self.authentication.failed():
            return CloseConnection(payload, error.code, 1008, "too many failed AUTHs", "auth_failures")
        return AuthRefused(payload, error.code)

    def receive_binary(self, now: float) -> Action:
        """Take one binary frame, which is always an error (R-128)."""
        return self._refused(
            InvalidMessage("messages are text frames, not binary ones", detail="binary_frame"), now
        )

    def drop(self, subscription: FeedSubscription) -> None:
        """Forget a subscription that the relay ended."""
        if self.subscriptions.get(subscription.subscription_id) is subscription:
            del self.subscriptions[subscription.subscription_id]
            self._filter_bytes -= subscription.filter.kept_bytes

    def end(self) -> list[FeedSubscription]:
        """End the session: nothing more is taken or sent. Returns the subscriptions that were open."""
        ended = list(self.subscriptions.values())
        self.subscriptions = {}
        self._filter_bytes = 0
        return ended

    def _publish(self, message: Publish, now: float) -> PublishReceived | Reply:
        if not self._may_publish:
            return _missing(PUBLISH, message.client_msg_id)
        if self.is_short_of_memory:
            return _limited("memory", _NO_MEMORY, message.client_msg_id)
        budget = self._publish_budget
        if budget is not None and not budget.take(now):
            return _limited("publish", budget.excess(now), message.client_msg_id)
        return PublishReceived(bytes(message.packet), message.client_msg_id)

    def _subscribe(self, message: Subscribe, now: float) -> Action:
        ids = message.client_msg_id, message.subscription_id
        if not self._may_subscribe:
            return _missing(SUBSCRIBE, *ids)
        if (refusal := self._pay_for_reading(now, *ids)) is not None:
            return refusal
        try:
            request = self._request(message)
        except InvalidMessage as error:
            error.subscription_id = message.subscription_id
            error.client_msg_id = message.client_msg_id
            raise
        replaced = self.subscriptions.get(request.subscription_id)
        if replaced is None and len(self.subscriptions) >= self._limits.max_subscriptions:
            payload = too_many_payload(self._limits.max_subscriptions, *ids)
            return Reply(payload, ErrorCode.RATE_LIMITED)
        others = self._filter_bytes - (replaced.filter.kept_bytes if replaced is not None else 0)
        if others + request.filter.kept_bytes > self._limits.max_filter_bytes:
            payload = filters_too_large_payload(self._limits.max_filter_bytes, *ids)
            return Reply(payload, ErrorCode.RATE_LIMITED)
        subscription = FeedSubscription(request, self._cursors)
        self.subscriptions[request.subscription_id] = subscription
        self._filter_bytes = others + request.filter.kept_bytes
        return SubscriptionOpened(subscription, replaced)

    def _moderate(self, message: Moderate) -> ModerationReceived | Reply:
        if self._may_operate:
            return ModerationReceived(message)
        if self._has_operators:
            return _missing(OPERATE, message.client_msg_id)
        raise InvalidMessage(  # a relay without operators does not know this message
            "the message type is missing or not known here",
            detail="unknown_type",
            client_msg_id=message.client_msg_id,
        )

    def _reconcile(self, message: Reconcile, now: float) -> ReconcileReceived | Reply:
        if not self._replicates:
            return _missing(REPLICATE, message.client_msg_id)
        refusal = None
        if message.until is not None:  # it costs as much as a deep subscription
            refusal = self._pay_for_reading(now, message.client_msg_id)
        return refusal or ReconcileReceived(message)

    def _pay_for_reading(self, now: float, *ids: str | None) -> Reply | None:
        """Charge the beginning of a read of the log. Returns the refusal if the budget does not allow it."""
        budget = self._subscribe_budget
        if budget is not None and not budget.take(now):
            return _limited("subscribe", budget.excess(now), *ids)
        budget = self.backfill_budget
        if budget is not None and budget.debt_seconds(now) > 0:
            return _limited("backfill", budget.excess(now), *ids)
        return None

    def _request(self, message: Subscribe) -> SubscriptionRequest:
        filters = message.filters or Filters()
        gapless = bool(message.gapless)
        if gapless and (filters.limit is not None or filters.order is not None):
            raise InvalidMessage("a gapless subscription has neither limit nor order", detail="gapless")
        ascending = filters.order != "desc"
        limits = self._limits
        limit = limits.default_limit if filters.limit is None else min(filters.limit, limits.max_limit)
        cursor: Mark | None = None
        if filters.cursor is not None:
            try:
                cursor = self._cursors.open(filters.cursor, ascending=ascending)
            except InvalidCursor as error:
                raise InvalidMessage(str(error), code=ErrorCode.INVALID_CURSOR) from None
        if message.replication_profile == UNSUPPORTED_PROFILE:
            reason = "this relay has no trust engine to tell such packets by"
            raise InvalidMessage(reason, code=ErrorCode.UNSUPPORTED_PROFILE)
        if self._replicates:
            filters = of_profile(filters, message.replication_profile)
        return SubscriptionRequest(
            subscription_id=message.subscription_id,
            filter=compile_filter(
                filters,
                max_values=limits.max_filter_values,
                peers=limits.peers if self._replicates else None,
            ),
            until=filters.until,
            limit=None if gapless else limit,
            ascending=ascending,
            cursor=None if cursor is None else cursor.sequence,
            resumes_after=cursor,
            history_marker=bool(message.history_marker),
            client_msg_id=message.client_msg_id,
            signed=self._replicates,
        )

    def _allow(self, capabilities: frozenset[str]) -> None:
        self._may_publish = PUBLISH in capabilities
        self._may_subscribe = SUBSCRIBE in capabilities
        self._replicates = REPLICATE in capabilities
        self._may_operate = OPERATE in capabilities

    def _lost(self, subscription: FeedSubscription) -> str | None:
        """The capability that this subscription needs and the session no longer has."""
        if not self._may_subscribe:
            return SUBSCRIBE
        return REPLICATE if subscription.signed and not self._replicates else None

    def _refused(self, error: InvalidMessage, now: float) -> Action:
        payload = error_payload(error)
        if error.detail == "malformed_json" and self._is_flood(now):
            return CloseConnection(payload, error.code, 1008, "too many malformed frames")
        return Reply(payload, error.code)

    def _is_flood(self, now: float) -> bool:
        """Whether this malformed frame is one too many within the window (R-132)."""
        times = self._malformed_at = self._malformed_at or deque()
        times.append(now)
        while times[0] <= now - self._limits.malformed_window:
            times.popleft()
        return len(times) > self._limits.malformed_limit


def _missing(capability: str, *ids: str | None) -> Reply:
    return Reply(missing_payload(capability, *ids), ErrorCode.UNAUTHENTICATED)


def _limited(limit: str, excess: Excess, *ids: str | None) -> Reply:
    return Reply(limited_payload(limit, excess, *ids), ErrorCode.RATE_LIMITED, limit)

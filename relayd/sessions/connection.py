"""One client connection: it acts on the peer's messages and queues the answers.

Decisions live elsewhere: `Access` admits visitors, `Session` interprets messages, `Admission` judges packets,
`FeedSubscription` chooses reads. A `WebSocket` moves the bytes. Three rules are kept here:

- A connection whose outbound queue is full takes no live delivery: its subscriptions read on from the store.
- A peer with `max_pending_publishes` unanswered publishes is not read from until half are answered.
- While the relay holds as many publishes as it may, it does not read from a peer that waits for an answer.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Final

from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.provenance import served
from strata.protocol.wire import read_ids
from websockets.http11 import Request

from relayd import failpoints
from relayd.access.auth import Authentication
from relayd.access.gate import Turnaway, Visitor
from relayd.access.limits import Quota, purse
from relayd.access.memory import Pressure
from relayd.access.refusals import Refusals
from relayd.admission.request import Lane, PublishRequest
from relayd.feed.subscription import FeedPhase, FeedSubscription
from relayd.frames import text_frame
from relayd.logs import get_logger
from relayd.metrics import OTHER
from relayd.relay import RunningRelay
from relayd.roll import OpenSession, session_id
from relayd.sessions.actions import (
    Action,
    AuthAccepted,
    AuthReceived,
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
    closed_by_operator_payload,
    fault_payload,
    ok_payload,
    refusal_payload,
)
from relayd.sessions.auth_exchange import AuthExchange
from relayd.sessions.backlog import Backlog
from relayd.sessions.comparing import Comparer
from relayd.sessions.desk import Desk
from relayd.sessions.http_requests import HttpResponder, as_origin_form, fault_response, respond
from relayd.sessions.session import Session
from relayd.sessions.websocket import WebSocket

__all__ = ["Connection"]

_log = get_logger("relayd.sessions.connection")
_numbers = itertools.count(1)

_FAULT: Final = "internal error; resume by cursor"

_PACING_INTERVAL: Final = 1.0
"""The longest time between two looks at a spent byte budget, in seconds."""

_SUBSCRIPTION_BYTES: Final = 1200
_VALUE_BYTES: Final = 150
"""The approximate memory of a subscription, and of each value of its filter, in bytes."""
_TLS_SECONDS: Final = 0.002
"""The approximate time that the cryptography of a TLS handshake takes from the loop, in seconds."""
_STEP_SECONDS: Final = 10e-6
"""What a step costs besides its messages, in seconds: a peer that sends one byte at a time pays for that."""
_LET_GO_AT_ONCE: Final = 16
"""The number of subscriptions that are forgotten between two looks at the clock."""


def _to_nobody(frames: bytes, events: int) -> bool:
    """Take deliveries for a subscription whose socket has ended, until the subscription is forgotten."""
    return True


class Connection:
    """A client connection on its `socket`, from accept to the last byte.

    If `path` is None, every WebSocket handshake is refused.
    """

    __slots__ = (
        "_auth",
        "_backlog",
        "_comparer",
        "_desk",
        "_has_room",
        "_http_task",
        "_is_arriving",
        "_is_counted",
        "_is_websocket",
        "_lane",
        "_opened_at",
        "_owing",
        "_path",
        "_pending_bytes",
        "_pending_publishes",
        "_publishes",
        "_refusals",
        "_relay",
        "_responder",
        "_session",
        "_visitor",
        "deliver",
        "id",
        "socket",
    )

    def __init__(self, relay: RunningRelay, responder: HttpResponder, path: str | None) -> None:
        self.id = next(_numbers)
        """The connection's number in the logs of this process."""
        self.socket = WebSocket(relay, self)
        self.deliver: Callable[[bytes, int], bool] = self.socket.outbox.deliver
        """The fan-out's way to the outbox, with no call in between."""
        self._relay = relay
        self._responder = responder
        self._path = path
        self._visitor = Visitor()
        settings = relay.settings
        self._refusals = Refusals(settings.refused_limit, settings.limit_window_seconds)
        authentication = Authentication(relay.relay_id, relay.settings.challenge_lifetime)
        self._session = Session(relay.limits, relay.cursors, authentication, relay.access.grants)
        self._auth = AuthExchange(relay, self, self.socket, self._session, self._visitor)
        self._desk = Desk(relay, self, self.socket, self._session)
        self._comparer = Comparer(relay, self, self.socket, self._session)
        self._lane = Lane(self)
        self._backlog = Backlog(relay, self, self.socket)
        self._pending_publishes = 0
        self._pending_bytes = 0
        self._has_room = True
        self._is_websocket = self._is_counted = self._is_arriving = False
        self._http_task: asyncio.Task[None] | None = None
        self._publishes = 0
        self._opened_at = 0  # in Unix seconds
        self._owing: Quota | None = None  # pays for work that ends after the connection

    # Opening and closing: called by the socket.

    def accepted(self, peer: str | None) -> bool:
        """Count the socket, before TLS if there is TLS; called again once TLS is done."""
        if failpoints.ARMED:
            failpoints.hit("sessions.accept")
        if self._is_counted:
            return True
        registry, access = self._relay.registry, self._relay.access
        self._is_counted = True
        if access.arrive(self._visitor, peer, len(registry) + registry.arriving, self.socket.opened_at):
            return True
        self._relay.metrics.connections_closed["too_many_connections"].inc()
        access.leave(self._visitor, self.socket.opened_at)
        self._never_was()
        return False

    def handshake_begins(self) -> None:
        """TLS is about to take time: charge it to the address."""
        self._relay.registry.arriving += 1
        self._is_arriving = True
        self.worked(_TLS_SECONDS, self.socket.opened_at)

    def handshake_ended(self, *, failed: bool) -> None:
        """TLS is done, or there was none. If it failed, there are no further calls for this socket."""
        if self._is_arriving:
            self._is_arriving = False
            self._relay.registry.arriving -= 1
        if failed:
            self._relay.metrics.connections_closed["handshake"].inc()
            self._relay.access.leave(self._visitor, time.monotonic())
            if self.socket not in self._relay.registry.sockets:  # otherwise it ends by itself
                self._never_was()

    def requested(self, request: Request, now: float) -> None:
        as_origin_form(request)
        if self._relay.access.identify(self._visitor, request.headers, now):
            _log.warning("proxy_not_trusted", consequence="its clients share the limits of one address")
        path = request.path.partition("?")[0]
        if path != self._path or "Upgrade" not in request.headers:
            self.socket.ends_for("client")
            self._http_task = asyncio.create_task(self._answer(request, now), name=f"http-{self.id}")
            return
        turnaway = self._turned_away(request, now)
        if turnaway is not None:
            self.socket.reject(turnaway)
            return
        self.socket.accept(request)
        if self.socket.is_open:
            self._opened()

    def _turned_away(self, request: Request, now: float) -> Turnaway | None:
        relay = self._relay
        registry = relay.registry
        if registry.draining or len(registry) > relay.settings.max_connections:
            reason = "going_away" if registry.draining else "too_many_connections"
            return Turnaway(503, "This relay takes no more connections now.", reason, 1)
        if registry.pressure >= Pressure.SHORT:
            return Turnaway(503, "This relay is short of memory.", "memory", 5)
        return relay.access.judge(self._visitor, request.headers, now)

    def _opened(self) -> None:
        """The WebSocket is open: send the first challenge, and charge requests to the address from now on."""
        self._is_websocket = True
        self._opened_at = self._relay.clock()
        self._relay.metrics.connections_total.inc()
        self._relay.metrics.connections.inc()
        self._relay.access.sources.opened(self._visitor.address)
        self._session.use_quota(self._visitor.charged, self._visitor.charged_too)
        self._auth.challenge()
        _log.info("connection_opened", connection=self.id, **self._relay.access.shown(self._visitor))

    async def _answer(self, request: Request, now: float) -> None:
        try:
            if failpoints.ARMED:
                await failpoints.reached("http.respond")
            relay, visitor = self._relay, self._visitor
            rate_limited = relay.metrics.rate_limited
            response = await respond(request, self._responder, relay.access, visitor, rate_limited, now, self)
            self.socket.respond(response)
        except Exception as error:
            self._relay.faults.caught("http", error)
            self._fail_http()

    def _fail_http(self) -> None:
        try:
            self.socket.respond(fault_response())
        except Exception:  # half a response has already been sent
            self.socket.abort()

    def closing(self) -> None:
        self._backlog.close()
        self.deliver = _to_nobody
        if self._session.subscriptions:
            self._let_go(self._session.end())

    def _let_go(self, subscriptions: list[FeedSubscription]) -> None:
        """Forget as many subscriptions as the loop has time for, the rest later: there may be thousands."""
        count = len(subscriptions)
        while subscriptions:
            subscription = subscriptions.pop()
            self._relay.fanout.leave(subscription)
            subscription.close()
            if not len(subscriptions) % _LET_GO_AT_ONCE and self._relay.slices.is_over():
                break
        self._relay.metrics.subscriptions.dec(count - len(subscriptions))
        if subscriptions:
            self._relay.slices.later(functools.partial(self._let_go, subscriptions))

    def ended(self, reason: str) -> None:
        self._relay.admission.release(self)
        self._auth.close()
        self._desk.close()
        self._comparer.close()
        if self._http_task is not None:
            self._http_task.cancel()
        self._owing = self._visitor.workload
        self._relay.access.leave(self._visitor, time.monotonic())
        if self._is_websocket:
            self._relay.metrics.connections.dec()
            self._relay.access.sources.closed(self._visitor.address)
        if self._http_task is None:
            self._relay.metrics.connections_closed[reason].inc()
        # Neither a health check nor a socket that never became a session deserves a line at INFO.
        log = _log.info if self._is_websocket else _log.debug
        log(
            "connection_closed",
            connection=self.id,
            reason=reason,
            identity=self._session.identity,
            publishes=self._publishes,
            events=self.socket.outbox.events_sent,
            seconds=round(time.monotonic() - self.socket.opened_at, 3),
        )
        self._come_apart()

    def _never_was(self) -> None:
        """Release a socket that was never taken on: even a flood of them leaves nothing to the collector."""
        self.socket.forget()
        self._come_apart()

    def _come_apart(self) -> None:
        # Each of these holds this connection: leave no cycle for the collector to find.
        del self._auth, self._backlog, self._comparer, self._desk, self._lane

    def review(self) -> None:
        try:
            self._auth.review()
        except Exception as error:  # a fault of this session; the sweep goes on to the others
            self._relay.faults.caught("auth", error)

    def worked(self, seconds: float, now: float) -> float:
        payer = self._visitor.workload
        if payer is None:
            return 0.0
        owed = payer.used_loop(seconds + _STEP_SECONDS, now)
        if owed > 0:
            self._relay.metrics.rate_limited["loop"].inc()
        return owed

    def turn(self, now: float) -> float:
        payer = self._visitor.workload
        return now if payer is None else payer.turn(now)

    @property
    def account(self) -> Hashable:
        return self._visitor.reader

    @property
    def held_bytes(self) -> int:
        filters = [each.filter for each in self._session.subscriptions.values()]
        values = sum(len(each.authors) + len(each.types) + len(each.packet_ids) for each in filters)
        pending = self._pending_bytes + self._comparer.held_bytes + self._backlog.held_bytes
        return pending + _SUBSCRIPTION_BYTES * len(filters) + _VALUE_BYTES * values

    def described(self, process: str) -> OpenSession | None:
        if not self._is_websocket:
            return None
        address = self._visitor.address
        return OpenSession(
            session_id(process, self.id),
            self._opened_at,
            None if address is None else str(address),
            self._session.identity,
            len(self._session.subscriptions),
            self._publishes,
            self.socket.outbox.events_sent,
            self.socket.held_bytes,
        )

    def expelled(self) -> None:
        self.answer(closed_by_operator_payload(), ErrorCode.POLICY_REJECTED)
        self.socket.close(1008, "an operator has closed this session", "operator")

    def refuse_publishes(self, refuse: bool) -> None:
        self._session.is_short_of_memory = refuse

    def tick(self) -> None:
        self._auth.check_deadline()

    # Messages of the peer.

    def received(self, data: bytes, is_text: bool, now: float) -> None:
        session = self._session
        try:
            self._act(session.receive_text(data, now) if is_text else session.receive_binary(now), now)
        except Exception as error:
            self.failed("message", error, _FAULT, *read_ids(data))

    def failed(
        self,
        place: str,
        error: Exception,
        reason: str,
        client_msg_id: str | None = None,
        subscription_id: str | None = None,
    ) -> None:
        """A fault of ours on a message, caught at this place of `FAULT_PLACES`. It is not known which effects
        the message has had: the peer is told that it failed, and comes back on a new connection."""
        self._relay.faults.caught(place, error)
        try:
            self.answer(fault_payload(client_msg_id, subscription_id), ErrorCode.INTERNAL_ERROR)
            self.socket.close(1011, reason)
        except Exception as again:
            self._relay.faults.caught(place, again)
            self.socket.abort()

    def _act(self, action: Action, now: float) -> None:
        metrics = self._relay.metrics
        match action:
            case PublishReceived():
                self._relay.tally.publishes += 1
                self._publishes += 1
                self._pending_publishes += 1
                request = PublishRequest(action.raw, action.client_msg_id, self._lane, self.socket.heard_at)
                self._pending_bytes += request.held_bytes
                self._relay.admission.submit(request)
                if self._has_room:
                    self._regulate()
            case SubscriptionOpened():
                metrics.messages_received["SUBSCRIBE"].inc()
                self._open(action.subscription, action.replaced)
            case SubscriptionClosed():
                metrics.messages_received["UNSUBSCRIBE"].inc()
                self._close_subscription(action.subscription)
            case AuthReceived():
                metrics.messages_received["AUTH"].inc()
                self._auth.receive(action.message, now)
            case ModerationReceived():
                metrics.messages_received["MODERATE"].inc()
                self._desk.receive(action.message)
            case ReconcileReceived():
                metrics.messages_received["RECONCILE"].inc()
                self._comparer.receive(action.message)
            case Reply():
                self._refuse(action)
            case CloseConnection():
                metrics.messages_received[OTHER].inc()  # frames that are not messages
                self.answer(action.payload, action.code)
                self.socket.close(action.close_code, action.reason, action.cause)
            case UnknownUnsubscribe():
                metrics.messages_received["UNSUBSCRIBE"].inc()
                if self._is_one_too_many(ErrorCode.INVALID_SCHEMA):
                    self._close_refused()

    def _refuse(self, refusal: Reply) -> None:
        metrics = self._relay.metrics
        metrics.messages_received[refusal.request or OTHER].inc()
        if refusal.request == "PUBLISH":  # it does not get as far as admission
            metrics.publishes[refusal.code].inc()
        if refusal.limited is not None:
            metrics.rate_limited[refusal.limited].inc()
        self.answer(refusal.payload, refusal.code)

    def answer(self, payload: bytes, code: ErrorCode) -> None:
        """Queue an ERROR that belongs to no publish."""
        is_last = self._is_one_too_many(code)
        self.socket.outbox.queue(text_frame(payload))
        self._relay.metrics.errors_sent[code].inc()
        if is_last:
            self._close_refused()

    def _is_one_too_many(self, code: ErrorCode) -> bool:
        """Count a refusal; if no limit applies to the address, none applies to refusals."""
        if self._visitor.charged is None:
            return False
        return self._refusals.is_one_too_many(code, time.monotonic())

    def _close_refused(self) -> None:
        self.socket.close(1008, "too many refused messages", "refused")

    def _regulate(self) -> None:
        """Let the socket read, or not. If the whole relay is full, ask to be notified when there is room."""
        relay, pending = self._relay, self._pending_publishes
        limit = relay.settings.max_pending_publishes
        has_room = pending < (limit if self._has_room else limit // 2 or 1)
        if pending and relay.admission.is_full():
            relay.admission.hold(self)
            has_room = False
        if has_room is not self._has_room:
            self._has_room = has_room
            self.socket.allow_reading(has_room)

    # Called by AUTHs.

    async def authenticated(self, outcome: AuthAccepted) -> None:
        """The session now speaks for another identity: update the limits and the open subscriptions.

        AUTH_OK is queued once all lost subscriptions have ended: none of their EVENTs may follow it (R-283).
        """
        self._session.use_quota(self._visitor.charged, self._visitor.charged_too)
        self._lane.identity = self._session.identity
        errors: list[bytes] = []
        for subscription, payload in outcome.ended:
            self._close_subscription(subscription)
            errors.append(payload)
            if self._relay.slices.is_over():
                await self._relay.slices.next(self.turn(time.monotonic()))
        self.socket.outbox.queue(text_frame(outcome.payload))
        for payload in errors:
            self.answer(payload, ErrorCode.UNAUTHENTICATED)

    def regranted(self) -> None:
        """The settings have changed: update capabilities, limits and open subscriptions."""
        self._session.use_quota(self._visitor.charged, self._visitor.charged_too)
        self._end(self._session.regrant(self._relay.access.grants))

    def _end(self, ended: Iterator[tuple[FeedSubscription, bytes]]) -> None:
        """End as many of these subscriptions as there is time for; the others stay open until their turn."""
        for subscription, payload in ended:
            self._close_subscription(subscription)
            self.answer(payload, ErrorCode.UNAUTHENTICATED)
            if self._relay.slices.is_over():
                self._relay.slices.later(functools.partial(self._end, ended))
                break
        self._relay.registry.flush()

    # Publisher: called by admission.

    def publish_accepted(
        self,
        request: PublishRequest,
        received_at: int,
        *,
        duplicate: bool,
        duplicate_of: bytes | None = None,
        queued: bool = False,
    ) -> None:
        packet, downgrade = request.packet, request.downgrade
        annotations = None
        if downgrade is not None:
            annotations = served(packet.canonical, downgrade, mode="annotate").annotations
        payload = ok_payload(
            packet.packet_id,
            received_at,
            request.client_msg_id,
            duplicate=duplicate,
            duplicate_of=duplicate_of,
            queued=queued,
            annotations=annotations,
        )
        self._answered(payload)
        self._relay.tally.answered(time.monotonic() - request.started_at, duplicate=duplicate)

    def publish_refused(self, request: PublishRequest, error: InvalidPacket) -> None:
        is_last = self._is_one_too_many(error.code)
        self._answered(refusal_payload(error, request.client_msg_id), is_last=is_last)
        metrics = self._relay.metrics
        metrics.publishes[error.code].inc()
        metrics.errors_sent[error.code].inc()

    def checked_for(self, seconds: float) -> None:
        payer = self._visitor.workload or self._owing
        if payer is not None:  # the debt is checked at the peer's next message
            payer.used_loop(seconds, time.monotonic())

    def publish_unanswerable(self) -> None:
        self._pending_bytes -= self._pending_bytes // self._pending_publishes
        self._pending_publishes -= 1
        self.socket.abort()

    def room_again(self) -> None:
        self._regulate()

    def _answered(self, payload: bytes, *, is_last: bool = False) -> None:
        """Queue the answer to a publish. If that raises, nothing is queued; the rest does not raise."""
        if self.socket.is_open:
            self.socket.outbox.queue(text_frame(payload))
        self._pending_bytes -= self._pending_bytes // self._pending_publishes  # the average of those pending
        self._pending_publishes -= 1
        try:
            if not self._has_room:
                self._regulate()
            if is_last and self.socket.is_open:
                self._close_refused()
        except Exception as error:
            self._relay.faults.caught("message", error)
            self.socket.abort()  # nothing more would be read from it

    # Subscriptions: called by the fan-out and the backlog.

    def fell_behind(self, subscription: FeedSubscription) -> None:
        if self.deliver is not _to_nobody:
            self._backlog.add(subscription)

    async def writable(self) -> None:
        """Wait until the socket has room and the budget for history too: an open stream is delayed, never
        cut (R-317). Cancelling it changes nothing."""
        await self.socket.outbox.writable()
        while (wait := self._reading_debt(time.monotonic())) > 0:
            self._relay.metrics.rate_limited["pacing"].inc()
            await asyncio.sleep(min(wait, _PACING_INTERVAL))
            await self.socket.outbox.writable()

    def _reading_debt(self, now: float) -> float:
        """How long until this peer may have more from the store, in seconds."""
        budgets = (self._session.backfill_budget, purse("read", self.payer.line))
        return max((budget.debt_seconds(now) for budget in budgets if budget is not None), default=0.0)

    @property
    def payer(self) -> Quota:
        """The account that takes turns at the database for this peer, also when it has left."""
        owing = self._owing
        return self._visitor.reader if owing is None else owing.parent or owing

    def backfilled(self, sent_bytes: int) -> None:
        """This many bytes of history were queued for the peer: charge them to its budget."""
        if self._session.backfill_budget is not None:
            self._session.backfill_budget.spend(sent_bytes, time.monotonic())

    def end_subscription(self, subscription: FeedSubscription) -> None:
        """End a subscription that cannot be served."""
        self._session.drop(subscription)
        self._close_subscription(subscription)

    def _open(self, subscription: FeedSubscription, replaced: FeedSubscription | None) -> None:
        if replaced is not None:
            self._close_subscription(replaced)
            subscription.take_over(replaced)
        self._relay.metrics.subscriptions.inc()
        self._backlog.add(subscription)

    def _close_subscription(self, subscription: FeedSubscription) -> None:
        fanout = self._relay.fanout
        if subscription.phase is FeedPhase.LIVE:
            # Everything that the feed has passed on is already in the outbox.
            subscription.leave_live(fanout.position)
            fanout.leave(subscription)
        subscription.close()
        self._backlog.discard(subscription)
        self._relay.metrics.subscriptions.dec()

"""One client connection: it acts on the peer's messages and queues the answers.

Decisions live elsewhere: `Access` admits visitors, `Session` interprets messages, `Admission` judges packets,
`Subscription` chooses reads. A `WebSocket` moves the bytes. Three rules are kept here:

- A connection whose outbound queue is full takes no live delivery: its subscriptions read on from the store.
- A peer with `max_pending_publishes` unanswered publishes is not read from until half are answered.
- While the relay holds as many publishes as it may, it reads from no peer that waits for an answer.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from typing import Final

import structlog
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.provenance import served
from websockets.http11 import Request

from relayd.access.auth import Authentication
from relayd.access.gate import Turnaway, Visitor
from relayd.admission.pipeline import Lane, PublishRequest
from relayd.feed.subscription import Phase, Subscription
from relayd.frames import text_frame
from relayd.relay import Relay
from relayd.sessions.answers import ok_payload, refusal_payload
from relayd.sessions.auth_exchange import AuthExchange
from relayd.sessions.backlog import Backlog
from relayd.sessions.http_requests import HttpResponder, respond
from relayd.sessions.session import (
    Action,
    Answer,
    Authenticated,
    AuthReceived,
    CloseConnection,
    PublishReceived,
    Session,
    SubscriptionClosed,
    SubscriptionOpened,
    UnknownUnsubscribe,
)
from relayd.sessions.websocket import WebSocket

__all__ = ["Connection"]

_log = structlog.get_logger("relayd.sessions.connection")
_numbers = itertools.count(1)

_PACING_INTERVAL: Final = 1.0
"""Longest time between two looks at a byte budget that is spent, in seconds."""


class Connection:
    """A client connection on its `socket`, from accept to the last byte.

    `path` None refuses every WebSocket handshake.
    """

    __slots__ = (
        "_auth",
        "_backlog",
        "_events_sent",
        "_has_room",
        "_http_task",
        "_is_websocket",
        "_lane",
        "_path",
        "_pending_publishes",
        "_publishes",
        "_relay",
        "_responder",
        "_session",
        "_visitor",
        "id",
        "socket",
    )

    def __init__(self, relay: Relay, responder: HttpResponder, path: str | None) -> None:
        self.id = next(_numbers)
        """Its number in the logs of this process."""
        self.socket = WebSocket(relay, self)
        self._relay = relay
        self._responder = responder
        self._path = path
        self._visitor = Visitor()
        authentication = Authentication(relay.relay_id, relay.settings.challenge_lifetime)
        self._session = Session(relay.limits, relay.cursors, authentication, relay.access.grants)
        self._auth = AuthExchange(relay, self, self.socket, self._session, self._visitor)
        self._lane = Lane(self)
        self._backlog = Backlog(relay, self, self.socket)
        self._pending_publishes = 0
        self._has_room = True
        self._is_websocket = False
        self._http_task: asyncio.Task[None] | None = None
        self._events_sent = 0
        self._publishes = 0

    # Opening and closing: called by the socket.

    def accepted(self, peer: str | None) -> bool:
        access, sockets = self._relay.access, len(self._relay.registry)
        return access.arrive(self._visitor, peer, sockets, self.socket.opened_at)

    def requested(self, request: Request, now: float) -> None:
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
        return relay.access.judge(self._visitor, request.headers, now)

    def _opened(self) -> None:
        """The WebSocket is open: send the first challenge, and charge requests to the address from now on."""
        self._is_websocket = True
        self._relay.metrics.connections_total.inc()
        self._relay.metrics.connections.inc()
        self._session.use_quota(self._visitor.charged)
        self._auth.challenge()
        _log.info("connection_opened", connection=self.id, **self._relay.access.shown(self._visitor))

    async def _answer(self, request: Request, now: float) -> None:
        try:
            response = await respond(request, self._responder, self._relay.access, self._visitor, now)
        except Exception:
            _log.exception("http_failed", connection=self.id)
            self.socket.abort()
            return
        self.socket.respond(response)

    def closing(self) -> None:
        for subscription in list(self._session.subscriptions.values()):
            self.end_subscription(subscription)
        self._backlog.close()

    def ended(self, reason: str) -> None:
        self._relay.admission.release(self)
        self._auth.close()
        if self._http_task is not None:
            self._http_task.cancel()
        self._relay.access.leave(self._visitor, time.monotonic())
        if self._is_websocket:
            self._relay.metrics.connections.dec()
        if self._http_task is None:
            self._relay.metrics.connections_closed[reason].inc()
        # Neither a health check nor a socket that never became a session is worth a line.
        log = _log.info if self._is_websocket else _log.debug
        log(
            "connection_closed",
            connection=self.id,
            reason=reason,
            identity=self._session.identity,
            publishes=self._publishes,
            events=self._events_sent,
            seconds=round(time.monotonic() - self.socket.opened_at, 3),
        )

    def review(self) -> None:
        self._auth.review()

    def tick(self) -> None:
        self._auth.check_deadline()

    # Messages of the peer.

    def received(self, data: bytes, is_text: bool, now: float) -> None:
        session = self._session
        self._act(session.receive_text(data, now) if is_text else session.receive_binary(now), now)

    def _act(self, action: Action, now: float) -> None:
        metrics = self._relay.metrics
        match action:
            case PublishReceived():
                self._relay.tally.publishes += 1
                self._publishes += 1
                self._pending_publishes += 1
                self._relay.admission.submit(
                    PublishRequest(action.raw, action.client_msg_id, self._lane, self.socket.heard_at)
                )
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
            case Answer():
                self._refuse(action)
            case CloseConnection():
                self.answer(action.payload, action.code)
                self.socket.close(action.close_code, action.reason, action.cause)
            case UnknownUnsubscribe():
                metrics.messages_received["UNSUBSCRIBE"].inc()

    def _refuse(self, refusal: Answer) -> None:
        metrics = self._relay.metrics
        if refusal.request is not None:  # a PUBLISH that does not get as far as admission
            metrics.messages_received[refusal.request].inc()
            metrics.publishes[refusal.code].inc()
        if refusal.limited is not None:
            metrics.rate_limited[refusal.limited].inc()
        self.answer(refusal.payload, refusal.code)

    def answer(self, payload: bytes, code: ErrorCode) -> None:
        """Queue an ERROR that belongs to no publish."""
        self._relay.metrics.errors_sent[code].inc()
        self.socket.queue(text_frame(payload))

    def _regulate(self) -> None:
        """Let the socket read, or not; where the whole relay is full, ask to be told of room again."""
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

    def authenticated(self, outcome: Authenticated) -> None:
        """The session speaks for another identity now: limits and open subscriptions follow."""
        self._session.use_quota(self._visitor.charged)
        self._lane.identity = self._session.identity
        self.socket.queue(text_frame(outcome.payload))
        self._end(outcome.ended)

    def regranted(self) -> None:
        """The settings have changed: capabilities, limits and open subscriptions follow."""
        self._session.use_quota(self._visitor.charged)
        self._end(self._session.regrant(self._relay.access.grants))

    def _end(self, subscriptions: Iterable[tuple[Subscription, bytes]]) -> None:
        for subscription, payload in subscriptions:
            self._close_subscription(subscription)
            self.answer(payload, ErrorCode.UNAUTHENTICATED)

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
        self._relay.tally.answered(time.monotonic() - request.started_at, duplicate=duplicate)
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

    def publish_refused(self, request: PublishRequest, error: InvalidPacket) -> None:
        metrics = self._relay.metrics
        metrics.publishes[error.code].inc()
        metrics.errors_sent[error.code].inc()
        self._answered(refusal_payload(error, request.client_msg_id))

    def room_again(self) -> None:
        self._regulate()

    def _answered(self, payload: bytes) -> None:
        self._pending_publishes -= 1
        if self.socket.is_open:
            self.socket.queue(text_frame(payload))
        if not self._has_room:
            self._regulate()

    # Subscriptions: called by the fan-out and the backlog.

    def deliver(self, frames: bytes, events: int) -> bool:
        if not self.socket.offer(frames):
            return False
        self._events_sent += events
        return True

    def fell_behind(self, subscription: Subscription) -> None:
        self._backlog.add(subscription)

    async def writable(self) -> None:
        """Wait until the socket has room, and the budget for history too: a stream that is open is sent
        later, and never cut (R-317). Cancelling it changes nothing."""
        await self.socket.writable()
        while (budget := self._session.backfill_budget) is not None:
            wait = budget.debt_seconds(time.monotonic())
            if wait <= 0:
                return
            self._relay.metrics.rate_limited["pacing"].inc()
            await asyncio.sleep(min(wait, _PACING_INTERVAL))
            await self.socket.writable()

    def backfilled(self, sent_bytes: int) -> None:
        """So many bytes of history were queued for this peer."""
        if self._session.backfill_budget is not None:
            self._session.backfill_budget.spend(sent_bytes, time.monotonic())

    def end_subscription(self, subscription: Subscription) -> None:
        """End a subscription that cannot be served."""
        self._session.drop(subscription)
        self._close_subscription(subscription)

    def _open(self, subscription: Subscription, replaced: Subscription | None) -> None:
        if replaced is not None:
            self._close_subscription(replaced)
            subscription.take_over(replaced)
        self._relay.metrics.subscriptions.inc()
        self._backlog.add(subscription)

    def _close_subscription(self, subscription: Subscription) -> None:
        fanout = self._relay.fanout
        if subscription.phase is Phase.LIVE:
            # Everything the feed has passed on is in the outbox already.
            subscription.leave_live(fanout.position)
            fanout.leave(subscription)
        subscription.close()
        self._backlog.discard(subscription)
        self._relay.metrics.subscriptions.dec()

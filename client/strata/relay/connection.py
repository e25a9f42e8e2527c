"""The client's side of one relay, across any number of connections: no I/O, no clock, no random source.

The shell tells it what happens (`connection_made`, `receive_message`, `connection_lost`, `handle_timer`) and
what the application asks for. After every call the shell does the same three things: sends `data_to_send()`,
acts on `changes()`, and arms one timer for `get_timer()`. Times are seconds on one monotonic clock.

Nothing a relay sends raises out of here: it is counted and dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import assert_never

from strata import wire
from strata.errors import InvalidMessage, RequestRefused, StrataError
from strata.relay.options import Options
from strata.relay.publishing import Handle, Publishing, PublishSettled
from strata.relay.subscribing import Phase, SubscriptionState
from strata.relay.values import Announced, Query, Statistics

__all__ = ["Change", "Connection"]

Change = PublishSettled | SubscriptionState
"""A publish that ended, or a subscription that has events to take or has ended."""


class Connection:
    """Every publish and subscription of one relay, and where each of them stands.

    `random` gives values in [0, 1), for jitter.
    """

    def __init__(self, options: Options, *, random: Callable[[], float]) -> None:
        self.statistics = Statistics()
        self.announced: Announced | None = None
        """What the relay now connected said about itself; None between connections."""
        self._options = options
        self._random = random
        self._outbox: list[bytes] = []
        self._publishing = Publishing(options, self.statistics, random=random, outbox=self._outbox)
        self._subscriptions: dict[SubscriptionState, None] = {}
        self._by_wire_id: dict[str, SubscriptionState] = {}
        self._changed: dict[SubscriptionState, None] = {}
        self._pausing: set[SubscriptionState] = set()
        # No later than the earliest `wake_at` of the subscriptions: kept so that a message costs no scan.
        self._wake_at = math.inf
        self._names = 0

    # What the application asks for.

    def publish(self, packet_id: str, canonical: bytes, *, timeout: float, now: float) -> Handle:
        """Begin to publish a packet given by its canonical bytes; it ends with one `PublishSettled`."""
        return self._publishing.add(packet_id, canonical, timeout=timeout, now=now)

    def cancel_publish(self, handle: Handle) -> None:
        """Forget a publish. If it was sent, the relay may store the packet all the same."""
        self._publishing.cancel(handle)

    def subscribe(self, query: Query, now: float) -> SubscriptionState:
        """Open a subscription; SUBSCRIBE goes out now, or when there is a connection."""
        self._names += 1
        state = SubscriptionState(
            f"s{self._names}",
            query,
            self._options,
            self.statistics,
            random=self._random,
            outbox=self._outbox,
        )
        self._subscriptions[state] = None
        if self.announced is not None:
            state.connection_made(self.announced, now)
            self._follow(state, None)
        return state

    def unsubscribe(self, state: SubscriptionState) -> None:
        """Close a subscription for good: nothing more is queued and UNSUBSCRIBE goes out. Idempotent."""
        before = state.wire_id
        state.close()
        self._follow(state, before)

    def taken(self, state: SubscriptionState, *, delivered: bool, now: float) -> None:
        """The consumer has dealt with the event it took: `SubscriptionState.taken`."""
        before = state.wire_id
        state.taken(delivered=delivered, now=now)
        self._follow(state, before)

    # What the network brings.

    def connection_made(self, announced: Announced, now: float) -> None:
        """A new connection is there: send what has no answer, go on where each subscription stands."""
        assert self.announced is None
        self.announced = announced
        self.statistics.connections += 1
        # Subscriptions first: a program sees the packets it publishes next.
        for state in self._subscriptions:
            state.connection_made(announced, now)
            self._follow(state, None)
        self._publishing.connection_made(now)

    def connection_lost(self) -> None:
        """The connection is gone. Nothing is forgotten; what was in flight waits for the next one."""
        if self.announced is None:
            return
        self.announced = None
        self.statistics.connections_lost += 1
        self._outbox.clear()
        self._by_wire_id.clear()
        self._pausing.clear()
        for state in self._subscriptions:
            state.connection_lost()
        self._publishing.connection_lost()

    def receive_message(self, data: bytes, now: float) -> None:
        """One frame of the relay's."""
        try:
            message = wire.decode_relay_message(data)
        except InvalidMessage:
            self.statistics.messages_invalid += 1
            return
        match message:
            case wire.Event():
                self._receive_event(message, now)
            case wire.Ok():
                if not self._publishing.receive_ok(message):
                    self.statistics.messages_invalid += not self._was_ours(message.client_msg_id)
            case wire.Error():
                self._receive_error(message, now)
            case wire.EndOfHistory():
                state = self._by_wire_id.get(message.subscription_id)
                if state is not None:
                    before = state.wire_id
                    state.receive_end_of_history(message, now)
                    self._follow(state, before)
            case wire.AuthChallenge() | wire.AuthOk():
                self._learn(message.extensions)
            case _:
                assert_never(message)

    def handle_timer(self, now: float) -> None:
        """Do what is due at `now`; early and late calls are harmless."""
        if now >= self._publishing.wake_at:
            self._publishing.handle_timer(now)
        if now < self._wake_at:
            return
        self._wake_at = math.inf
        for state in list(self._subscriptions):
            before = state.wire_id
            state.handle_timer(now)
            self._follow(state, before)

    def fail(self, error: StrataError) -> None:
        """Nothing further will happen: end every publish and subscription with this error."""
        self.connection_lost()
        self._publishing.fail(error)
        for state in list(self._subscriptions):
            state.close(error)
            self._follow(state, None)
        self._wake_at = math.inf

    # What comes out.

    def data_to_send(self) -> list[bytes]:
        """The text frames to send now, in order. Each is given once."""
        frames = self._outbox[:]
        self._outbox.clear()
        return frames

    def changes(self) -> list[Change]:
        """What the application is waiting for and has happened since the last call."""
        changes: list[Change] = [*self._publishing.settled, *self._changed]
        self._publishing.settled.clear()
        self._changed.clear()
        return changes

    @property
    def has_data_to_send(self) -> bool:
        """Whether `data_to_send` has anything to give."""
        return bool(self._outbox)

    def get_timer(self) -> float:
        """When to call `handle_timer`; infinity while there is nothing to wait for."""
        return min(self._wake_at, self._publishing.wake_at)

    @property
    def must_pause(self) -> bool:
        """Whether the shell has to stop reading until a consumer has taken events (`SubscriptionState`)."""
        return bool(self._pausing)

    # Dispatch.

    def _receive_event(self, message: wire.Event, now: float) -> None:
        self.statistics.events_received += 1
        wire_id = message.subscription_id
        # an unsolicited event has no taker. Nor has one for a stream that was left.
        state = None if wire_id is None else self._by_wire_id.get(wire_id)
        if state is None:
            self.statistics.events_unclaimed += 1
            return
        state.receive_event(message, now)
        self._changed[state] = None
        self._follow(state, wire_id)

    def _receive_error(self, message: wire.Error, now: float) -> None:
        refusals = self.statistics.refusals
        refusals[message.code] = refusals.get(message.code, 0) + 1
        refusal = RequestRefused(
            message.code,
            message.reason,
            detail=message.detail,
            retry_after=message.retry_after,
            max_bytes=message.max_bytes,
        )
        if self._publishing.receive_error(message, refusal, now):
            return
        wire_id = message.subscription_id or message.client_msg_id
        state = None if wire_id is None else self._by_wire_id.get(wire_id)
        if state is not None:
            state.receive_error(refusal, now)
            self._follow(state, wire_id)
        elif not self._was_ours(wire_id):
            self.statistics.messages_invalid += 1

    def _learn(self, extensions: list[str] | None) -> None:
        """R-139: additions are announced on the connection too. Streams already open stay as they are."""
        if extensions and self.announced is not None:
            known = self.announced.extensions | frozenset(extensions)
            self.announced = Announced(known, self.announced.max_packet_bytes)
            for state in self._subscriptions:
                state.learn(self.announced)

    def _follow(self, state: SubscriptionState, before: str | None) -> None:
        """Keep routes, timer and pause in step with a state that may have moved."""
        wire_id = state.wire_id
        if wire_id != before:
            if before is not None:
                self._by_wire_id.pop(before, None)
            if wire_id is not None:
                self._by_wire_id[wire_id] = state
        if state.wake_at < self._wake_at:
            self._wake_at = state.wake_at
        if state.must_pause:
            self._pausing.add(state)
        elif self._pausing:
            self._pausing.discard(state)
        if state.phase is Phase.ENDED and state in self._subscriptions:
            del self._subscriptions[state]
            self._changed[state] = None

    def _was_ours(self, request: str | None) -> bool:
        """Whether an answer names a request that we made: late answers are no fault of the relay's."""
        return request is not None and request[:1] in ("p", "s")

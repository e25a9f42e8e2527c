"""The client's side of one relay, across any number of connections: no I/O, no clock, no random source.

The shell reports events (`connection_made`, `receive_message`, `connection_lost`, `handle_timer`) and passes
on the application's requests. Before every step it calls `look`. After every step it does the same things:
it sends `data_to_send()` and, if `wants_ping`, a ping, acts on `changes()`, drops a connection that is
gone (`is_gone`), and arms one timer for `get_timer()`. Times are seconds on one monotonic clock.

A bad message from a relay never raises out of the core: it is counted and dropped.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Final, assert_never

from strata.protocol import wire
from strata.protocol.errors import InvalidMessage, RequestRefused, Retry, StrataError
from strata.protocol.ids import Signer
from strata.relays.connection.authenticating import Authenticating, AuthState
from strata.relays.connection.liveness import RelayLiveness
from strata.relays.connection.options import Options
from strata.relays.connection.publishing import Handle, Publishing, PublishSettled
from strata.relays.connection.stream import Phase, Stream
from strata.relays.connection.values import LONGEST_NAME, Announced, Authenticated, Query, Statistics

__all__ = ["AuthenticationSettled", "Change", "Core", "ShortChallenge"]


@dataclass(frozen=True, slots=True)
class AuthenticationSettled:
    """Authentication on this connection has been decided: the relay's confirmation, or the error."""

    outcome: Authenticated | StrataError


@dataclass(frozen=True, slots=True)
class ShortChallenge:
    """The relay left less time to answer its challenge than it must (R-273)."""

    seconds_left: float


Change = PublishSettled | Stream | AuthenticationSettled | ShortChallenge
"""A publish that ended, a subscription that has events to take or has ended, or news of authentication."""

_MOST_CODES: Final = 256


class Core:
    """Every publish and subscription of one relay, and the state of each.

    Requests go out on a session that is anonymous until authentication is wanted. Where authentication must
    come first (`authenticate="always"`, or a reconnect after it was needed), requests are *held*: only AUTH
    goes out until authentication is decided (R-339).

    `signer` is the identity to authenticate as. `random` gives values in [0, 1), for jitter.
    """

    def __init__(
        self,
        options: Options,
        *,
        random: Callable[[], float],
        signer: Signer | None = None,
        address: str = "",
        met: MutableMapping[str, str] | None = None,
    ) -> None:
        self.statistics = Statistics()
        self.announced: Announced | None = None
        """What the connected relay says about itself; None between connections."""
        self._options = options
        self._random = random
        self._outbox: list[bytes] = []
        self._authenticating = Authenticating(
            signer if options.authenticate != "never" else None,
            options,
            self.statistics,
            server_id=options.relay_id,
            address=address,
            met={} if met is None else met,
            random=random,
            outbox=self._outbox,
        )
        self._liveness = RelayLiveness(options)
        self.postponed = 0.0
        """By how many seconds, in all, deadlines were moved because the program did not look."""
        self._news: list[AuthenticationSettled | ShortChallenge] = []
        self._decisions = 0
        self._is_open = False
        self._clock_offset = 0.0
        self._publishing = Publishing(options, self.statistics, random=random, outbox=self._outbox)
        self._streams: dict[Stream, None] = {}
        self._by_wire_id: dict[str, Stream] = {}
        self._changed: dict[Stream, None] = {}
        self._pausing: set[Stream] = set()
        self._was_deaf = False
        """Whether reading has been paused since `handle_timer` last scanned the subscriptions."""
        # No later than the earliest `wake_at` of the subscriptions: kept so that a message needs no scan.
        self._wake_at = math.inf
        self._names = 0

    # What the application asks for.

    def expect(self, server_id: str | None) -> None:
        """Hold the relay to this DID, unless the options name one (R-298)."""
        if self._options.relay_id is None:
            self._authenticating.server_id = server_id

    def authenticate(self, now: float) -> bool:
        """Authenticate the session, now or on the next connection; ends in `AuthenticationSettled`.

        False if there is nothing to decide: `session` and `authentication_error` have the outcome.
        """
        undecided = self._authenticating.want(now)
        self._follow_authentication(now)
        return undecided

    def publish(
        self, packet_id: str, canonical: bytes, *, timeout: float, now: float, given: float | None = None
    ) -> Handle:
        """Begin to publish a packet given by its canonical bytes; it ends with one `PublishSettled`.

        `timeout` is the time left; `given` is the caller's timeout, if part of it has already passed.
        """
        return self._publishing.add(packet_id, canonical, timeout=timeout, now=now, given=given)

    def cancel_publish(self, handle: Handle) -> None:
        """Forget a publish. If it was sent, the relay may still store the packet."""
        self._publishing.cancel(handle)

    def subscribe(self, query: Query, now: float) -> Stream:
        """Open a subscription; SUBSCRIBE goes out now, or when there is a connection."""
        self._names += 1
        stream = Stream(
            f"s{self._names}",
            query,
            self._options,
            self.statistics,
            random=self._random,
            outbox=self._outbox,
        )
        self._streams[stream] = None
        if self.announced is not None and self._is_open:
            forbidden = self._authenticating.obstacle("subscribe")
            stream.connection_made(self.announced, now, clock_offset=self._clock_offset, forbidden=forbidden)
            self._follow(stream, None)
        return stream

    def unsubscribe(self, stream: Stream) -> None:
        """Close a subscription: nothing more is queued, and UNSUBSCRIBE goes out. Idempotent."""
        before = stream.wire_id
        stream.close()
        self._follow(stream, before)

    def taken(self, stream: Stream, *, delivered: bool, now: float) -> None:
        """Note that the consumer has dealt with the event it took (`Stream.taken`)."""
        before = stream.wire_id
        stream.taken(delivered=delivered, now=now)
        self._follow(stream, before)

    def await_keys(self, stream: Stream, awaits: bool) -> None:
        """Note whether the subscription's consumer is waiting for keys (`Stream.awaits_keys`)."""
        stream.awaits_keys = awaits
        self._follow(stream, stream.wire_id)

    # What the network brings.

    def look(self, now: float, *, unix_now: float, heard_at: float = -math.inf) -> bool:
        """Note, before each step, that the program looks, and when bytes last came from the relay.

        If it did not look for a while, every deadline that judges the relay moves by that time: its answers
        may lie in the socket. Returns whether the program was away for so long that the connection is in
        doubt; then the relay is pinged at once.
        """
        self._liveness.heard(heard_at)
        by, is_away = self._liveness.look(now, unix_now)
        if by:
            self.postponed += by
            self._authenticating.postpone(by)
            self._publishing.postpone(by)
            for stream in self._streams:
                stream.postpone(by)
        return is_away

    def pinged(self, now: float) -> None:
        """Note that the ping has been sent."""
        self._liveness.pinged(now, self._publishing.sizes_in_flight)

    def answered(self) -> None:
        """Note that the pong to the last ping has come."""
        self._liveness.answered()

    def connection_made(self, announced: Announced, now: float, *, unix_now: float = 0.0) -> None:
        """Note a new connection: send what has no answer, and resume each subscription at its position.

        `unix_now` is the same moment as `now`, in Unix seconds. It is needed to compare with times from
        relays, such as the expiry of a challenge.
        """
        assert self.announced is None
        self.announced = announced
        self._clock_offset = unix_now - now
        self.statistics.connections += 1
        self._liveness.connection_made(now)
        self._authenticating.connection_made(announced.relay_id, now, unix_now)
        if not self._authenticating.is_pending:
            self._open(announced, now)

    def connection_lost(self) -> None:
        """Note the end of the connection. Nothing is forgotten; publishes in flight wait for the next one."""
        if self.announced is None:
            return
        self.announced = None
        self._is_open = False
        self.statistics.connections_lost += 1
        self._authenticating.connection_lost()
        self._liveness.connection_lost()
        self._outbox.clear()
        self._by_wire_id.clear()
        self._pausing.clear()
        for stream in self._streams:
            stream.connection_lost()
        self._publishing.connection_lost()

    def receive_message(self, data: bytes, now: float) -> None:
        """Process one frame from the relay."""
        try:
            message = wire.decode_relay_message(data)
        except InvalidMessage:
            self.statistics.messages_invalid += 1
            return
        match message:
            case wire.Event():
                self._receive_event(message, now, len(data))
            case wire.Ok():
                if not self._publishing.receive_ok(message):
                    self.statistics.messages_invalid += not self._was_ours(message.client_msg_id)
            case wire.Error():
                self._receive_error(message, now)
            case wire.EndOfHistory():
                stream = self._by_wire_id.get(message.subscription_id)
                if stream is not None:
                    before = stream.wire_id
                    stream.receive_end_of_history(message, now)
                    self._follow(stream, before)
            case wire.AuthChallenge():
                self._learn(message.extensions)
                left = self._authenticating.receive_challenge(message, now)
                if left is not None:
                    self._news.append(ShortChallenge(left))
                self._follow_authentication(now)
            case wire.AuthOk():
                self._learn(message.extensions)
                if not self._authenticating.receive_ok(message):
                    self.statistics.messages_invalid += 1
                self._follow_authentication(now)
            case _:
                assert_never(message)

    def handle_timer(self, now: float) -> None:
        """Do what is due at `now`. Early calls are harmless, and late ones after a `look`."""
        self._liveness.handle_timer(now, awaits=self._awaits, listens=not self.must_pause)
        if now >= self._authenticating.wake_at:
            self._authenticating.handle_timer(now)
            self._follow_authentication(now)
        if now >= self._publishing.wake_at:
            self._publishing.handle_timer(now)
        if now < self._wake_at:
            return
        self._wake_at = math.inf
        was_deaf, self._was_deaf = self._was_deaf, self.must_pause
        for stream in list(self._streams):
            before = stream.wire_id
            if was_deaf or self._was_deaf:
                stream.excuse(now)
            else:
                stream.handle_timer(now)
            self._follow(stream, before)

    def fail(self, error: StrataError) -> None:
        """End every publish and subscription with this error, permanently."""
        self.connection_lost()
        self._liveness.end()
        self._news.append(AuthenticationSettled(error))
        self._publishing.fail(error)
        for stream in list(self._streams):
            stream.close(error)
            self._follow(stream, None)
        self._wake_at = math.inf

    # What comes out.

    def data_to_send(self) -> list[bytes]:
        """The text frames to send now, in order. Each is returned once."""
        frames = self._outbox[:]
        self._outbox.clear()
        return frames

    def changes(self) -> list[Change]:
        """What has happened since the last call that the application is waiting for."""
        changes: list[Change] = [*self._news, *self._publishing.settled, *self._changed]
        self._news.clear()
        self._publishing.settled.clear()
        self._changed.clear()
        return changes

    @property
    def has_data_to_send(self) -> bool:
        """Whether `data_to_send` would return any frames."""
        return bool(self._outbox)

    def get_timer(self) -> float:
        """When to call `handle_timer`; infinity while there is nothing to wait for."""
        return min(
            self._wake_at, self._publishing.wake_at, self._authenticating.wake_at, self._liveness.wake_at
        )

    @property
    def wants_ping(self) -> bool:
        """Whether the shell must send a ping, then call `pinged`, and `answered` when its pong has come."""
        return self._liveness.wants_ping

    @property
    def is_gone(self) -> bool:
        """Whether the shell must drop the connection, without closing it, because nobody answers."""
        return self._liveness.is_gone

    @property
    def must_pause(self) -> bool:
        """Whether the shell must stop reading until a consumer has taken events (`Stream.must_pause`)."""
        return bool(self._pausing)

    @property
    def session(self) -> Authenticated | None:
        """The identity the relay has confirmed for this session; None while it is anonymous."""
        return self._authenticating.session

    @property
    def authentication_state(self) -> AuthState:
        """The state of authentication on this connection (R-293)."""
        return self._authenticating.state

    @property
    def authentication_error(self) -> StrataError | None:
        """Why authentication has failed on this connection; None if it has not."""
        return self._authenticating.error

    @property
    def relay_ahead(self) -> float | None:
        """See `Authenticating.relay_ahead`."""
        return self._authenticating.relay_ahead

    @property
    def server_id(self) -> str | None:
        """The DID the relay is held to (R-298); None until one is known."""
        return self._authenticating.server_id

    # Dispatch.

    def _awaits(self) -> bool:
        """Whether a request waits for an answer of the relay."""
        return (
            len(self._publishing.sizes_in_flight) > 0
            or self._authenticating.state is AuthState.AUTHENTICATING
            or any(stream.awaits_answer for stream in self._streams)
        )

    def _receive_event(self, message: wire.Event, now: float, size_bytes: int) -> None:
        self.statistics.events_received += 1
        wire_id = message.subscription_id
        # unsolicited events, and events of a subscription that was left, are dropped.
        stream = None if wire_id is None else self._by_wire_id.get(wire_id)
        if stream is None:
            self.statistics.events_unclaimed += 1
            return
        stream.receive_event(message, now, size_bytes)
        self._changed[stream] = None
        self._follow(stream, wire_id)

    def _receive_error(self, message: wire.Error, now: float) -> None:
        self._count_refusal(message.code)
        refusal = RequestRefused(
            message.code,
            message.reason,
            detail=message.detail,
            retry_after=message.wait_seconds,
            max_bytes=message.max_bytes,
            cursor=message.cursor,
        )
        if self._authenticating.receive_error(message, refusal, now):
            self._follow_authentication(now)
            return
        wire_id = message.subscription_id or message.client_msg_id
        stream = None if wire_id is None else self._by_wire_id.get(wire_id)
        park = False
        if refusal.retry is Retry.AUTHENTICATE and (stream is not None or self._publishing.awaits(message)):
            # Only for a request of ours: an unrelated ERROR must not make us authenticate.
            park = self._authenticating.want(now)
            refusal.__cause__ = self._authenticating.error
        if self._publishing.receive_error(message, refusal, now, park=park):
            return
        if stream is not None:
            stream.receive_error(refusal, now, park=park)
            self._changed[stream] = None  # it may have a `LogReset` to take
            self._follow(stream, wire_id)
        elif not self._was_ours(wire_id):
            self.statistics.messages_invalid += 1

    def _count_refusal(self, code: str) -> None:
        """Count a refusal under its code. The codes are bounded, because a hostile relay may invent them."""
        refusals = self.statistics.refusals
        if code not in refusals and (len(refusals) >= _MOST_CODES or len(code) > LONGEST_NAME):
            code = "other"
        refusals[code] = refusals.get(code, 0) + 1

    def _learn(self, extensions: list[str] | None) -> None:
        """Note extensions announced on the connection (R-139). Open streams use them from their next
        SUBSCRIBE on."""
        if extensions and self.announced is not None:
            self.announced = self.announced.learnt(extensions)
            for stream in self._streams:
                stream.learn(self.announced)

    def _open(self, announced: Announced, now: float) -> None:
        """Send requests on a new connection, now that nothing must come before them."""
        self._is_open = True
        forbidden = self._authenticating.obstacle("subscribe")
        # Subscriptions first, so that a program sees the packets it publishes next.
        for stream in list(self._streams):
            stream.connection_made(announced, now, clock_offset=self._clock_offset, forbidden=forbidden)
            self._follow(stream, None)
        self._publishing.connection_made(now, forbidden=self._authenticating.obstacle("publish"))

    def _follow_authentication(self, now: float) -> None:
        """If authentication has been decided, act on the outcome and report it."""
        authenticating = self._authenticating
        outcome = authenticating.session or authenticating.error
        if outcome is None or authenticating.decisions == self._decisions:
            return
        self._decisions = authenticating.decisions
        self._news.append(AuthenticationSettled(outcome))
        if not self._is_open:
            if self.announced is not None:
                self._open(self.announced, now)
            return
        for stream in list(self._streams):
            before = stream.wire_id
            if isinstance(outcome, Authenticated):
                stream.authorize(now, forbidden=authenticating.obstacle("subscribe"))
            else:
                stream.give_up(outcome)
            self._follow(stream, before)
        if isinstance(outcome, Authenticated):
            self._publishing.authorize(now, forbidden=authenticating.obstacle("publish"))
        else:
            self._publishing.give_up(outcome)

    def _follow(self, stream: Stream, before: str | None) -> None:
        """Update routes, timer and pause for a stream that may have changed."""
        wire_id = stream.wire_id
        if wire_id != before:
            if before is not None:
                self._by_wire_id.pop(before, None)
            if wire_id is not None:
                self._by_wire_id[wire_id] = stream
        if stream.wake_at < self._wake_at:
            self._wake_at = stream.wake_at
        if stream.must_pause:
            self._was_deaf = True
            self._pausing.add(stream)
        elif self._pausing:
            self._pausing.discard(stream)
        if stream.phase is Phase.ENDED and stream in self._streams:
            del self._streams[stream]
            self._changed[stream] = None

    def _was_ours(self, request: str | None) -> bool:
        """Whether an answer names a request of ours: late answers are not the relay's fault."""
        return request is not None and request[:1] in ("a", "p", "s")

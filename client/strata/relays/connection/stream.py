"""One subscription across any number of connections: no I/O, no clock.

The consumer is promised every matching packet once and in the relay's order. This rests on three things:

*The position.* `_position` is the last cursor queued. After any interruption, reading resumes
strictly after it (R-154). Events are queued in the order the relay sends them, so nothing up to it is
missing.

*The wire id.* Every SUBSCRIBE uses a fresh `subscription_id`. Events that still arrive for an old one belong
to a stream that was left, and are ignored: they will come again after the position.

*The window.* Delivered ids are remembered (`Inspector`), so where streams must overlap, repeats are dropped.

    WAITING ──SUBSCRIBE──▶ HISTORY ──▶ LIVE          WAITING: not on the wire, because there is no connection,
       ▲                      │   ◀──    │                    the queue has no room, or the relay said later.
       └──────────────────────┴──────────┘           ENDED:   nothing more will be queued.

History is read in pages. Each page starts after the cursor of the last one, and is requested when the queue
has room for it. Then `gapless` (A-067) gives one live stream in which every event has its cursor. When the
queue is full, the stream is left, and resumed from the position, by pages, once the consumer has made room:
the relay's store is the buffer, and nothing else on the connection waits.

Each page is left before the next is requested, so live packets that arrive in between belong to a later page.
A relay that marks the end of history (A-047) says when history is complete. A plain relay does not, and may
give fewer packets than requested (A-043): only an empty page, ended by silence, proves that history is
complete. That last subscription then stays open, and has been live since it was made (A-045). This assumes
what RFC-0004 does not state, that a plain relay sends history before live events. Its live events need not
carry cursors; after half a window of those, the subscription is made anew from the position, so that the
overlap after a lost connection fits the window.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator

from strata.protocol import wire
from strata.protocol.errors import ErrorCode, RequestRefused, RequestTimeout, Retry, StrataError
from strata.relays.backoff import MAX_RETRY_AFTER_SECONDS, retry_delay
from strata.relays.circles import Circle
from strata.relays.connection.options import Options
from strata.relays.connection.queue import EventQueue, QueuedEvent, possible_time
from strata.relays.connection.values import RESUME_MARGIN_SECONDS, Announced, LogReset, Query, Statistics

__all__ = ["Phase", "Stream"]

_MAX_RESETS = 3
"""How often in a row, with no event in between, a relay may say that it has lost the position."""
_KEYS_ROOM = 4
"""How many times the usual number of events may wait while keys for the first one are fetched."""


class Phase(enum.Enum):
    """The state of a subscription with the relay."""

    WAITING = enum.auto()
    HISTORY = enum.auto()
    LIVE = enum.auto()
    ENDED = enum.auto()


_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.HISTORY, Phase.ENDED}),
    Phase.HISTORY: frozenset({Phase.WAITING, Phase.LIVE, Phase.ENDED}),
    Phase.LIVE: frozenset({Phase.WAITING, Phase.HISTORY, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


class Stream:
    """The protocol state of one subscription, over all connections, and its bounded queue.

    `outbox` is the connection's list of frames to send. The owner passes in what arrives for `wire_id`, takes
    events with `take`, and checks `phase` and `error` when the queue is empty.
    """

    def __init__(
        self,
        name: str,
        query: Query,
        options: Options,
        statistics: Statistics,
        *,
        random: Callable[[], float],
        outbox: list[bytes],
    ) -> None:
        self.query = query
        self.phase = Phase.WAITING
        self.error: StrataError | None = None
        self.wire_id: str | None = None
        """The `subscription_id` now on the wire, if any."""
        self.wake_at = math.inf
        """When `handle_timer` has work to do."""
        self.awaits_keys = False
        """Whether the consumer can take nothing until the relay has given it an author's keys."""
        self._name = name
        self._options = options
        self._statistics = statistics
        self._random = random
        self._outbox = outbox
        self._announced: Announced | None = None  # None: not connected
        self._forbidden: StrataError | None = None
        self._parked: RequestRefused | None = None
        self._anonymous = False
        self._queue = EventQueue(options)
        self._resets = self._turns = 0
        self._delivered = 0
        self._attempt = 0
        self._position = query.cursor
        self._asked_position: str | None = None
        self._circle = Circle()
        self._since = query.since
        self._newest_received_at: int | None = None
        self._clock_offset = 0.0
        self._gapless = self._marked = self._by_receipt = False
        self._behind = True
        self._page_limit = self._page_events = 0
        self._caught_up = False
        self._without_cursor = 0
        self._refusals = 0
        self._retry_at = -math.inf

    # What the application does.

    def take(self) -> QueuedEvent | LogReset | None:
        """Take the next queued event or `LogReset`, if any. The caller must then call `taken`."""
        return self._queue.take()

    def waiting(self) -> Iterator[QueuedEvent]:
        """The queued events, without taking them."""
        return iter(self._queue)

    def taken(self, *, delivered: bool, now: float) -> None:
        """Note that the event last taken was delivered, or dropped; resume reading if that awaited room."""
        self._delivered += delivered
        if self._delivered == self.query.limit:
            self._queue.clear()
            self.close()
        elif self.phase is Phase.WAITING:
            self._subscribe_if_possible(now)

    def close(self, error: StrataError | None = None) -> None:
        """End the subscription; what is queued can still be taken."""
        if self.phase is not Phase.ENDED:
            self._leave()
            self.error = error
            self._move(Phase.ENDED)
            self.wake_at = math.inf

    @property
    def position(self) -> str | None:
        """The cursor after what was read, queued events included; None if the relay has given none."""
        return self._position

    @property
    def must_pause(self) -> bool:
        """Whether reading from the socket must stop because of this subscription.

        True only for a relay that never gave a cursor: without a position to resume from, unread events would
        be lost. Everything else on the connection waits meanwhile, publishes included.
        """
        if self.wire_id is None or self._position is not None:
            return False
        if self.awaits_keys:
            # The keys that the consumer waits for come over this connection: let the queue grow meanwhile.
            return len(self._queue) >= _KEYS_ROOM * self._options.queue_events
        return self._queue.is_full

    # What the connection brings.

    def connection_made(
        self,
        announced: Announced,
        now: float,
        *,
        clock_offset: float = 0.0,
        forbidden: StrataError | None = None,
    ) -> None:
        """Note a new connection: resume after the position.

        `clock_offset` is Unix time minus `now`. `forbidden` is why this session must not subscribe (R-291),
        if so; then the subscription ends with it.
        """
        self._announced = announced
        self._clock_offset = clock_offset
        self._forbidden = forbidden
        self._refusals = 0
        self._subscribe_if_possible(now)

    def authorize(self, now: float, *, forbidden: StrataError | None) -> None:
        """Note that the session is authenticated: subscribe again, if that was refused for lack of it."""
        self._forbidden = forbidden
        self._anonymous = self.wire_id is not None
        self._parked = None
        self._subscribe_if_possible(now)

    def give_up(self, error: StrataError) -> None:
        """Note that authentication failed: the relay's refusal stands, with `error` as its cause."""
        if self._parked is not None:
            self._parked.__cause__ = error
            self.close(self._parked)

    def learn(self, announced: Announced) -> None:
        """Note that the relay has announced more extensions; the next SUBSCRIBE uses them."""
        self._announced = announced

    def connection_lost(self) -> None:
        """Note a lost connection. Queued events stay; the rest will be read after the position."""
        self._announced = None
        self._forbidden = self._parked = None
        self._behind = True
        self.wire_id = None
        self.wake_at = math.inf
        if self._position is None:  # then everything is read again
            self._turns += 1
        if self.phase in (Phase.HISTORY, Phase.LIVE):
            self._move(Phase.WAITING)

    def receive_event(self, message: wire.Event, now: float, size_bytes: int) -> None:
        """Queue an event for `wire_id`, or leave the stream if the event belongs to a later page.

        `size_bytes` is the size of the whole message.
        """
        self._refusals = self._resets = 0
        cursor = message.cursor
        if self.phase is Phase.LIVE and cursor is not None and not self._gapless and not self._marked:
            # A plain relay's live event with a cursor, or its history after a long silence: they cannot be
            # distinguished, and treating it as history costs one empty page.
            self._caught_up = False
            self._move(Phase.HISTORY)
        if not self._gapless and self.phase is Phase.HISTORY:
            if cursor is None and not self._marked:
                # Historical events carry a cursor, so this one is live and the page is over. Only an
                # empty page shows that nothing is left between the position and this event.
                if self._page_events or not self.query.live:
                    self._end_page(now)
                    return
                self._catch_up()
            elif self._page_events == self._page_limit:
                # More than requested: live, or a relay that ignores limits. The next page has it in order.
                self._end_page(now)
                return
        self._enqueue(message, now, size_bytes)
        if self.phase is Phase.HISTORY:
            self._page_events += 1
            self._watch(now)
            if not self._gapless and not self._marked and self._page_events == self._page_limit:
                self._end_page(now)
                return
        if self._queue.is_full and self._position is not None:
            self._statistics.subscriptions_deferred += 1
            self._behind = True
            self._leave()
            self._move(Phase.WAITING)
            self.wake_at = math.inf
        elif self._without_cursor >= self._options.dedup_packets // 2:
            self._resubscribe(now)

    def receive_end_of_history(self, message: wire.EndOfHistory, now: float) -> None:
        """Note the end of the requested history; `message.complete` says whether that was all of it."""
        self._refusals = self._resets = 0
        if self.phase is not Phase.HISTORY:
            return
        if isinstance(message.cursor, str):
            self._advance(message.cursor)
        if message.complete or not self._has_moved():
            self._behind = False
            if self._can_be_gapless and not self._gapless:
                self._resubscribe(now)
            else:
                self._finish_history()
        else:
            self._resubscribe(now)

    def receive_error(self, refusal: RequestRefused, now: float, *, park: bool = False) -> None:
        """Handle a refused SUBSCRIBE: start elsewhere, try later, or end with the refusal.

        `park` means that authentication is under way: a SUBSCRIBE refused for lack of it waits for the
        outcome.
        """
        self.wire_id = None
        if refusal.retry is Retry.AUTHENTICATE and (park or self._anonymous):
            self._parked = refusal if park else None
            delay = 0.0
        elif refusal.code == ErrorCode.INVALID_CURSOR and self._turn_back(refusal):
            delay = 0.0
        elif self._is_final(refusal):
            self.close(refusal)
            return
        else:
            delay = self._delay(refusal)
        if self.phase is not Phase.WAITING:
            self._move(Phase.WAITING)
        self._retry_at = now + delay
        self._subscribe_if_possible(now)

    def handle_timer(self, now: float) -> None:
        """Act on a silence that has lasted long enough, or try again when that is due."""
        if now < self.wake_at:
            return
        self.wake_at = math.inf
        if self.phase is Phase.WAITING:
            self._subscribe_if_possible(now)
        elif self.phase is Phase.HISTORY:
            if self._marked:
                self.close(RequestTimeout("SUBSCRIBE", self._options.history_timeout))
            elif self._page_events:
                self._end_page(now)
            else:
                self._finish_history()

    def excuse(self, now: float) -> None:
        """Like `handle_timer`, after a pause in reading: the relay's silence then means nothing."""
        if now >= self.wake_at and self.phase is Phase.HISTORY:
            self._watch(now)
        else:
            self.handle_timer(now)

    def postpone(self, by: float) -> None:
        """Nobody looked for `by` seconds: the relay has that much more time."""
        if self.phase is Phase.HISTORY:
            self.wake_at += by

    @property
    def awaits_answer(self) -> bool:
        """Whether the relay's silence will mean something."""
        return self.phase is Phase.HISTORY and self.wake_at != math.inf

    # Moves.

    def _move(self, phase: Phase) -> None:
        assert phase in _MOVES[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    def _subscribe_if_possible(self, now: float) -> None:
        if self._announced is None or self.phase is not Phase.WAITING or self._parked is not None:
            return
        if self._forbidden is not None:
            self.close(self._forbidden)
            return
        if now < self._retry_at:
            self.wake_at = self._retry_at
            return
        announced = self._announced
        self._marked = "history_marker" in announced.extensions
        self._by_receipt = "received_range" in announced.extensions
        # A gapless stream sends history faster than it can be left, and discarded events must be sent again.
        # So if the relay marks the end of history, pages come first.
        self._gapless = self._can_be_gapless and not (self._behind and self._marked)
        limit = None if self._gapless else self._next_page_limit(announced)
        if limit == 0 or not self._queue.has_room_for(limit or max(1, self._options.queue_events // 2)):
            return  # `taken` asks again
        self._attempt += 1
        wire_id = self.wire_id = f"{self._name}.{self._attempt}"
        self._asked_position = self._position
        self._page_limit, self._page_events = limit or 0, 0
        self._without_cursor = 0
        self._outbox.append(wire.encode(self._subscribe_message(wire_id, announced, limit)))
        self._caught_up = self._anonymous = False
        self._move(Phase.HISTORY)
        self._watch(now)

    @property
    def _can_be_gapless(self) -> bool:
        return self.query.live and self._announced is not None and "gapless" in self._announced.extensions

    def _subscribe_message(self, wire_id: str, announced: Announced, limit: int | None) -> wire.Subscribe:
        filters = self.query.filters(announced, cursor=self._position, since=self._since, limit=limit)
        return wire.Subscribe(
            subscription_id=wire_id,
            filters=filters,
            replication_profile=self.query.replication_profile,
            history_marker=True if self._marked else None,
            gapless=True if self._gapless else None,
            # A plain relay names the request, not the subscription, in its ERROR.
            client_msg_id=wire_id,
        )

    def _leave(self) -> None:
        if self.wire_id is not None:
            self._outbox.append(wire.encode(wire.Unsubscribe(subscription_id=self.wire_id)))
            self.wire_id = None

    def _resubscribe(self, now: float) -> None:
        self._leave()
        self._move(Phase.WAITING)
        self.wake_at = math.inf
        self._subscribe_if_possible(now)

    def _end_page(self, now: float) -> None:
        """End a page of a plain relay; there may be more history."""
        if not self._has_moved():
            # It sent events but no new position: it does not page, so this is all there is.
            self._finish_history()
        else:
            self._resubscribe(now)

    def _finish_history(self) -> None:
        if self.query.live:
            self._catch_up()
        else:
            self.close()

    def _catch_up(self) -> None:
        self._caught_up = True
        self.wake_at = math.inf
        self._move(Phase.LIVE)

    def _watch(self, now: float) -> None:
        """Set the time from which silence in this phase means something."""
        if self._gapless:
            self.wake_at = math.inf  # silence means there is nothing; the keepalive judges the connection
        else:
            self.wake_at = now + (
                self._options.history_timeout if self._marked else self._options.idle_timeout
            )

    def _has_moved(self) -> bool:
        """Whether the page has led to a new position; else a relay could be asked in a circle forever."""
        return self._position != self._asked_position and not self._circle.closes(self._position)

    def _turn_back(self, refusal: RequestRefused) -> bool:
        """Resume from the last good place; False if there is none."""
        self._circle = Circle()
        self._turns += 1
        lost = self._asked_position
        if refusal.detail != "log_reset" or lost is None:
            return self._fall_back()
        self._resets += 1
        if self._resets > _MAX_RESETS:
            return False
        if refusal.cursor is not None:
            self._position = refusal.cursor
        elif not self._fall_back():
            return False
        self._behind = True
        self._statistics.log_resets += 1
        since = self._since if refusal.cursor is None else None
        self._queue.put(LogReset(lost=lost, cursor=refusal.cursor, since=since))
        return True

    def _fall_back(self) -> bool:
        """Start at a time no later than any packet missed: the relay no longer knows the cursor (R-339).

        False if there is nothing to fall back to: the order is descending, or the caller gave a cursor
        without a time.
        """
        floor = self.query.cursor_fallback_since
        if self._newest_received_at is not None:
            floor = self._newest_received_at - RESUME_MARGIN_SECONDS
        starts = [moment for moment in (floor, self.query.since) if moment is not None]
        if self._asked_position is None or self.query.order == "desc" or not starts:
            return False
        self._position = None
        self._since = max(starts)
        self._statistics.cursor_fallbacks += 1
        return True

    # What comes in.

    def _enqueue(self, message: wire.Event, now: float, size_bytes: int) -> None:
        live: bool | None = self._caught_up if self._marked or self._caught_up else None
        received_at = possible_time(message.received_at)
        event = QueuedEvent(
            message.packet,
            received_at,
            message.cursor,
            live,
            message.relay_annotations,
            now,
            size_bytes,
            self._by_receipt,
            self._turns,
        )
        self._queue.put(event)
        # If a relay's clock is ahead and then corrected, what it receives afterwards must not be skipped.
        by_now = min(received_at, int(now + self._clock_offset))
        self._newest_received_at = max(self._newest_received_at or 0, by_now)
        if message.cursor is None:
            self._without_cursor += 1
        else:
            self._advance(message.cursor)

    def _advance(self, cursor: str) -> None:
        self._position = cursor
        self._without_cursor = 0

    def _next_page_limit(self, announced: Announced) -> int:
        """How many packets to request: none while those queued may already reach the query's limit."""
        limit = self._options.page_events
        if self.query.limit is not None and self.query.is_served_by(announced):
            limit = min(limit, self.query.limit - self._delivered - len(self._queue))
        return max(limit, 0)

    # Refusals.

    def _is_final(self, refusal: RequestRefused) -> bool:
        if refusal.retry in (Retry.NEVER, Retry.AUTHENTICATE):
            return True
        if refusal.retry_after is not None and refusal.retry_after > MAX_RETRY_AFTER_SECONDS:
            return True  # better raised now than waited for in silence
        # These count our own subscriptions, so waiting frees no place.
        return refusal.detail in ("too_many_subscriptions", "too_many_filter_bytes")

    def _delay(self, refusal: RequestRefused) -> float:
        base, cap = self._options.backoff_base, self._options.backoff_cap
        delay = retry_delay(self._refusals, refusal.retry_after, base=base, cap=cap, random=self._random)
        self._refusals += 1
        return delay

"""Fan-out: a batch of committed packets, once through the interest index, to every live subscription.

A batch is matched against groups of equal filters, and each packet is encoded once. The frames of a batch
are joined once for each distinct subscription id, and handed to every subscriber as one piece of bytes. A
subscriber costs one call and, later, one write.

No I/O: a `Sink` carries a subscriber's bytes away, and reports when its queue is full.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from relayd.cursor import CursorCodec
from relayd.feed.events import Form, annotated_tail, event_frames, event_tail
from relayd.feed.filters import CompiledFilter
from relayd.feed.interest import InterestIndex
from relayd.feed.subscription import FeedPhase, FeedSubscription
from relayd.store.declined import covers
from relayd.store.types import Declined, LogEntry

__all__ = ["Fanout", "Sink"]

_RECENT_BYTES: Final = 1_048_576
_RECENT_ENTRIES: Final = 2048


class Sink(Protocol):
    """A connection, as seen by the fan-out."""

    @property
    def deliver(self) -> Callable[[bytes, int], bool]:
        """A function that takes frames for one subscription, and their number, to be written after the batch.

        It returns False if the outbound queue is full; nothing was taken then.
        """

    def fell_behind(self, subscription: FeedSubscription) -> None:
        """This subscription has left the live feed and must read on from the store."""


class _Tail:
    """The shared half of one packet's EVENT: with and without its cursor, as served and as signed. Each form
    is made when it is first needed."""

    __slots__ = ("_cursors", "_entry", "_form", "_made")

    def __init__(self, entry: LogEntry, cursors: CursorCodec, form: Form) -> None:
        self._entry = entry
        self._cursors = cursors
        self._form = form
        self._made: dict[tuple[bool, bool], bytes] = {}

    def encoded(self, with_cursor: bool, signed: bool) -> bytes:
        """The bytes in the form that a subscription needs."""
        shape = (with_cursor, signed)
        made = self._made.get(shape)
        if made is None:
            made = self._made[shape] = self._make(with_cursor, signed)
            if self._entry.packet.annotation is None:  # all subscribers get it as signed
                self._made[with_cursor, not signed] = made
        return made

    def _make(self, with_cursor: bool, signed: bool) -> bytes:
        packet, received_at = self._entry.packet, self._entry.told_at
        cursor = self._cursors.encode_bytes(self._entry.sequence) if with_cursor else None
        if packet.annotation is None:
            return event_tail(packet.body, received_at, cursor)
        form: Form = "signed" if signed else self._form
        return annotated_tail(packet.body, packet.annotation, received_at, cursor, form)


class Fanout:
    """The live feed of one process. `position` is the last sequence that went through it.

    `form` says how annotated packets are served. Packets covered by `declined` are passed over (R-323); it
    may be replaced at any time. A subscription that meets a fault of ours, which is reported to `on_fault`,
    reads on from the store; the feed goes on for the others.
    """

    def __init__(
        self,
        cursors: CursorCodec,
        position: int,
        *,
        form: Form = "rewrite",
        on_fault: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.position = position
        self.form: Form = form
        self.declined = Declined()
        self._cursors = cursors
        self._on_fault = on_fault
        self._index: InterestIndex[FeedSubscription] = InterestIndex()
        self._sinks: dict[FeedSubscription, Sink] = {}
        # The newest entries, oldest first, and the position before the first of them.
        self._recent: deque[LogEntry] = deque()
        self._recent_bytes = 0
        self._recent_after = position

    def __len__(self) -> int:
        return len(self._sinks)

    def join(self, subscription: FeedSubscription, sink: Sink) -> None:
        """Make a subscription live; it must have delivered everything up to `position`."""
        if subscription.phase is not FeedPhase.LIVE or subscription.position != self.position:
            raise RuntimeError("a subscription may go live only where the feed stands")
        self._sinks[subscription] = sink
        self._index.add(subscription, subscription.filter)

    def leave(self, subscription: FeedSubscription) -> None:
        """Take a subscription out; a subscription that is not live changes nothing."""
        if self._sinks.pop(subscription, None) is not None:
            self._index.discard(subscription, subscription.filter)

    def skip_to(self, sequence: int) -> None:
        """Move on to `sequence`, if the log is known to hold nothing in between."""
        self.position = max(self.position, sequence)

    def recent_after(self, position: int) -> list[LogEntry] | None:
        """The served entries after `position`; None if the feed no longer holds them all."""
        if position < self._recent_after:
            return None
        newer: list[LogEntry] = []
        for entry in reversed(self._recent):
            if entry.sequence <= position:
                break
            newer.append(entry)
        newer.reverse()
        if self.declined:
            return [entry for entry in newer if not covers(self.declined, entry.packet)]
        return newer

    def forget_recent(self) -> None:
        """Drop the newest entries: subscriptions that need them read them anew from the store."""
        self._recent.clear()
        self._recent_bytes = 0
        self._recent_after = self.position

    def _keep(self, entries: Sequence[LogEntry]) -> None:
        recent = self._recent
        recent.extend(entries)
        self._recent_bytes += sum(len(entry.packet.body) for entry in entries)
        while len(recent) > _RECENT_ENTRIES or self._recent_bytes > _RECENT_BYTES:
            oldest = recent.popleft()
            self._recent_bytes -= len(oldest.packet.body)
            self._recent_after = oldest.sequence

    def dispatch(self, entries: Sequence[LogEntry], now: int) -> int:
        """Send the log's next entries to their subscriptions; return the number of EVENTs delivered.

        The entries must follow `position` without a gap in the log. Expired and declined entries are passed
        over (R-100, R-323), and count as delivered.
        """
        before = self.position
        delivered = 0
        behind: list[FeedSubscription] = []
        for filter_members, tails in self._matches(entries, now):
            delivered += self._deliver(filter_members, tails, behind)
        self.position = entries[-1].sequence
        self._keep(entries)
        for subscription in behind:
            try:
                sink = self._sinks[subscription]
                self.leave(subscription)
                subscription.leave_live(before)
                sink.fell_behind(subscription)
            except Exception as error:
                self._on_fault(error)
        return delivered

    def _matches(
        self, entries: Sequence[LogEntry], now: int
    ) -> Iterable[tuple[Iterable[FeedSubscription], list[_Tail]]]:
        wanted: dict[CompiledFilter, tuple[Iterable[FeedSubscription], list[_Tail]]] = {}
        declined = self.declined if self.declined else None
        for entry in entries:
            expires_at = entry.packet.expires_at
            if expires_at is not None and now > expires_at:
                continue
            if declined is not None and covers(declined, entry.packet):
                continue
            tail: _Tail | None = None
            for group in self._index.candidates(entry):
                tail = tail or _Tail(entry, self._cursors, self.form)
                wanted.setdefault(group.filter, (group.members, []))[1].append(tail)
        return wanted.values()

    def _deliver(
        self, members: Iterable[FeedSubscription], tails: list[_Tail], behind: list[FeedSubscription]
    ) -> int:
        # Subscriptions with the same id and the same kind of tail receive the very same bytes.
        halves: dict[tuple[bool, bool], list[bytes]] = {}
        joined: dict[tuple[bytes, bool, bool], bytes] = {}
        sinks = self._sinks
        count, delivered = len(tails), 0
        frames = head = with_cursor = signed = None
        for subscription in members:
            try:
                # Most neighbours are alike: a comparison costs less than a look into `joined`.
                if (
                    frames is None
                    or subscription.head != head
                    or subscription.live_cursors is not with_cursor
                    or subscription.signed is not signed
                ):
                    head = subscription.head
                    with_cursor, signed = subscription.live_cursors, subscription.signed
                    frames = joined.get((head, with_cursor, signed))
                    if frames is None:
                        half = halves.get((with_cursor, signed))
                        if half is None:
                            half = [tail.encoded(with_cursor, signed) for tail in tails]
                            halves[with_cursor, signed] = half
                        frames = joined[head, with_cursor, signed] = event_frames(head, half)
                if sinks[subscription].deliver(frames, count):
                    delivered += count
                else:
                    behind.append(subscription)
            except Exception as error:  # nothing was delivered to this subscription
                frames = None
                self._on_fault(error)
                behind.append(subscription)
        return delivered

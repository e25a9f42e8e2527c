"""One subscription: from its first stored packet to the live feed, and back when its reader is slow.

    HISTORY ──► CATCHING_UP ◄──► LIVE          any ──► CLOSED

HISTORY reads the requested packets, up to the **snapshot**: the head of the log when the SUBSCRIBE was taken.
CATCHING_UP reads on from there, everything that matches, at the reader's pace. LIVE is fed by the fan-out.
One number carries the promise, `position`: every matching packet at or below it has been handed over, and
none above it has. A subscription goes live only while `position` equals the feed's own position, and both
steps happen without a wait between them. It leaves the feed with the position it had before the first batch
it did not get. So nothing is lost at a seam and nothing is sent twice (R-159, R-167, R-170; decisions A-045
and A-067). No live packet is ever buffered: the store is the buffer.

No I/O and no clock here: `next_read` says what to read, and `rows_read` takes the answer.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from strata.protocol.wire import EndOfHistory, encode

from relayd.cursor import CursorCodec
from relayd.feed.events import Form, event_frames, event_head, row_frames
from relayd.feed.filters import CompiledFilter
from relayd.lineage import Mark
from relayd.store.types import LogEntry, LogQuery, StoredPacket

__all__ = ["FeedPhase", "FeedSubscription", "Read", "SubscriptionRequest"]


class FeedPhase(enum.Enum):
    """The source of a subscription's packets."""

    HISTORY = "history"
    CATCHING_UP = "catching_up"
    LIVE = "live"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class SubscriptionRequest:
    """The request of a valid SUBSCRIBE.

    `limit` is None for a gapless stream. `cursor` is the position to continue after, in the direction of
    `ascending`.
    """

    subscription_id: str
    filter: CompiledFilter
    until: int | None = None
    limit: int | None = None
    ascending: bool = True
    cursor: int | None = None
    resumes_after: Mark | None = None
    """`cursor` as a place in a particular log; whether this log has the place is yet to be checked."""
    history_marker: bool = False
    client_msg_id: str | None = None
    signed: bool = False
    """Whether packets go out as they were signed, without this relay's findings: for peers (R-211)."""


@dataclass(frozen=True, slots=True)
class Read:
    """A page to read from the store."""

    query: LogQuery
    limit: int


class FeedSubscription:
    """The state of one open subscription."""

    __slots__ = (
        "_cursor",
        "_cursors",
        "_knows_newer",
        "_live_from",
        "_remaining",
        "_request",
        "_searched",
        "_snapshot",
        "filter",
        "head",
        "live_cursors",
        "phase",
        "position",
        "signed",
        "subscription_id",
    )

    def __init__(self, request: SubscriptionRequest, cursors: CursorCodec) -> None:
        self._request = request
        self._cursors = cursors
        self._cursor = request.cursor
        self._searched = request.cursor
        self._remaining = request.limit
        self._snapshot: int | None = None
        self._live_from: int | None = None
        # A descending walk leads away from the head of the log. If it goes on from a cursor, it reveals
        # nothing of the packets on the other side of the cursor.
        self._knows_newer = request.ascending or request.cursor is None
        self.subscription_id = request.subscription_id
        self.filter = request.filter
        self.head = event_head(request.subscription_id)
        self.signed = request.signed
        self.phase = FeedPhase.HISTORY
        self.position = 0
        # A cursor on a live EVENT would lead past history that is still outstanding.
        self.live_cursors = False

    @property
    def started(self) -> bool:
        """Whether `start` has been called."""
        return self._snapshot is not None

    @property
    def resumes_after(self) -> Mark | None:
        """The place of the cursor that the SUBSCRIBE came with."""
        return self._request.resumes_after

    @property
    def client_msg_id(self) -> str | None:
        """The id that names the SUBSCRIBE in its answer; None once its history is done and answered."""
        return self._request.client_msg_id if self.phase is FeedPhase.HISTORY else None

    def good_cursor(self, sequence: int) -> str:
        """A cursor at this place, for a reader whose own cursor comes from a log that was lost."""
        return self._cursors.encode(sequence, ascending=self._request.ascending)

    def start(self, snapshot: int) -> None:
        """Begin, with the current head of the log."""
        self._snapshot = snapshot
        self.position = snapshot if self._live_from is None else min(snapshot, self._live_from)

    def take_over(self, replaced: FeedSubscription) -> None:
        """Begin the live part where the replaced subscription left it, if nothing else would deliver it.

        A descending walk moves away from the head of the log, so a packet stored between its pages arrives
        live or not at all (R-154, A-099). An ascending walk meets it on a later page.
        """
        if not self._request.ascending and self._cursor is not None:
            left_at = replaced.position if replaced.started else replaced._live_from
            # What is older than the cursor comes as history, however new it is.
            self._live_from = None if left_at is None else max(left_at, self._cursor)
            self._knows_newer = replaced._knows_newer and self._goes_on_from(replaced, self._cursor)

    def _goes_on_from(self, replaced: FeedSubscription, cursor: int) -> bool:
        """Whether a walk back has passed all that this one asks for and that is newer than `cursor`."""
        mine, theirs = self._request, replaced._request
        if theirs.ascending or (mine.filter, mine.until) != (theirs.filter, theirs.until):
            return False
        reached = replaced._cursor
        # A walk back that gives live cursors has come to its end.
        return replaced.live_cursors or (reached is not None and reached <= cursor)

    def close(self) -> None:
        """End the subscription; nothing more is read or delivered."""
        self.phase = FeedPhase.CLOSED

    def leave_live(self, position: int) -> None:
        """The feed could not deliver beyond `position`: read on from the store."""
        self.position = position
        self.phase = FeedPhase.CATCHING_UP

    def next_read(self, head: int, page_rows: int) -> Read | None:
        """What to read now, or None if everything up to `head` has been delivered.

        `head` is the position of the live feed. None means that the subscription may go live, in the same
        step, and that its phase is LIVE from here on.
        """
        if self.phase is FeedPhase.HISTORY:
            return self._history_read(page_rows)
        if self.position < head:
            query = self.filter.query(after=self.position, up_to=head)
            return Read(query, page_rows)
        self.phase = FeedPhase.LIVE
        return None

    def _history_read(self, page_rows: int) -> Read:
        request = self._request
        assert self._snapshot is not None
        after, up_to = 0, self._snapshot
        if self._searched is not None:
            if request.ascending:
                after = self._searched
            else:
                up_to = min(up_to, self._searched - 1)
        query = request.filter.query(
            after=after, up_to=up_to, ascending=request.ascending, until=request.until
        )
        # One row more than may be sent shows whether the limit cut something off.
        return Read(query, page_rows if self._remaining is None else min(page_rows, self._remaining) + 1)

    def rows_read(
        self,
        read: Read,
        rows: Sequence[StoredPacket],
        exhausted: bool,
        form: Form,
        reached: int | None = None,
    ) -> tuple[bytes, int]:
        """Take a page; return the frames to send, joined, and the number of EVENTs in them.

        `exhausted` says that the store has no further row for this query, and `reached` how far the store has
        searched, if that is beyond the last row; `form` is the relay's.
        """
        if self.phase is FeedPhase.HISTORY:
            return self._history_rows(rows, exhausted, form, reached)
        if self.phase is not FeedPhase.CATCHING_UP:
            return b"", 0
        if rows:
            self.position = rows[-1].sequence
        if reached is not None:
            self.position = reached
        if exhausted and read.query.up_to is not None:
            self.position = read.query.up_to
        return self._frames(rows, form, with_cursor=self.live_cursors), len(rows)

    def entries_read(
        self, entries: Sequence[LogEntry], now: int, position: int, form: Form
    ) -> tuple[bytes, int]:
        """Take the log's entries after `self.position` up to `position` from memory, as `rows_read` does."""
        rows = [
            StoredPacket(entry.sequence, entry.told_at, entry.packet.body, entry.packet.annotation)
            for entry in entries
            if self.filter.matches(entry) and not _is_expired(entry, now)
        ]
        self.position = position
        return self._frames(rows, form, with_cursor=self.live_cursors), len(rows)

    def _history_rows(
        self, rows: Sequence[StoredPacket], exhausted: bool, form: Form, reached: int | None
    ) -> tuple[bytes, int]:
        cut = self._remaining is not None and len(rows) > self._remaining
        if self._remaining is not None:
            rows = rows[: self._remaining]
            self._remaining -= len(rows)
        if rows:
            self._cursor = self._searched = rows[-1].sequence
        if reached is not None:
            # A reader cannot resume from this place: the marker names the last packet that the reader has.
            self._searched = reached
        frames = self._frames(rows, form, with_cursor=True)
        if cut or exhausted:
            self.live_cursors = not cut and self._knows_newer
            self.phase = FeedPhase.CATCHING_UP
            if self._request.history_marker:
                frames += self._marker(complete=not cut)
        return frames, len(rows)

    def _marker(self, *, complete: bool) -> bytes:
        position, ascending = self._cursor, self._request.ascending
        if position is None and complete and ascending:
            position = self._snapshot  # nothing stored matched: the reader is at this place
        cursor = None if position is None else self._cursors.encode(position, ascending=ascending)
        message = EndOfHistory(
            subscription_id=self.subscription_id,
            complete=complete,
            cursor=cursor,
            client_msg_id=self._request.client_msg_id,
        )
        payload = encode(message)
        return event_frames(payload, (b"",))

    def _frames(self, rows: Sequence[StoredPacket], form: Form, *, with_cursor: bool) -> bytes:
        # Live packets move forward, and so do their cursors, whichever way the history ran.
        ascending = self._request.ascending or self.phase is not FeedPhase.HISTORY
        cursors = self._cursors if with_cursor else None
        return row_frames(
            self.head, rows, cursors, ascending=ascending, form="signed" if self.signed else form
        )


def _is_expired(entry: LogEntry, now: int) -> bool:
    return entry.packet.expires_at is not None and now > entry.packet.expires_at

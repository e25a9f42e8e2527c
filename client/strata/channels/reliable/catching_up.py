"""Catching up on messages missed while away: when to read, from where, and the progress (channel.md §8).

A store is read in the order in which it got its messages, starting at the stored mark, so that nearly every
message comes after those that it follows. The mark moves past a page once everything in it is taken. The
change of the mark is stored after the page's own changes, so after a crash the reading continues where it
stood: nothing is skipped, and repeated messages are recognised.

A page with a message that had no room holds the mark. The reading continues to its end, because later pages
may contain what other messages wait for, and then starts again at the mark.

Marks are in the time of the stores (`ahead_ms`): with marks by our own clock, if that is ahead, a later
reading would begin after what was missed.

A participant that joins a channel reads all of its history, or from a time on, or nothing (`join`, `since`):
see `Joining`.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import structs

from strata.channels.persistence.interface import Change
from strata.channels.persistence.records import QueryMark, put

__all__ = ["OVERLAP_MS", "CatchingUp", "Joining", "ReadRange", "SyncProgress"]

OVERLAP_MS = 600_000
"""The largest difference expected between the relays' clocks and ours."""
_MARK_EVERY_MS = 60_000
_RETRY_MS = 10_000
_MAX_RETRY_MS = 320_000
_ASLEEP_MS = 10_000
"""A jump ahead by more than this may mean that the machine slept."""
_MIN_SPAN_MS = 2_000
"""Over a shorter time than this, an estimate would be meaningless."""
_YOUNG_MS = 600_000


@dataclass(frozen=True, slots=True)
class SyncProgress:
    """The progress of reading missed messages."""

    read: int = 0
    """The number of messages read since the reading began."""
    about: int | None = None
    """The total number of messages, estimated from the time that they span; None while it is unknown."""

    def __str__(self) -> str:
        return f"syncing {_grouped(self.read)}" + (
            "" if self.about is None else f" of about {_grouped(self.about)}"
        )


def _grouped(number: int) -> str:
    return f"{number:,}".replace(",", " ")


@dataclass(frozen=True, slots=True)
class Joining:
    """Where a participant joins a channel; earlier messages are not wanted."""

    mode: Literal["history", "now"] = "history"
    since_ms: int = 0


class CatchingUp:
    """Controls the reading of one channel's history. Times are in wall-clock milliseconds."""

    def __init__(
        self,
        *,
        enabled: bool,
        threshold_ms: int,
        window_ms: int,
        mark: QueryMark | None = None,
        joining: Joining | None = None,
        now: int = 0,
    ) -> None:
        """`mark` is the record of an earlier run; without one the participant is new to the channel."""
        self._opened_at = now // 1000 * 1000  # authors give whole seconds
        joining = joining or Joining()
        self._enabled = enabled
        self._threshold = threshold_ms
        self._window = window_ms
        self._marked = mark
        mark = mark or QueryMark(0, 0)
        self._succeeded_at = mark.succeeded_at
        self._received_at = mark.received_at
        self._position = mark.position
        self._position_at = 0
        self._joins_now = self._marked is None and joining.mode == "now"
        self.from_ms = mark.joined_from or (joining.since_ms if self._marked is None else 0)
        """Messages that were sent before this are not wanted; 0: all are."""
        self._asked = False
        self.ahead_ms = 0
        """How far our clock is ahead of the stores' clocks, as far as they report time; never below 0."""
        self._whole = False
        """Whether everything has been read that the store had at the last query."""
        self._missed = False
        self.clock_jumped = False
        """Whether the clock has been set, or the machine has slept, since the last complete reading."""
        self._wanted = False
        self._held = False
        self._fruitless = 0
        self._retry_at = 0
        self._read = self._read_first = 0
        self._first_sent = self._last_sent = 0
        self._kept: QueryMark | None = None
        """The mark that stays stored while messages cannot be decrypted; a reading from there brings them."""
        self._changes: list[Change] = []

    # When to read.

    def is_due(self, now: int) -> bool:
        """Whether a store that has become available should be queried (C-169, C-170, C-174)."""
        if not self._enabled:
            return False
        if self._missed:
            return now >= self._retry_at
        age = now - self.ahead_ms - self._succeeded_at
        return self._wanted or not self._asked or age > self._threshold or age < -OVERLAP_MS

    @property
    def retry_at(self) -> float:
        """When to repeat a reading that skipped messages."""
        return self._retry_at if self._enabled and self._missed else float("inf")

    @property
    def has_missed(self) -> bool:
        """Whether a message was skipped for lack of room."""
        return self._missed

    @property
    def has_whole(self) -> bool:
        """Whether everything that the store had has been read and had room."""
        return self._whole

    def offline(self) -> None:
        """No store can be reached; once one can, query it, however soon (C-170)."""
        self._wanted = True

    def broken_off(self) -> None:
        """The reading was interrupted and must be started again."""
        self._wanted = True

    def clock_stepped(self, by_ms: int) -> None:
        """The clock has jumped; after a jump ahead the machine may have slept, so the store is queried."""
        self._retry_at = 0
        self.ahead_ms = max(0, self.ahead_ms + by_ms)
        if by_ms > _ASLEEP_MS or by_ms < -OVERLAP_MS:
            self._missed = self.clock_jumped = True
            self._whole = False

    def missed(self, *, stored: bool = False) -> None:
        """A message was skipped for lack of room; `stored`: it was being read, and so holds the mark."""
        self._missed = True
        self._whole = False
        self._held |= stored

    def hold(self) -> None:
        """A message cannot be decrypted; the stored mark stays before it, whatever else is read."""
        if self._kept is None:
            self._kept = self._mark_now()

    def let_go(self) -> None:
        """The messages that could not be decrypted do not belong to this channel."""
        self._kept = None

    def read_again(self) -> None:
        """The messages that could not be decrypted can be now; read again from before them."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self._succeeded_at, self._received_at = kept.succeeded_at, kept.received_at
            self._position, self._position_at = kept.position, 0
            self._retry_at = 0
            self.missed(stored=True)  # a reading under way moves no mark

    def made_room(self) -> None:
        """Waiting messages have been released; read what was skipped now."""
        self._fruitless = self._retry_at = 0

    # Where to begin.

    @property
    def begins_ms(self) -> int:
        """Messages that a store had before this are not wanted, even while that is not settled yet."""
        return self._opened_at - self.ahead_ms if self._joins_now else self.from_ms

    @property
    def joins_now(self) -> bool:
        """Whether this participant is new and wants no earlier messages."""
        return self._joins_now

    def is_young(self, now: int) -> bool:
        """Whether others may still name messages from before this participant joined."""
        return self.from_ms > 0 and now - self.ahead_ms - self.from_ms < _YOUNG_MS

    @property
    def position(self) -> str | None:
        """Where to continue reading the store; None if it has no cursors, or was never read."""
        return self._position

    def begin(self, now: int) -> int:
        """Begin a reading; returns where its window begins (C-173), for stores not read before."""
        if self._whole and self._received_at - OVERLAP_MS > self._position_at:
            self._position = None  # everything since then was heard, so the time is more exact
        self._asked = False  # if this reading is interrupted, it is due again
        self._missed = self._wanted = self._held = self._whole = False
        self._read = self._read_first = self._first_sent = self._last_sent = 0
        return self.since(now)

    def since(self, now: int) -> int:
        """Where the window of a reading at this time begins."""
        now -= self.ahead_ms
        known = max(self._succeeded_at, self._received_at)
        if known - now > OVERLAP_MS:
            known = 0  # a mark made by a wrong clock: what was read is unknown
        return max(max(min(now, known), self.from_ms) - OVERLAP_MS, now - self._window)

    def oldest(self, now: int) -> int:
        """The earliest time worth reading back to for a gap."""
        return max(now - self.ahead_ms - self._window, self.from_ms)

    # Progress.

    def page_taken(self, count: int, last_sent: int, position: str | None, now: int) -> None:
        """All messages of a page were taken or skipped (`missed`). `last_sent` is 0 if unknown."""
        self._read += count
        if not self._first_sent:
            self._first_sent, self._read_first = last_sent, self._read
        self._last_sent = max(self._last_sent, last_sent)
        if not self._held and position is not None:
            self._position, self._position_at = position, now - self.ahead_ms
            self._mark()

    def succeeded(self, began_at: int, now: int, *, progress: bool = True) -> None:
        """The reading has ended; `progress`: it brought something new.

        The clock may have been set in between; `began_at` is what the clock showed at the start.
        """
        self._asked = True
        if self._missed:
            self._fruitless = 0 if progress else self._fruitless + 1
            wait = min(_RETRY_MS << min(self._fruitless - 1, 8), _MAX_RETRY_MS) if self._fruitless else 0
            self._retry_at = now + wait
            return
        self._whole = True
        self.clock_jumped = False
        self._fruitless = 0
        self._succeeded_at = began_at - self.ahead_ms
        self._mark()

    def joined(self) -> int:
        """A new participant that wants no history begins when the channel was opened; returns that time."""
        self._joins_now = False
        self.from_ms = (self._opened_at - self.ahead_ms) // 1000 * 1000
        return self.from_ms

    def progress(self, now: int) -> SyncProgress:
        """How many messages have been read, and about how many there are."""
        span, whole = self._last_sent - self._first_sent, now - self.ahead_ms - self._first_sent
        if not self._first_sent or span < _MIN_SPAN_MS:
            return SyncProgress(self._read)
        after_first = (self._read - self._read_first) * whole / span
        return SyncProgress(self._read, max(self._read, _rounded(self._read_first + after_first)))

    def received(self, now: int) -> None:
        """A message arrived."""
        if self._enabled and (self._wanted or not self._whole):
            return  # earlier messages may still be unread
        self._received_at = now = now - self.ahead_ms
        if self._marked is None or abs(now - self._marked.received_at) >= _MARK_EVERY_MS:
            self._mark()

    def stopped(self) -> None:
        """The channel stops; store the mark."""
        self._asked = self._whole = False
        if self._received_at:
            self._mark()

    def changes_to_store(self) -> list[Change]:
        """The changes to store since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _mark(self) -> None:
        mark = self._mark_now()
        if self._kept is not None:
            mark = structs.replace(self._kept, joined_from=self.from_ms)
        if mark != self._marked:
            self._marked = mark
            self._changes = [put(mark)]

    def _mark_now(self) -> QueryMark:
        position = self._position
        if self._received_at - OVERLAP_MS > self._position_at > 0:
            # Everything was heard for longer than clocks differ, so the time is more exact.
            position = None
        return QueryMark(self._succeeded_at, self._received_at, position, self.from_ms)


def _rounded(number: float) -> int:
    """Round to two digits, so that an estimate looks like one."""
    digits = max(0, len(str(int(number))) - 2)
    return int(round(number, -digits))


class ReadRange:
    """The stretch of time that has been read completely, for a store without cursors.

    Reading it again does not find messages that nobody ever sent, however many such ids are named.
    """

    def __init__(self) -> None:
        self._low = self._high = 0

    def covered(self, since: int, until: int) -> None:
        """Everything between these times has been read."""
        if self._high < since or not self._high:
            self._low = since
        self._low, self._high = min(self._low, since), max(self._high, until)

    def unread(self, oldest: int, now: int) -> list[tuple[int, int | None]]:
        """The parts left to read since `oldest`, the newest first: where each begins and ends."""
        if not self._high:
            return [(oldest, None)]
        newest: list[tuple[int, int | None]] = [(max(oldest, min(self._high, now) - OVERLAP_MS), None)]
        return newest + ([(oldest, self._low)] if oldest < self._low else [])

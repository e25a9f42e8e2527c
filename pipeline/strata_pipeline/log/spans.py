"""The parts of the log to read, and their division among tasks. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strata.protocol.sequences import Span, day_of, first_of_day

__all__ = ["DEFAULT_BATCH_ROWS", "LogState", "advance", "next_batch", "share_out"]

DEFAULT_BATCH_ROWS = 250_000
"""The most packets in a batch, unless the caller says otherwise."""


@dataclass(frozen=True, slots=True)
class LogState:
    """The extent of the log in a single snapshot of the database."""

    head: int
    """The last sequence of the last commit: no new row can appear at or below it."""
    removed_to: int
    """The border below which retention has removed the days, except for the rows that it spares."""
    day_ends: Mapping[int, int]
    """The last sequence of each day that has rows."""

    def spans(self, after: int, up_to: int | None = None) -> list[Span]:
        """The log after `after` as one span for each day, in order; up to the head if `up_to` is None."""
        last = self.head if up_to is None else min(up_to, self.head)
        spans = []
        for day, end in sorted(self.day_ends.items()):
            low, high = max(after, first_of_day(day)), min(end, last)
            if low < high:
                spans.append(Span(low, high))
        return spans

    def is_whole(self, span: Span) -> bool:
        """Whether every sequence of a span must exist, because the span lies above the removed days."""
        return span.after >= self.removed_to and span.up_to <= self.head

    def rows_expected(self, span: Span) -> int | None:
        """The number of rows that a span of one day must have; None on a removed day."""
        return span.ordinals if self.is_whole(Span(first_of_day(span.day), span.up_to)) else None


def next_batch(state: LogState, after: int, max_rows: int) -> Span | None:
    """The next span to archive after `after`: within one day, at most `max_rows` rows; None at the head.

    It begins where the last one ended, even if a day lies in between, so that spans follow each other without
    a gap. On a day that retention has removed, it covers everything that is left, even if that is more: the
    sequences there do not show how far `max_rows` rows reach, or whether a part of the day has rows at all.
    """
    for span in state.spans(after):
        low = max(span.after, first_of_day(span.day))
        high = min(span.up_to, low + max_rows)
        return Span(after, span.up_to if state.rows_expected(Span(after, high)) is None else high)
    return None


def advance(state: LogState, after: int, max_rows: int | None) -> int:
    """The sequence of the last of the `max_rows` rows after `after`, across as many days as needed."""
    left, reached = max_rows, after
    for span in state.spans(after):
        if left is None:
            reached = span.up_to
            continue
        if left <= 0:
            break
        reached = min(span.up_to, span.after + left)
        left -= reached - span.after
    return reached


def share_out(spans: list[Span], partitions: int) -> list[Span]:
    """Divide spans into about `partitions` spans of equal length, none of which crosses a day."""
    total = sum(span.up_to - span.after for span in spans)
    if not total:
        return []
    size = max(1, -(-total // max(1, partitions)))
    shares = []
    for span in spans:
        pieces = max(1, round((span.up_to - span.after) / size))
        length = -(-(span.up_to - span.after) // pieces)
        shares += [Span(low, min(low + length, span.up_to)) for low in range(span.after, span.up_to, length)]
    return shares


def day_borders(span: Span) -> list[Span]:
    """A span cut at midnight."""
    parts = []
    low = span.after
    for day in range(day_of(span.after), day_of(span.up_to) + 1):
        high = min(span.up_to, first_of_day(day + 1) - 1)
        if low < high:
            parts.append(Span(low, high))
            low = high
    return parts

"""The parts of the log to read, and their division among tasks. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strata.protocol.lake import Span, day_of, first_of_day

__all__ = ["DEFAULT_BATCH_ROWS", "LogState", "advance", "next_batch", "share_out"]

DEFAULT_BATCH_ROWS = 250_000
"""The most packets in a batch, unless the caller says otherwise."""


@dataclass(frozen=True, slots=True)
class LogState:
    """The extent of the log in one snapshot of the database."""

    head: int
    """The last sequence of the last commit: no row can still appear at or below it."""
    removed_to: int
    """Retention has removed the days below this border, except for the rows it spares."""
    day_ends: Mapping[int, int]
    """The last sequence of each day that has rows."""

    def spans(self, after: int, up_to: int | None = None) -> list[Span]:
        """The log after `after` as a span for each day, in order; up to the head if `up_to` is None."""
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
        """The number of rows in a span of one day; None among the removed days."""
        return span.ordinals if self.is_whole(Span(first_of_day(span.day), span.up_to)) else None


def next_batch(state: LogState, after: int, max_rows: int) -> Span | None:
    """The next span to archive after `after`: within one day, at most `max_rows`; None at the head.

    It begins where the last one ended, even if a day lies between, so that spans follow each other without a
    gap. Of a day that retention has removed it is all that is left: how far so many rows go there, and
    whether there is a row at all in a part of it, its sequences do not tell.
    """
    for span in state.spans(after):
        low = max(span.after, first_of_day(span.day))
        high = min(span.up_to, low + max_rows)
        return Span(after, span.up_to if state.rows_expected(Span(after, high)) is None else high)
    return None


def advance(state: LogState, after: int, max_rows: int | None) -> int:
    """The last sequence of the `max_rows` rows after `after`, over as many days as they take."""
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
    """Cut spans into about `partitions` of equal length, none across a day."""
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

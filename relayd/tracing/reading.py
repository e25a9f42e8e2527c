"""The trace of a subscription that reads from the store, until it is live.

    subscribe, or catch_up if a slow reader has left the live feed
      └─ subscribe.page    one read of the store, repeated as needed

Only sequences connect this trace to those of the packets: a page holds hundreds of packets, and its rows are
sent as they are in the store.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from relayd.faults import FaultLog
from relayd.feed.subscription import FeedSubscription
from relayd.store.types import LogPage
from relayd.tracing.publishes import new_span_id
from relayd.tracing.spans import Spans, TraceSpan

__all__ = ["ReadTraces"]


@dataclass(slots=True)
class _Open:
    name: str
    trace_id: int
    span_id: int
    began_at: float
    pages: int = 0
    events: int = 0


class ReadTraces:
    """Follows `ratio` of the subscriptions that are not live. None of its methods raises."""

    def __init__(
        self,
        spans: Spans,
        ratio: float,
        faults: FaultLog,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._spans = spans
        self._ratio = ratio
        self._faults = faults
        self._clock = clock
        self._draw = draw
        self._open: dict[FeedSubscription, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def began(self, subscription: FeedSubscription) -> None:
        """The subscription has begun to read from the store."""
        if self._draw() < self._ratio:
            name = "catch_up" if subscription.started else "subscribe"
            trace_id = random.getrandbits(128) or 1
            self._open[subscription] = _Open(name, trace_id, new_span_id(), self._clock())

    def read(self, subscription: FeedSubscription, page: LogPage, began_at: float, sent_bytes: int) -> None:
        """A page for the subscription was read and queued; the read began at `began_at`."""
        opened = self._open.get(subscription)
        if opened is None:
            return
        opened.pages += 1
        opened.events += len(page.rows)
        about: dict[str, str | int] = {"relayd.rows": len(page.rows), "relayd.bytes": sent_bytes}
        if page.rows:
            sequences = page.rows[0].sequence, page.rows[-1].sequence
            about["relayd.sequence.first"], about["relayd.sequence.last"] = min(sequences), max(sequences)
        self._emit(
            TraceSpan(
                "subscribe.page",
                opened.trace_id,
                new_span_id(),
                opened.span_id,
                began_at,
                self._clock(),
                about,
                kind="client",
            )
        )

    def ended(self, subscription: FeedSubscription, outcome: Literal["live", "ended"]) -> None:
        """The subscription no longer reads from the store."""
        opened = self._open.pop(subscription, None)
        if opened is not None:
            about: dict[str, str | int] = {
                "relayd.outcome": outcome,
                "relayd.pages": opened.pages,
                "relayd.events": opened.events,
            }
            span_id, began = opened.span_id, opened.began_at
            kind: Literal["server", "internal"] = "server" if opened.name == "subscribe" else "internal"
            now = self._clock()
            self._emit(TraceSpan(opened.name, opened.trace_id, span_id, None, began, now, about, kind=kind))

    def _emit(self, span: TraceSpan) -> None:
        try:
            self._spans.emit(span)
        except Exception as error:
            self._faults.caught("tracing", error)

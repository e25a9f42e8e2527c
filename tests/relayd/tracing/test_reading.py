"""The trace of a subscription, from its SUBSCRIBE to its place in the live feed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from relayd.faults import FaultLog
from relayd.store.types import LogPage, StoredPacket
from relayd.tracing.reading import ReadTraces
from relayd.tracing.spans import TraceSpan


class Reader:
    def __init__(self, *, started: bool) -> None:
        self.started = started


@pytest.fixture
def spans() -> list[TraceSpan]:
    return []


def make(spans: list[TraceSpan], drawn: float = 0.0) -> ReadTraces:
    target = cast(Any, SimpleNamespace(emit=spans.append))
    return ReadTraces(target, 0.5, FaultLog(), clock=lambda: 20.0, draw=lambda: drawn)


@pytest.mark.parametrize(
    ("started", "name", "kind"), [(False, "subscribe", "server"), (True, "catch_up", "internal")]
)
def test_pages_hang_below_what_they_are_read_for(spans, started, name, kind):
    traces, reader = make(spans), cast(Any, Reader(started=started))
    traces.began(reader)
    rows = [StoredPacket(9, 0, b"{}", None), StoredPacket(4, 0, b"{}", None)]
    traces.read(reader, LogPage(rows, False), 15.0, 300)
    traces.read(reader, LogPage([], True), 16.0, 0)
    traces.ended(reader, "live")
    traces.ended(reader, "ended")  # nothing is reported twice
    first, last, root = spans
    assert (root.name, root.kind, root.parent_id) == (name, kind, None)
    assert root.attributes == {"relayd.outcome": "live", "relayd.pages": 2, "relayd.events": 2}
    assert {first.parent_id, last.parent_id} == {root.span_id}
    assert first.attributes["relayd.sequence.first"] == 4 and first.attributes["relayd.sequence.last"] == 9
    assert last.attributes == {"relayd.rows": 0, "relayd.bytes": 0}
    assert (first.began_at, first.ended_at) == (15.0, 20.0) and not len(traces)


def test_who_is_not_drawn_is_not_followed(spans):
    traces, reader = make(spans, 0.5), cast(Any, Reader(started=False))
    traces.began(reader)
    traces.read(reader, LogPage([], True), 15.0, 0)
    traces.ended(reader, "ended")
    assert not spans and not len(traces)

"""The reports of each process about a packet that is in the log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from relayd.faults import FaultLog
from relayd.store.types import LogEntry, NewPacket
from relayd.tracing.feed import FeedTraces, TracedLog
from relayd.tracing.spans import Sample, TraceSpan


def entries(*numbers: int) -> list[LogEntry]:
    return [
        LogEntry(number, 0, NewPacket(bytes([number]) * 32, "did:strata:a", "TEXT", 0, None, b"{}"))
        for number in numbers
    ]


@pytest.fixture
def spans() -> list[TraceSpan]:
    return []


@pytest.fixture
def feed(spans: list[TraceSpan]) -> FeedTraces:
    traces = FeedTraces(cast(Any, SimpleNamespace(emit=spans.append)), Sample(1, b"key"), FaultLog())
    cursors: Any = None
    traces.fanout(cursors, 0, form="rewrite", on_fault=print)
    return traces


def test_the_fan_out_of_a_piece_hangs_below_the_append_of_each_packet(feed, spans):
    done: list[Any] = []
    passed, dispatched = feed.passing(done.append), feed.dispatching(done.append)
    some = entries(1, 2)
    feed._fanout.dispatch(some, 0)
    passed(some)
    dispatched(9)
    dispatched(0)  # another piece, without traced packets
    sample = Sample(1, b"key")
    assert done == [some, 9, 0]
    for span, entry in zip(spans, some, strict=True):
        trace = sample.trace(entry.packet.packet_id)
        assert trace is not None
        assert (span.name, span.trace_id, span.parent_id) == ("feed.fanout", *trace)
        about = {"relayd.batch.packets": 2, "relayd.batch.events": 9, "relayd.sequence": entry.sequence}
        assert span.attributes == about
        assert 0 < span.began_at <= span.ended_at


async def test_a_process_that_reads_what_others_stored_says_so(feed, spans):
    class Log:
        async def head(self) -> int:
            return 3

        async def tail(self, after: int, up_to: int | None, limit: int) -> list[LogEntry]:
            return entries(*range(after + 1, 4))[:limit]

    log = TracedLog(Log(), feed.read)
    assert await log.head() == 3
    assert await log.tail(1, None, 10) == entries(2, 3)
    assert [(span.name, span.attributes["relayd.sequence"]) for span in spans] == [
        ("feed.read", 2),
        ("feed.read", 3),
    ]

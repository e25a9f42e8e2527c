"""The export to a real collector: complete when it works, and harmless when it does not."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import structlog

from relayd.tracing.otel import OtlpCollector
from relayd.tracing.spans import TraceSpan
from tests.support.otlp import OtlpReceiver, receiver
from tests.support.waiting import wait_until


@pytest.fixture
def counted() -> Counter[str]:
    return Counter()


def collector(to: OtlpReceiver, counted: Counter[str]) -> OtlpCollector:
    return OtlpCollector(to.url, instance="one", count=lambda what, n: counted.update({what: n}))


def span(number: int = 1, *, parent_id: int | None = None, problem: str | None = None) -> TraceSpan:
    now = time.monotonic()
    return TraceSpan(
        "publish", 2**100 + number, number, parent_id, now - 0.5, now, {"a": 1, "b": "x"}, problem
    )


def test_a_span_arrives_as_it_was_told(counted, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with receiver() as received:
        target = collector(received, counted)
        target.emit(span(7, parent_id=6, problem="invalid_signature"))
        target.emit(span(8))
        target.close()
        first, second = sorted(received.spans, key=lambda each: each.span_id)
    assert (first.name, first.trace_id, first.span_id, first.parent_id) == (
        "publish",
        f"{2**100 + 7:032x}",
        f"{7:016x}",
        f"{6:016x}",
    )
    assert first.attributes == {"a": 1, "b": "x"} and first.has_failed
    assert (second.parent_id, second.has_failed) == ("", False)
    assert (first.service, first.instance) == ("relayd", "one")
    assert abs(first.ended_at - first.began_at - 500_000_000) < 10_000
    assert counted == {"made": 2, "sent": 2}


def test_a_collector_that_refuses_costs_spans_and_two_lines(counted):
    with receiver() as received, structlog.testing.capture_logs() as lines:
        received.status = 400
        target = collector(received, counted)
        for number in range(1, 4):
            target.emit(span(number))
            wait_until(lambda: counted["lost"] == number, "it is lost")  # noqa: B023 - asked in this turn
        received.status = 200
        target.emit(span(9))
        wait_until(lambda: counted["sent"] == 1, "the next one arrives")
        target.close()
    assert [line["event"] for line in lines] == ["traces_lost", "traces_back"]
    assert [each.span_id for each in received.spans] == [f"{9:016x}"]


def test_a_collector_that_hangs_holds_so_much_and_nobody_up(counted):
    with receiver() as received:
        received.gate.clear()
        target = collector(received, counted)
        target.emit(span())
        wait_until(lambda: received.requests, "the collector holds a request")
        for number in range(1, 20_000):
            target.emit(span(number))
        assert (counted["made"], counted["sent"]) == (20_000, 0)
        closing = threading.Thread(target=target.close)
        closing.start()
        closing.join(30)
        assert not closing.is_alive(), "it waits for its collector"

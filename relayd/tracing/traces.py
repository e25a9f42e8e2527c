"""All traces of a relay, and how they are opened."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from relayd.admission.request import PublishRequest
from relayd.config import Settings
from relayd.faults import FaultLog
from relayd.feed.tail import LogReader
from relayd.store.types import Appended, LogEntry, NewPacket
from relayd.tracing.feed import FeedTraces, TracedLog
from relayd.tracing.publishes import Batch, PublishTraces
from relayd.tracing.reading import ReadTraces
from relayd.tracing.spans import Sample, Spans

__all__ = ["Seams", "Traces", "TracesTarget", "open_target"]


class TracesTarget(Spans, Protocol):
    """Takes spans until it is closed."""

    def close(self) -> None:
        """Send the waiting spans, for a limited time. Blocks."""


def open_target(settings: Settings, relay_id: str, count: Callable[[str, int], None]) -> TracesTarget | None:
    """The collector named by these settings; None if they name none."""
    if settings.tracing_url is None:
        return None
    otel = importlib.import_module("relayd.tracing.otel")  # slow, so not while connections are open
    instance = f"{relay_id}/{os.uname().nodename}/{os.getpid()}"
    target: TracesTarget = otel.OtlpCollector(settings.tracing_url, instance=instance, count=count)
    return target


@dataclass(frozen=True, slots=True)
class Seams:
    """The interfaces between the parts of a relay, where traces can observe."""

    log: LogReader
    passed: Callable[[Sequence[LogEntry]], None]
    dispatched: Callable[[int], None]
    enqueue: Callable[[NewPacket, PublishRequest], None]
    committed: Callable[[Appended, Batch, float], None]


class Traces:
    """The traces of one process. `log_key` is a secret shared by all processes of its log."""

    def __init__(self, target: TracesTarget, settings: Settings, log_key: bytes, faults: FaultLog) -> None:
        sample = Sample(settings.tracing_ratio, log_key)
        self.publishes = PublishTraces(target, sample, faults)
        self.feed = FeedTraces(target, sample, faults)
        self.reading = ReadTraces(target, settings.tracing_ratio, faults)

    def around(self, seams: Seams) -> Seams:
        """The same seams, traced."""
        return Seams(
            TracedLog(seams.log, self.feed.read),
            self.feed.passing(seams.passed),
            self.feed.dispatching(seams.dispatched),
            self.publishes.queueing(seams.enqueue),
            self.publishes.committing(seams.committed),
        )

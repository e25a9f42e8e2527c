"""Traces of what each process does with a packet that is in the log, below the span of its append.

    publish.append ─┬─ feed.read     a process that did not store it reads it from the log
                    └─ feed.fanout   it is matched, framed and written to the live subscribers of a process

Every process of a log emits its own spans; it computes whether a packet is traced, and under which span.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from relayd.cursor import CursorCodec
from relayd.faults import FaultLog
from relayd.feed.events import Form
from relayd.feed.fanout import Fanout
from relayd.feed.tail import LogReader
from relayd.store.types import LogEntry
from relayd.tracing.publishes import new_span_id
from relayd.tracing.spans import PacketTrace, Sample, Spans, TraceSpan

__all__ = ["FeedTraces", "TracedLog"]

_PACKETS: Final = "relayd.batch.packets"


class _TimedFanout(Fanout):
    """A fan-out that remembers when it began with the latest batch of the log."""

    began_at = 0.0

    def dispatch(self, entries: Sequence[LogEntry], now: int) -> int:
        self.began_at = time.monotonic()
        return super().dispatch(entries, now)


class FeedTraces:
    """Follows traced packets through the feed of a process. None of its methods raises."""

    def __init__(self, spans: Spans, sample: Sample, faults: FaultLog) -> None:
        self._spans = spans
        self._sample = sample
        self._faults = faults
        self._passed: list[tuple[PacketTrace, int]] = []
        self._packets = 0
        self._fanout: _TimedFanout

    def fanout(
        self, cursors: CursorCodec, position: int, *, form: Form, on_fault: Callable[[Exception], None]
    ) -> Fanout:
        """The fan-out of this process."""
        self._fanout = _TimedFanout(cursors, position, form=form, on_fault=on_fault)
        return self._fanout

    def passing(self, passed: Callable[[Sequence[LogEntry]], None]) -> Callable[[Sequence[LogEntry]], None]:
        """The callback for entries that have just gone through the feed; that of `dispatching` follows."""

        def traced(entries: Sequence[LogEntry]) -> None:
            self._note(entries)
            passed(entries)

        return traced

    def dispatching(self, dispatched: Callable[[int], None]) -> Callable[[int], None]:
        """The callback that writes the EVENTs of these entries; its argument is their number."""

        def traced(delivered: int) -> None:
            dispatched(delivered)
            passed, self._passed = self._passed, []
            if passed:
                about = {_PACKETS: self._packets, "relayd.batch.events": delivered}
                self._tell("feed.fanout", passed, self._fanout.began_at, about)

        return traced

    def _note(self, entries: Sequence[LogEntry]) -> None:
        try:
            self._packets = len(entries)
            self._passed = self._traced(entries)
        except Exception as error:
            self._faults.caught("tracing", error)

    def read(self, entries: Sequence[LogEntry], began_at: float) -> None:
        """Trace entries that were read from the log because other processes stored them."""
        try:
            found = self._traced(entries)
        except Exception as error:
            self._faults.caught("tracing", error)
            return
        self._tell("feed.read", found, began_at, {_PACKETS: len(entries)})

    def _traced(self, entries: Sequence[LogEntry]) -> list[tuple[PacketTrace, int]]:
        return [
            (trace, entry.sequence)
            for entry in entries
            if (trace := self._sample.trace(entry.packet.packet_id)) is not None
        ]

    def _tell(
        self,
        name: str,
        traced: Sequence[tuple[PacketTrace, int]],
        began_at: float,
        about: dict[str, int],
    ) -> None:
        ended_at = time.monotonic()
        try:
            for trace, sequence in traced:
                self._spans.emit(
                    TraceSpan(
                        name,
                        trace.trace_id,
                        new_span_id(),
                        trace.append_id,
                        began_at,
                        ended_at,
                        {**about, "relayd.sequence": sequence},
                    )
                )
        except Exception as error:
            self._faults.caught("tracing", error)


class TracedLog:
    """The log as the feed reads it, with each read timed."""

    def __init__(self, log: LogReader, read: Callable[[Sequence[LogEntry], float], None]) -> None:
        self._log = log
        self._read = read

    async def head(self) -> int:
        return await self._log.head()

    async def tail(self, after: int, up_to: int | None, limit: int) -> list[LogEntry]:
        began_at = time.monotonic()
        entries = await self._log.tail(after, up_to, limit)
        self._read(entries, began_at)
        return entries

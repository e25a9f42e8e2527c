"""The trace of a publish, from its frame to the moment its OK is written.

    publish ─┬─ publish.check    from the frame to the writer's queue
             ├─ publish.queue    until its batch is sent to PostgreSQL
             └─ publish.append   the commit; each process's delivery of the packet is below it (`feed`)

A publish that is refused has only its `publish.check`. Nothing is kept for a publish that is not traced.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata.protocol.errors import InvalidPacket

from relayd.admission.request import PublishRequest
from relayd.faults import FaultLog
from relayd.store.types import Appended, AppendOutcome, Disposition, NewPacket
from relayd.tracing.spans import PacketTrace, Sample, Spans, TraceSpan

__all__ = ["Batch", "PublishTraces", "new_span_id"]

Batch = Sequence[tuple[NewPacket, PublishRequest]]

_OUTCOMES = {AppendOutcome.STORED: "accepted", AppendOutcome.DUPLICATE: "duplicate"}
_LONGEST_TEXT = 128


def _shown(text: str) -> str:
    """A text chosen by an author in a form that collectors accept: short, and without lone surrogates."""
    return text[:_LONGEST_TEXT].encode("utf-8", "replace").decode()


def new_span_id() -> int:
    """An id for a span that no other process needs to know."""
    return random.getrandbits(64) or 1


@dataclass(slots=True)
class _Open:
    trace: PacketTrace
    span_id: int
    queued_at: float


class PublishTraces:
    """Follows the traced publishes of a process. None of its methods raises."""

    def __init__(
        self,
        spans: Spans,
        sample: Sample,
        faults: FaultLog,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spans = spans
        self._sample = sample
        self._faults = faults
        self._clock = clock
        self._open: dict[PublishRequest, _Open] = {}
        """The traced publishes between admission and the end of their commit."""

    def __len__(self) -> int:
        return len(self._open)

    def queueing(
        self, enqueue: Callable[[NewPacket, PublishRequest], None]
    ) -> Callable[[NewPacket, PublishRequest], None]:
        """The writer's `enqueue`, with timing."""

        def traced(packet: NewPacket, request: PublishRequest) -> None:
            enqueue(packet, request)  # if it raises, the request is answered, and `refused` is called
            try:
                trace = self._sample.trace(packet.packet_id)
                if trace is not None:
                    self._open[request] = _Open(trace, new_span_id(), self._clock())
            except Exception as error:
                self._faults.caught("tracing", error)

        return traced

    def committing(
        self, committed: Callable[[Appended, Batch, float], None]
    ) -> Callable[[Appended, Batch, float], None]:
        """The callback of a commit, timed."""

        def traced(appended: Appended, batch: Batch, seconds: float) -> None:
            began = self._clock()
            opened = [(place, self._open.pop(batch[place][1], None)) for place in range(len(batch))]
            committed(appended, batch, seconds)
            ended = self._clock()
            try:
                for place, each in opened:
                    if each is not None:
                        about = batch[place][1], appended.dispositions[place], len(batch)
                        self._tell(each, *about, began - seconds, began, ended)
            except Exception as error:
                self._faults.caught("tracing", error)

        return traced

    def refused(self, request: PublishRequest, error: InvalidPacket) -> None:
        """The packet of this request was refused, or could not be stored."""
        try:
            opened = self._open.pop(request, None)
            if opened is not None:
                trace, span_id, checked_at = opened.trace, opened.span_id, opened.queued_at
            elif request.is_parsed and (found := self._sample.trace(request.packet.digest)) is not None:
                trace, span_id, checked_at = found, new_span_id(), self._clock()
            else:
                return
            problem = str(error.code)
            self._emit(trace, "publish.check", span_id, request.started_at, checked_at, problem=problem)
            self._root(trace, span_id, request, self._clock(), problem, problem)
        except Exception as fault:
            self._faults.caught("tracing", fault)

    def _tell(
        self,
        opened: _Open,
        request: PublishRequest,
        place: Disposition,
        packets: int,
        began: float,
        committed: float,
        ended: float,
    ) -> None:
        trace, span_id, queued_at = opened.trace, opened.span_id, opened.queued_at
        outcome = _OUTCOMES.get(place.outcome)
        began = max(began, queued_at)
        self._emit(trace, "publish.check", span_id, request.started_at, queued_at)
        self._emit(trace, "publish.queue", span_id, queued_at, began)
        about: dict[str, str | int] = {"relayd.batch.packets": packets}
        if place.outcome is AppendOutcome.STORED:
            about["relayd.sequence"] = place.sequence
        self._spans.emit(
            TraceSpan(
                "publish.append",
                trace.trace_id,
                # Only the span of the append that stored the packet has the id that other processes know.
                trace.append_id if place.outcome is AppendOutcome.STORED else new_span_id(),
                span_id,
                began,
                committed,
                about,
                kind="client",
            )
        )
        self._root(trace, span_id, request, ended, outcome or "not_stored", None if outcome else "not_stored")

    def _root(
        self,
        trace: PacketTrace,
        span_id: int,
        request: PublishRequest,
        ended: float,
        outcome: str,
        problem: str | None,
    ) -> None:
        packet = request.packet
        about: dict[str, str | int] = {
            "strata.packet_id": packet.packet_id,
            "strata.content_type": _shown(packet.content_type),
            "relayd.outcome": outcome,
            "relayd.bytes": len(request.raw),
        }
        if request.origin is not None:
            about["relayd.from"] = "peer"
        self._spans.emit(
            TraceSpan(
                "publish",
                trace.trace_id,
                span_id,
                None,
                request.started_at,
                ended,
                about,
                problem,
                "server",
            )
        )

    def _emit(
        self,
        trace: PacketTrace,
        name: str,
        parent_id: int,
        began: float,
        ended: float,
        *,
        problem: str | None = None,
    ) -> None:
        self._spans.emit(
            TraceSpan(name, trace.trace_id, new_span_id(), parent_id, began, ended, problem=problem)
        )

"""What happens at a commit, in one step without a wait.

OKs are queued, the batch goes through the fan-out, and every connection that received anything is written to
once. OK comes after the commit and before the EVENT (relay.md §11, steps 14 to 16; R-176, R-189).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relayd import failpoints
from relayd.admission.pipeline import Admission
from relayd.admission.refusals import NOT_IN_TIME, NOT_STORABLE, REPEATS_REMOVED
from relayd.admission.request import PublishRequest
from relayd.crowds import CrowdWork
from relayd.faults import FaultLog
from relayd.feed.tail import Tail
from relayd.identity.authors import DECISIVE_TYPES
from relayd.logs import get_logger
from relayd.metrics import Metrics
from relayd.slices import Slices
from relayd.store.types import Appended, AppendOutcome, Disposition, LogEntry, NewPacket

__all__ = ["Commits"]

_log = get_logger("relayd.admission")


class Commits:
    """Passes on the outcome of each append: answers to admission, packets to the feed."""

    def __init__(
        self,
        admission: Admission,
        tail: Tail,
        metrics: Metrics,
        *,
        on_flush: Callable[[], None],
        faults: FaultLog,
        slices: Slices,
    ) -> None:
        self._admission = admission
        self._tail = tail
        self._metrics = metrics
        self._on_flush = on_flush
        self._faults = faults
        self._late: CrowdWork[PublishRequest] = CrowdWork(
            slices, lambda request: admission.failed(request, NOT_IN_TIME), faults, after=on_flush
        )

    def committed(
        self, appended: Appended, batch: Sequence[tuple[NewPacket, PublishRequest]], seconds: float
    ) -> None:
        """A batch is in the log; the commit took `seconds`. Never raises."""
        entries: list[LogEntry] = []
        for (packet, request), place in zip(batch, appended.dispositions, strict=True):
            if place.outcome is AppendOutcome.STORED:
                # The keys are read from what admission has parsed: parsing again may take milliseconds.
                parsed = request.packet if packet.content_type in DECISIVE_TYPES else None
                entries.append(LogEntry(place.sequence, place.received_at, packet, parsed))
            try:
                self._answer(packet, request, place)
            except Exception as error:
                self._admission.lost(request, error)
        try:
            self._tail.committed(appended.previous, entries)
        except Exception as error:
            self._faults.caught("commit", error)
            if entries:
                self._tail.ring(entries[-1].sequence)  # the feed reads it from the log
        self._on_flush()
        self._metrics.commit_packets.observe(len(batch))
        self._metrics.commit_seconds.observe(seconds)

    def _answer(self, packet: NewPacket, request: PublishRequest, place: Disposition) -> None:
        if failpoints.ARMED:
            failpoints.hit("admission.answer")
        outcome, _, received_at, duplicate_of = place
        if outcome is AppendOutcome.STORED:
            witnessed_at = packet.witnessed_at
            self._admission.committed(
                request, received_at if witnessed_at is None else witnessed_at, duplicate=False
            )
        elif outcome is AppendOutcome.DUPLICATE:
            self._admission.committed(request, received_at, duplicate=True, duplicate_of=duplicate_of)
        elif outcome is AppendOutcome.ERASED:
            self._admission.failed(request, REPEATS_REMOVED)
        else:
            _log.error("row_refused", packet_id="0x" + packet.packet_id.hex())
            self._admission.failed(request, NOT_STORABLE)

    def not_stored(self, request: PublishRequest) -> None:
        """The database did not answer in time (R-200); an append in flight may still have taken effect.

        With many others it is answered in one of the next turns of the loop."""
        self._late.members[request] = None
        self._late.go_on()

"""The trace of a publish: its parts adjoin, whatever becomes of it, and it disturbs nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from strata.protocol.errors import ErrorCode, InvalidPacket

from relayd.admission.request import PublishRequest
from relayd.faults import FaultLog
from relayd.store.types import Appended, AppendOutcome, Disposition, NewPacket, StoreUnavailable
from relayd.tracing.publishes import PublishTraces
from relayd.tracing.spans import Sample, TraceSpan

LANE = cast(Any, SimpleNamespace(identity=None))


class Rig:
    def __init__(self, ratio: float = 1) -> None:
        self.now = 10.0
        self.spans: list[TraceSpan] = []
        self.faults: list[str] = []
        self.done: list[Any] = []
        self.traces = PublishTraces(
            cast(Any, SimpleNamespace(emit=self.emit)),
            Sample(ratio, b"key"),
            FaultLog(self.faults.append),
            clock=lambda: self.now,
        )
        self.enqueue = self.traces.queueing(lambda packet, request: self.done.append("queued"))
        self.commit = self.traces.committing(self.committed)

    def emit(self, span: TraceSpan) -> None:
        self.spans.append(span)

    def committed(self, *commit: Any) -> None:
        self.done.append("committed")
        self.now += 0.25  # answers and the feed

    def request(self, number: int, *, type: str = "TEXT") -> tuple[NewPacket, PublishRequest]:
        packet_id = bytes([number]) * 32
        packet = NewPacket(packet_id, "did:strata:a", type, 0, None, b"{}")
        parsed = SimpleNamespace(digest=packet_id, packet_id="0x" + packet_id.hex(), content_type=type)
        request = PublishRequest(b"{...}", None, LANE, self.now)
        request.parsed(cast(Any, parsed))
        return packet, request


def test_check_queue_and_append_fill_a_publish_and_all_processes_know_the_append():
    rig = Rig()
    packet, request = rig.request(7)
    rig.now = 11.0
    rig.enqueue(packet, request)
    rig.now = 13.0
    rig.commit(Appended(4, [Disposition(AppendOutcome.STORED, 5, 0)]), [(packet, request)], 0.5)
    check, queue, append, root = rig.spans
    assert [(s.name, s.began_at, s.ended_at) for s in rig.spans] == [
        ("publish.check", 10.0, 11.0),
        ("publish.queue", 11.0, 12.5),
        ("publish.append", 12.5, 13.0),
        ("publish", 10.0, 13.25),
    ]
    trace = Sample(1, b"key").trace(packet.packet_id)
    assert trace is not None and append.span_id == trace.append_id
    assert {each.trace_id for each in rig.spans} == {trace.trace_id}
    assert {each.parent_id for each in (check, queue, append)} == {root.span_id} and root.parent_id is None
    assert append.attributes == {"relayd.batch.packets": 1, "relayd.sequence": 5}
    assert root.attributes["strata.packet_id"] == "0x" + packet.packet_id.hex()
    assert root.attributes["relayd.outcome"] == "accepted" and root.problem is None
    assert not len(rig.traces) and rig.done == ["queued", "committed"]


@pytest.mark.parametrize(
    ("outcome", "said", "problem"),
    [(AppendOutcome.DUPLICATE, "duplicate", None), (AppendOutcome.INVALID, "not_stored", "not_stored")],
)
def test_what_was_not_stored_has_no_append_that_others_hang_theirs_below(outcome, said, problem):
    rig = Rig()
    packet, request = rig.request(1)
    rig.enqueue(packet, request)
    rig.commit(Appended(4, [Disposition(outcome, 2, 0)]), [(packet, request)], 0.5)
    append, root = rig.spans[-2:]
    trace = Sample(1, b"key").trace(packet.packet_id)
    assert trace is not None and append.span_id != trace.append_id
    assert (root.attributes["relayd.outcome"], root.problem) == (said, problem)


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_refusal_is_a_failed_trace(is_queued):
    rig = Rig()
    packet, request = rig.request(1)
    if is_queued:
        rig.enqueue(packet, request)
    rig.now = 12.0
    rig.traces.refused(request, InvalidPacket(ErrorCode.INVALID_SIGNATURE, "no"))
    check, root = rig.spans
    assert (check.name, root.name, check.parent_id) == ("publish.check", "publish", root.span_id)
    assert check.problem == root.problem == root.attributes["relayd.outcome"] == "invalid_signature"
    assert not len(rig.traces)


def test_what_never_became_a_packet_or_is_not_drawn_leaves_no_trace():
    rig = Rig()
    request = PublishRequest(b"{", None, LANE, rig.now)
    rig.traces.refused(request, InvalidPacket(ErrorCode.INVALID_SCHEMA, "no"))
    rare = Rig(0)
    packet, request = rare.request(1)
    rare.enqueue(packet, request)
    rare.commit(Appended(4, [Disposition(AppendOutcome.STORED, 5, 0)]), [(packet, request)], 0.5)
    rare.traces.refused(request, InvalidPacket(ErrorCode.INVALID_SCHEMA, "no"))
    assert not rig.spans and not rare.spans and not len(rare.traces)


def test_what_a_full_writer_does_not_take_is_told_by_its_refusal():
    rig = Rig()

    def full(packet: object, request: object) -> None:
        raise StoreUnavailable("full")

    packet, request = rig.request(1)
    with pytest.raises(StoreUnavailable):
        rig.traces.queueing(full)(packet, request)
    assert not len(rig.traces)


def test_an_authors_words_are_short_and_whole():
    rig = Rig()
    packet, request = rig.request(1, type="\ud800" + "x" * 1000)
    rig.enqueue(packet, request)
    rig.commit(Appended(4, [Disposition(AppendOutcome.STORED, 5, 0)]), [(packet, request)], 0.5)
    type_ = str(rig.spans[-1].attributes["strata.content_type"])
    assert type_.encode() and len(type_) == 128


def test_a_fault_of_tracing_is_counted_and_the_commit_is_done():
    rig = Rig()
    packet, request = rig.request(1)
    rig.enqueue(packet, request)

    def broken(span: TraceSpan) -> None:
        raise OSError("no")

    rig.traces._spans.emit = broken  # type: ignore[method-assign]
    rig.commit(Appended(4, [Disposition(AppendOutcome.STORED, 5, 0)]), [(packet, request)], 0.5)
    assert rig.done == ["queued", "committed"] and rig.faults == ["tracing"] and not len(rig.traces)

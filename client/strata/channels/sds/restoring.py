"""A participant's parts from what was stored of them."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from strata.channels.sds.bloom import BloomParameters
from strata.channels.sds.bodies import Keyframe
from strata.channels.sds.incoming import IncomingBuffer, Missing, Waiting
from strata.channels.sds.ledger import Ledger
from strata.channels.sds.log import Entry
from strata.channels.sds.messages import HistoryEntry
from strata.channels.sds.outgoing import Outgoing, OutgoingBuffer, OutgoingState
from strata.channels.sds.repair import RepairBuffers
from strata.channels.sds.state import (
    ClockRecord,
    KeyframeRecord,
    KnownRecord,
    LogRecord,
    LostRecord,
    MissingRecord,
    OutgoingRecord,
    RequestRecord,
    ResponseRecord,
    SdsState,
    TipRecord,
    WaitingRecord,
)

__all__ = ["restore"]


def restore(
    state: SdsState,
    parameters: BloomParameters,
    now: int,
    ledger: Ledger,
    outgoing: OutgoingBuffer,
    incoming: IncomingBuffer,
    repair: RepairBuffers,
) -> ClockRecord:
    """Fill the empty parts of a participant; returns the numbers it goes on from."""
    clock = next(iter(state.all(ClockRecord)), ClockRecord(0, 0, 0, 0))
    keyframes = {each.number: Keyframe(each.number, each.data) for each in state.all(KeyframeRecord)}
    ledger.log.last_arrival = clock.last_arrival
    ledger.known.horizon = clock.horizon
    for record in sorted(state.all(KnownRecord), key=lambda each: each.arrival):
        ledger.known.add(record.message_id, record.lamport, record.arrival)
        ledger.filter.insert(record.message_id)
    _restore_log(state, keyframes, ledger)
    for tip in sorted(state.all(TipRecord), key=lambda each: each.since):
        ledger.tips.restore(tip.message_id, min(tip.since, now))
    _restore_outgoing(state, keyframes, parameters, ledger, outgoing, now)
    for waiting in sorted(state.all(WaitingRecord), key=lambda each: each.received_at):
        body = waiting.body.restore(keyframes)
        ledger.archive.adopt(body)
        ledger.filter.insert(waiting.message_id)
        incoming.hold(
            Waiting(
                *(waiting.message_id, waiting.sender_id, waiting.lamport, body, set(waiting.unmet)),
                hint=waiting.retrieval_hint,
                received_at=min(waiting.received_at, now),
            )
        )
    for missing in sorted(state.all(MissingRecord), key=lambda each: each.first_missing_at):
        entry = HistoryEntry(missing.message_id, missing.retrieval_hint, missing.sender_id)
        incoming.missing[missing.message_id] = Missing(entry, min(missing.first_missing_at, now), now)
    incoming.lost.update(dict.fromkeys(each.message_id for each in state.all(LostRecord)))
    _restore_repair(state, repair, now)
    return clock


def _restore_log(state: SdsState, keyframes: dict[int, Keyframe], ledger: Ledger) -> None:
    for record in sorted(state.all(LogRecord), key=lambda each: each.arrival):
        body = record.body.restore(keyframes)
        ledger.archive.adopt(body)
        ledger.log.add(
            Entry(
                *(record.message_id, record.sender_id, record.lamport, body),
                arrival=record.arrival,
                hint=record.retrieval_hint,
                own=record.own,
                floor=record.floor,
                run=record.run,
                dispatched=record.dispatched,
            )
        )
        ledger.known.add(record.message_id, record.lamport, record.arrival)
        if record.dispatched:
            ledger.filter.insert(record.message_id)


def _restore_outgoing(
    state: SdsState,
    keyframes: dict[int, Keyframe],
    parameters: BloomParameters,
    ledger: Ledger,
    outgoing: OutgoingBuffer,
    now: int,
) -> None:
    for record in sorted(state.all(OutgoingRecord), key=lambda each: each.number):
        entry = ledger.log.get(record.message_id)
        if record.body is not None:
            body = record.body.restore(keyframes)
            ledger.archive.adopt(body)
        elif entry is not None:
            body = entry.body
        else:
            continue
        restored = Outgoing(record.message_id, record.number, body, parameters.positions(record.message_id))
        restored.owns_body = record.body is not None
        restored.state = OutgoingState(record.state)
        restored.dispatched_at = record.dispatched_at
        restored.retries = record.retries
        restored.seen_in = set(record.seen_in)
        outgoing.restore(restored, now)


def _restore_repair(state: SdsState, repair: RepairBuffers, now: int) -> None:
    for request in state.all(RequestRecord):
        entry = HistoryEntry(request.message_id, request.retrieval_hint, request.sender_id)
        repair.requests.put(request.message_id, repair.within_reach(request.at, now), entry)
    for response in state.all(ResponseRecord):
        repair.responses.put(response.message_id, repair.within_reach(response.at, now), None)
    # What had been left to others to ask for is asked for anew.
    for missing in state.all(MissingRecord):
        repair.want(HistoryEntry(missing.message_id, missing.retrieval_hint, missing.sender_id), now)
